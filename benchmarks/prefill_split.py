"""Where the time to the first token goes, part by part, as a prompt grows: `python benchmarks/prefill_split.py OUT`.

Times are shares of what windowkv takes per token of the shortest prompt, so that they mean the same on any machine.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import torch
from transformers import DynamicCache

import windowkv
from windowkv import demo_model
from windowkv.measurement import measure

PARTS = ("MLP", "projections", "norms, rotary, the rest", "attention, sliding layers", "attention, full layers")


@contextmanager
def timed(model: torch.nn.Module) -> Iterator[dict[str, float]]:
    """Seconds by part of everything that the model computes meanwhile; a module's time counts its children's."""
    spent: dict[str, float] = defaultdict(float)
    starts: dict[torch.nn.Module, float] = {}
    hooks = []

    def watch(module: torch.nn.Module, part: str) -> None:
        def before(*_: object) -> None:
            starts[module] = perf_counter()

        def after(*_: object) -> None:
            spent[part] += perf_counter() - starts.pop(module)

        hooks.extend((module.register_forward_pre_hook(before), module.register_forward_hook(after)))

    for layer in model.model.layers:
        attention = layer.self_attn
        watch(layer.mlp, "MLP")
        watch(attention, f"attention, {'sliding' if attention.is_sliding else 'full'} layers")
        kind = f"inside {'sliding' if attention.is_sliding else 'full'}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            watch(getattr(attention, name), f"{kind} projections")
        for name in ("q_norm", "k_norm"):
            watch(getattr(attention, name), f"{kind} norms")
    try:
        yield spent
    finally:
        for hook in hooks:
            hook.remove()


def split(model: torch.nn.Module, length: int, *, enabled: bool) -> dict[str, float]:
    """Seconds per token of prompt, by part."""
    (windowkv.enable if enabled else windowkv.disable)(model)
    cache = windowkv.DynamicSlidingWindowCache(model.config) if enabled else DynamicCache(config=model.config)
    prompt = torch.randint(3, 1 << 16, (1, length), generator=torch.Generator().manual_seed(0))
    with timed(model) as spent:
        # The second token is needed to end the run, and costs next to nothing beside a long prompt.
        total = measure(model, prompt, cache, 2).first_token_seconds
    windowkv.disable(model)
    for kind in ("sliding", "full"):
        inside = [spent.pop(f"inside {kind} {what}") for what in ("projections", "norms")]
        spent[f"attention, {kind} layers"] -= sum(inside)
        spent["projections"] += inside[0]
    spent["norms, rotary, the rest"] = total - sum(spent.values())
    return {part: spent[part] / length for part in PARTS}


def main() -> None:
    """Measure, draw, and write the numbers beside the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16_384, 32_768])
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    model, _ = demo_model.load(dtype=getattr(torch, options.dtype))
    split(model, 64, enabled=True)  # loads kernels and thread pools
    shortest = min(options.lengths)
    columns = {f"transformers\n{shortest:,}": split(model, shortest, enabled=False)}
    for length in sorted(options.lengths):
        columns[f"windowkv\n{length:,}"] = split(model, length, enabled=True)
    unit = sum(columns[f"windowkv\n{shortest:,}"].values())
    shares = {name: {part: t / unit for part, t in column.items()} for name, column in columns.items()}
    windowkv.plot.parts(
        shares,
        amount="time per token of prompt (windowkv, shortest prompt = 1)",
        title="Only the full layers' attention grows with the prompt",
    ).savefig(options.output)
    options.output.with_suffix(".json").write_text(json.dumps(shares, indent=2))
    print(json.dumps(shares, indent=2))


if __name__ == "__main__":
    main()
