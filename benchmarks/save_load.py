"""Saving and loading a cache against the same bytes written and read raw, and against prefilling again, as ratios.

`python benchmarks/save_load.py [--tokens 8192] [--rounds 7] [--folder /tmp]`; medians, runs taking turns.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

import windowkv
from windowkv import demo_model
from windowkv.measurement import measure


def timed(run: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = perf_counter()
    run()
    return perf_counter() - start


def write_raw(path: Path, content: bytes) -> None:
    """As durable as a saved cache, and no more."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    """Measure, and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    model, _ = demo_model.load()
    windowkv.enable(model)
    prompt = torch.randint(3, 1 << 16, (1, options.tokens), generator=torch.Generator().manual_seed(0))
    cache = windowkv.DynamicSlidingWindowCache(model.config)
    prefill = measure(model, prompt, cache, 2).first_token_seconds
    times: dict[str, list[float]] = {"save": [], "write": [], "load": [], "read": []}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        saved, raw = Path(folder) / "saved", Path(folder) / "raw"
        cache.save(saved)
        content = saved.read_bytes()
        for _ in range(options.rounds):
            times["save"].append(timed(lambda: cache.save(saved)))
            times["write"].append(timed(lambda: write_raw(raw, content)))
            times["load"].append(timed(lambda: windowkv.load(saved, model.config)))
            times["read"].append(timed(raw.read_bytes))
    medians = {name: median(values) for name, values in times.items()}
    ours, theirs = medians["save"] + medians["load"], medians["write"] + medians["read"]
    report = {
        "bytes": len(content),
        "save against a raw write": medians["save"] / medians["write"],
        "load against a raw read": medians["load"] / medians["read"],
        "save and load against a raw write and read": ours / theirs,
        "prefill against save and load": prefill / ours,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
