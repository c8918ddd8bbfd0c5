"""Time to first token where a prompt's beginning is stored, against none stored and against going on by hand: ratios.

`python benchmarks/prefix_reuse.py [--tokens 8192] [--new 50] [--rounds 5] [--output reuse.png]`; medians, runs taking
turns. With --output it draws what the store saved request by request, and writes that as JSON besides.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

import windowkv
from windowkv import demo_model


def first_token(model: torch.nn.Module, prompt: Tensor, **options: object) -> float:
    """Seconds until the first new token."""
    start = perf_counter()
    model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=1, do_sample=False, **options)
    return perf_counter() - start


def main() -> None:
    """Measure, and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--new", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="a picture of what was reused")
    options = parser.parse_args()
    model, _ = demo_model.load()
    generator = torch.Generator().manual_seed(0)
    prefix = torch.randint(3, 1 << 16, (1, options.tokens), generator=generator)
    store = windowkv.PrefixStore(max_bytes=1 << 30)
    windowkv.enable(model, prefix_store=store)
    stats = [store.stats]
    first_token(model, prefix)
    stats.append(store.stats)
    by_hand = windowkv.DynamicSlidingWindowCache(model.config)
    windowkv.enable(model)
    first_token(model, prefix, past_key_values=by_hand)
    times: dict[str, list[float]] = {"nothing": [], "store": [], "by hand": []}
    for turn in range(options.rounds):
        suffix = torch.randint(3, 1 << 16, (1, options.new), generator=generator)
        prompt = torch.cat((prefix, suffix), dim=1)
        if turn < 2:
            times["nothing"].append(first_token(model, prompt))
        times["by hand"].append(first_token(model, prompt, past_key_values=by_hand.fork()))
        windowkv.enable(model, prefix_store=store)
        times["store"].append(first_token(model, prompt))
        stats.append(store.stats)
        windowkv.enable(model)
    medians = {name: median(values) for name, values in times.items()}
    report = {
        "without the store, against with it": medians["nothing"] / medians["store"],
        "with the store, against a fork made by hand": medians["store"] / medians["by hand"],
        "bytes in the store": store.stats.nbytes,
        "hits": store.stats.hits,
    }
    print(json.dumps(report, indent=2))
    if options.output:
        options.output.with_suffix(".json").write_text(json.dumps([asdict(each) for each in stats], indent=2))
        windowkv.plot.reuse(stats).savefig(options.output)


if __name__ == "__main__":
    main()
