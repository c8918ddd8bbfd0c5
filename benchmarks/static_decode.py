"""A compiled step of decoding past the window: `SlidingWindowCache` against transformers' `StaticCache`, as ratios.

`python benchmarks/static_decode.py [--window 1024] [--batch 1] [--steps 50] [--rounds 9]`; a random Mistral of 4
layers, 512 wide, with 8 heads and 2 of keys and values, compiled once for each contender in the same way, and masked
outside of the graph as `generate` does. Three contenders take turns: an enabled model with our cache, a plain model
with our cache, and a plain model with transformers'. Medians, of time and of processor time, which other processes
disturb less. Also prints how many graphs were compiled after the first steps.
"""

import argparse
import json
from collections.abc import Callable
from statistics import median
from time import perf_counter, process_time

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import MistralConfig, MistralForCausalLM, StaticCache

import windowkv
from windowkv.continuation import cache_name


def make_model(window: int) -> MistralForCausalLM:
    """Random weights: what a step takes does not depend on them."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=window,
        max_position_embeddings=32768,
    )
    return MistralForCausalLM(config).eval()


class Decoding:
    """One model's compiled decoding into one cache."""

    def __init__(self, model: MistralForCausalLM, cache: windowkv.SlidingWindowCache | StaticCache) -> None:
        """Compile at the first step."""
        self.model, self.cache, self.positions = model, cache, 0
        self.forward = torch.compile(model.forward)
        self.produced: list[list[int]] = []

    def feed(self, ids: Tensor, forward: Callable[..., object]) -> Tensor:
        """Feed ids `[B, n]` and return the next ones `[B, 1]`."""
        positions = torch.arange(self.positions, self.positions + ids.shape[1])[None]
        self.positions += ids.shape[1]
        inputs = self.model.prepare_inputs_for_generation(
            ids, use_cache=True, position_ids=positions, attention_mask=None, **{cache_name(self.model): self.cache}
        )
        token = forward(**inputs, logits_to_keep=1).logits[:, -1:].argmax(-1)  # type: ignore[attr-defined]
        self.produced.append(token.flatten().tolist())
        return token

    def steps(self, token: Tensor, count: int) -> Tensor:
        """Decode."""
        for _ in range(count):
            token = self.feed(token, self.forward)
        return token


@torch.no_grad()
def main() -> None:
    """Measure, and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    prompt = torch.randint(3, 1024, (options.batch, options.window + 100), generator=torch.Generator().manual_seed(0))
    length = prompt.shape[1] + options.steps * (options.rounds + 2) + 8
    enabled, plain, theirs = (make_model(options.window) for _ in range(3))
    windowkv.enable(enabled)
    runs = {
        "windowkv": Decoding(enabled, windowkv.SlidingWindowCache(enabled.config, max_cache_len=length)),
        "cache_alone": Decoding(plain, windowkv.SlidingWindowCache(plain.config, max_cache_len=length)),
        "static_cache": Decoding(theirs, StaticCache(config=theirs.config, max_cache_len=length)),
    }
    tokens = {name: run.steps(run.feed(prompt, run.model), 8) for name, run in runs.items()}
    graphs = counters["stats"]["unique_graphs"]
    wall: dict[str, list[float]] = {name: [] for name in runs}
    processor: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            start, busy = perf_counter(), process_time()
            tokens[name] = run.steps(tokens[name], options.steps)
            wall[name].append(1e3 * (perf_counter() - start) / options.steps)
            processor[name].append(1e3 * (process_time() - busy) / options.steps)
    result = {
        name: {
            "ms_per_token": round(median(wall[name]), 3),
            "faster_than_static_cache": round(median(wall["static_cache"]) / median(wall[name]), 3),
            "in_processor_time": round(median(processor["static_cache"]) / median(processor[name]), 3),
            "tokens_equal": run.produced == runs["static_cache"].produced,
        }
        for name, run in runs.items()
    }
    compiled = {"at_first": graphs, "later": counters["stats"]["unique_graphs"] - graphs}
    report = {"window": options.window, "batch": options.batch, **result, "graphs_compiled": compiled}
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
