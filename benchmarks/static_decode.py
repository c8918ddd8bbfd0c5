"""A compiled step of decoding past the window, with `SlidingWindowCache` against transformers' `StaticCache`: the ratio.

`python benchmarks/static_decode.py [--window 1024] [--steps 50] [--rounds 9]`; a random Mistral of 4 layers, 512 wide, 8
heads and 2 of keys and values, whose forward is compiled once for each cache; masks are made outside of the graph, as
`generate` does. Medians of rounds that take turns. Also prints how many graphs were compiled after the first steps.
"""

import argparse
import json
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import MistralConfig, MistralForCausalLM, StaticCache

import windowkv


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
        self.produced: list[int] = []

    def feed(self, ids: Tensor, forward: Callable[..., object]) -> Tensor:
        """Feed ids `[1, n]` and return the next one `[1, 1]`."""
        positions = torch.arange(self.positions, self.positions + ids.shape[1])[None]
        self.positions += ids.shape[1]
        inputs = self.model.prepare_inputs_for_generation(
            ids, past_key_values=self.cache, use_cache=True, position_ids=positions, attention_mask=None
        )
        token = forward(**inputs, logits_to_keep=1).logits[:, -1:].argmax(-1)  # type: ignore[attr-defined]
        self.produced.append(int(token))
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
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    prompt = torch.randint(3, 1024, (1, options.window + 100), generator=torch.Generator().manual_seed(0))
    length = prompt.shape[1] + options.steps * (options.rounds + 2) + 8
    model = make_model(options.window)
    ours = Decoding(model, windowkv.SlidingWindowCache(model.config, max_cache_len=length))
    theirs = Decoding(make_model(options.window), StaticCache(config=model.config, max_cache_len=length))
    tokens = {run: run.steps(run.feed(prompt, run.model), 8) for run in (ours, theirs)}
    graphs = counters["stats"]["unique_graphs"]
    seconds: dict[Decoding, list[float]] = {ours: [], theirs: []}
    ratios = []
    for _ in range(options.rounds):
        for run, taken in seconds.items():
            start = perf_counter()
            tokens[run] = run.steps(tokens[run], options.steps)
            taken.append((perf_counter() - start) / options.steps)
        ratios.append(seconds[theirs][-1] / seconds[ours][-1])
    result = {
        "window": options.window,
        "ms_per_token": round(1e3 * median(seconds[ours]), 3),
        "static_cache_ms_per_token": round(1e3 * median(seconds[theirs]), 3),
        "ratio_of_medians": round(median(seconds[theirs]) / median(seconds[ours]), 3),
        "median_of_ratios": round(median(ratios), 3),
        "graphs_at_first": graphs,
        "graphs_compiled_later": counters["stats"]["unique_graphs"] - graphs,
        "tokens_equal": ours.produced == theirs.produced,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
