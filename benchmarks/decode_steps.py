"""Single steps of decoding with windowkv and with transformers' own cache, in turns: the median of their ratios.

`python benchmarks/decode_steps.py [--scenario batch-decode] [--tokens 8192] [--steps 100]`; scenarios are those of
`windowkv bench --list`. Two copies of one model share their weights, so that each step of the one has a step of the
other beside it, and what slows the machine slows both.
"""

import argparse
import copy
import json
from statistics import median
from time import perf_counter

import torch
from transformers import DynamicCache

import windowkv
from windowkv.benchmark import SCENARIOS
from windowkv.continuation import cache_name


@torch.no_grad()
def main() -> None:
    """Measure, and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", choices=SCENARIOS, default="batch-decode")
    parser.add_argument("--tokens", type=int, help="of the prompt, instead of the scenario's")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    scenario = SCENARIOS[options.scenario]
    tokens = options.tokens or scenario.prompt_tokens
    theirs = scenario.load(scenario.dtype).eval()
    ours = windowkv.enable(copy.deepcopy(theirs))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        one.data = other.data
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, theirs.config.vocab_size, (scenario.batch_size, tokens), generator=generator)
    sides = [(theirs, DynamicCache(config=theirs.config)), (ours, windowkv.DynamicSlidingWindowCache(ours.config))]
    name = cache_name(theirs)
    for model, cache in sides:
        for part in prompt.split(512, dim=1):
            model(part, use_cache=True, logits_to_keep=1, **{name: cache})
    seconds: list[list[float]] = [[], []]
    token = prompt[:, :1]
    for step in range(options.steps):
        for side in (0, 1) if step % 2 else (1, 0):
            model, cache = sides[side]
            start = perf_counter()
            model(token, use_cache=True, logits_to_keep=1, **{name: cache})
            seconds[side].append(perf_counter() - start)
    ratios = [their / our for their, our in zip(*seconds, strict=True)]
    report = {"scenario": options.scenario, "tokens": tokens, "steps": options.steps}
    print(json.dumps(report | {"times_faster": round(median(ratios), 3)}, indent=2))


if __name__ == "__main__":
    main()
