"""What quantised caches cost and save on the real model: bytes, time per token, and how well text is still predicted.

    python benchmarks/quantised_quality.py docs/quantised.png

The text is the language reference that every Python carries along (pydoc_data.topics). Of its first 6,145 tokens 4,096
are the context; the next 2,048 are predicted one after the other, in forwards of 32 tokens, so that all but the newest
64 to 127 are packed by then, as when they are generated. Bytes are of the quantised layers, spare capacity and unpacked
tokens included, against the same layers unquantised in bfloat16. Times are medians of single tokens after 8,192, of
caches that take turns.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

import windowkv
from windowkv import demo_model
from windowkv.cli.sources import python_documentation
from windowkv.continuation import cache_name
from windowkv.plot.canvas import new_figure
from windowkv.plot.measures import draw_bars
from windowkv.quantisation import STEP, Quantisation

CONTEXT, PREDICTED, LONG, CHUNK = 4096, 2048, 8192, 1024
QUANTISED = [(name, which) for which in ("full", "all") for name in ("int8", "fp8", "int4")]
LIMITS = {"int8": (0.2, 0.56), "fp8": (0.2, 0.56), "int4": (1.5, 0.32)}  # % of the likelihood, of the bytes


@dataclass(frozen=True)
class Row:
    """One kind of cache."""

    kv_dtype: str
    quantize: str
    likelihood: float  # mean negative log-likelihood of a token
    more_percent: float  # than unquantised
    bytes_ratio: float
    time_ratio: float  # per token, of a whole decoding step


def forward(model: Any, cache: Any, ids: Tensor, **options: Any) -> Tensor:
    """Logits `[1, n, vocab]` of the next tokens."""
    logits: Tensor = model(ids, use_cache=True, **{cache_name(model): cache}, **options).logits
    return logits


@torch.inference_mode()
def likelihood(model: Any, ids: Tensor, cache: Any) -> float:
    """Mean negative log-likelihood of the tokens after the context."""
    for part in ids[:, :CONTEXT].split(CHUNK, dim=1):
        forward(model, cache, part, logits_to_keep=1)
    total = 0.0
    for at in range(CONTEXT, CONTEXT + PREDICTED, STEP):
        logits = forward(model, cache, ids[:, at : at + STEP]).float().log_softmax(-1)
        total -= float(logits[0].gather(1, ids[0, at + 1 : at + STEP + 1, None]).sum())
    return total / PREDICTED


@torch.inference_mode()
def token_seconds(model: Any, ids: Tensor, caches: dict[Any, Any], rounds: int) -> dict[Any, float]:
    """Seconds of one more token after a long text, by cache."""
    taken: dict[Any, list[float]] = {key: [] for key in caches}
    for cache in caches.values():
        for part in ids[:, :LONG].split(CHUNK, dim=1):
            forward(model, cache, part, logits_to_keep=1)
    for _ in range(rounds):
        for key, cache in caches.items():
            start = perf_counter()
            forward(model, cache, ids[:, :1])
            taken[key].append(perf_counter() - start)
    return {key: median(times[1:]) for key, times in taken.items()}


def bytes_ratio(config: Any, kv_dtype: str, quantize: str) -> float:
    """Bytes of the layers that are quantised, against the same unquantised, in bfloat16."""
    plans = [
        windowkv.plan(config, tokens=LONG, dtype=torch.bfloat16, **options)
        for options in ({"kv_dtype": kv_dtype, "quantize": quantize}, {})
    ]
    packs = Quantisation(kv_dtype, quantize).packs
    specs = windowkv.DynamicSlidingWindowCache(config).layout.layers
    ours, theirs = (
        sum(layer.nbytes for layer, spec in zip(plan.layers, specs, strict=True) if packs(spec)) for plan in plans
    )
    return ours / theirs


def draw(path: Path, rows: list[Row]) -> None:
    """Three panels of bars: bytes, loss of likelihood, time."""
    figure = new_figure(4.2)
    names = [f"{row.kv_dtype}, {row.quantize} layers" for row in rows]
    losses, weights = zip(*(LIMITS[row.kv_dtype] for row in rows), strict=True)
    columns = (
        ("bytes of the quantised layers\n(bfloat16 = 1)", [row.bytes_ratio for row in rows], "{:.3f}", weights),
        ("likelihood lost (%)", [row.more_percent for row in rows], "{:+.2f}", losses),
        ("time per token after 8,192\n(unquantised = 1)", [row.time_ratio for row in rows], "{:.2f}", None),
    )
    for place, (title, values, form, limits) in enumerate(columns, start=1):
        axes = figure.add_subplot(1, 3, place)
        draw_bars(axes, dict(zip(names, values, strict=True)), title=title, form=form, limits=limits)
        axes.tick_params(labelleft=place == 1)
    figure.suptitle(
        "Quantised caches on Gemma 3 270M (black lines: what is the most allowed)", x=0.02, ha="left", fontsize=11
    )
    figure.savefig(path)


def main() -> None:
    """Measure, draw, and write the numbers beside the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--dtype", default="float32", help="what the model computes in")
    parser.add_argument("--text", type=Path, help="another text, instead of Python's language reference")
    parser.add_argument("--rounds", type=int, default=24, help="tokens that are timed with each cache")
    options = parser.parse_args()
    model, tokenizer = demo_model.load(dtype=getattr(torch, options.dtype))
    windowkv.enable(model)
    text = options.text.read_text() if options.text else python_documentation()
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :LONG]
    if ids.shape[1] < LONG:
        parser.error(f"{options.text} has {ids.shape[1]:,} tokens; {LONG:,} are needed")
    kinds: dict[Any, dict[str, Any]] = {None: {}}
    kinds |= {(name, which): {"kv_dtype": name, "quantize": which} for name, which in QUANTISED}

    def caches() -> dict[Any, Any]:
        return {key: windowkv.DynamicSlidingWindowCache(model.config, **kind) for key, kind in kinds.items()}

    seconds = token_seconds(model, ids, caches(), options.rounds)
    lost = {}
    for key, cache in caches().items():
        lost[key] = likelihood(model, ids, cache)
        print(key, lost[key], f"{100 * (lost[key] / lost[None] - 1):+.3f} %", flush=True)
    rows = [
        Row(
            *key,
            likelihood=lost[key],
            more_percent=100 * (lost[key] / lost[None] - 1),
            bytes_ratio=bytes_ratio(model.config, *key),
            time_ratio=seconds[key] / seconds[None],
        )
        for key in QUANTISED
    ]
    report = {"dtype": options.dtype, "unquantised": lost[None], "rows": [asdict(row) for row in rows]}
    options.output.with_suffix(".json").write_text(json.dumps(report, indent=2))
    print(json.dumps(report, indent=2))
    draw(options.output, rows)


if __name__ == "__main__":
    main()
