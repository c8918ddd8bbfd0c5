"""Time and memory against transformers, as ratios: named scenarios, contenders that take turns, medians.

Knows which models and prompts are worth measuring. Knows nothing of how one run is measured, or shown.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

from windowkv import demo_model
from windowkv.cache import DynamicSlidingWindowCache
from windowkv.errors import OptionError
from windowkv.integration import disable, enable
from windowkv.measurement import WARM_UP, Run, measure

Progress = Callable[[str, int, int], None]  # stage, steps done, steps in all

CHUNK = 512  # tokens; what transformers is fastest with on the demo model, of 256 to 2,048


@dataclass(frozen=True)
class Scenario:
    """One workload: a model, and what it is asked for."""

    title: str
    load: Callable[[torch.dtype], Any]
    dtype: torch.dtype
    prompt_tokens: int
    batch_size: int = 1
    new_tokens: int = 32
    turns: int = 1  # how often the prompt and its continuation come, each on top of all before


@dataclass(frozen=True)
class Contender:
    """One way to run a model."""

    prepare: Callable[[Any], Any]  # enable or disable
    new_cache: Callable[[Any], Any]
    prefill_chunk: int | None


CONTENDERS: Mapping[str, Contender] = {
    "transformers": Contender(disable, lambda model: DynamicCache(config=model.config), None),
    "transformers in chunks": Contender(disable, lambda model: DynamicCache(config=model.config), CHUNK),
    "windowkv": Contender(enable, lambda model: DynamicSlidingWindowCache(model.config), None),
}


@dataclass(frozen=True)
class Sample:
    """One contender's round of a scenario."""

    first_token_seconds: float  # of all turns together
    token_seconds: float
    kv_bytes: int  # right after the last prompt
    rise_bytes: int | None
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """All rounds of a scenario, by contender."""

    scenario: Scenario
    samples: Mapping[str, Sequence[Sample]]

    def median(self, contender: str, attribute: str) -> float | None:
        """The median over the rounds; None where the system does not tell."""
        values = [getattr(sample, attribute) for sample in self.samples[contender]]
        return None if None in values else median(values)

    def ratio(self, contender: str, attribute: str) -> float | None:
        """How many times less windowkv needs than another contender."""
        theirs, ours = self.median(contender, attribute), self.median("windowkv", attribute)
        return None if theirs is None or not ours else theirs / ours

    @property
    def tokens_equal(self) -> bool:
        """Whether windowkv's tokens are those of transformers."""
        return self.samples["windowkv"][0].tokens == self.samples["transformers"][0].tokens


def _demo(dtype: torch.dtype) -> Any:
    return demo_model.load(dtype=dtype)[0]


def _mistral_shaped(dtype: torch.dtype, *, hidden: int, window: int) -> Any:
    config = MistralConfig(
        vocab_size=1000,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        sliding_window=window,
        max_position_embeddings=1 << 17,
    )
    torch.manual_seed(0)
    return MistralForCausalLM(config).to(dtype).eval()


_SMALL = partial(_mistral_shaped, hidden=512, window=512)
_WIDE = partial(_mistral_shaped, hidden=1024, window=4096)
SCENARIOS: Mapping[str, Scenario] = {
    "short": Scenario("Gemma 3 270M, shorter than the window", _demo, torch.float32, 256),
    "prefill": Scenario("Gemma 3 270M, a long prompt", _demo, torch.float32, 8192),
    "prefill-bf16": Scenario("Gemma 3 270M, a long prompt, bfloat16", _demo, torch.bfloat16, 8192),
    "memory": Scenario("Gemma 3 270M, a longer prompt", _demo, torch.float32, 16_384, new_tokens=16),
    "memory-bf16": Scenario("Gemma 3 270M, a longer prompt, bfloat16", _demo, torch.bfloat16, 16_384),
    "sliding": Scenario("Mistral-shaped, 4 layers of 512, W=512", _SMALL, torch.float32, 8192),
    "batch-decode": Scenario(
        "Mistral-shaped, 4 layers of 1,024, W=4,096", _WIDE, torch.bfloat16, 4500, batch_size=4, new_tokens=64
    ),
    "turns": Scenario("Gemma 3 270M, 4 turns of 1,024", _demo, torch.float32, 1024, turns=4),
}


def run_scenario(scenario: Scenario, *, rounds: int, progress: Progress | None = None) -> Result:
    """Let the contenders take turns for some rounds, on one model in one process.

    `progress` is told `(contender, runs done, runs in all)`. Raises OptionError for fewer than 1 round.
    """
    if rounds < 1:
        raise OptionError(f"rounds={rounds}: at least 1")
    model = scenario.load(scenario.dtype)
    prompt = _prompt(model, scenario)
    runs = [(name, contender) for _ in range(rounds) for name, contender in CONTENDERS.items()]
    samples: dict[str, list[Sample]] = {name: [] for name in CONTENDERS}
    for done, (name, contender) in enumerate(runs):
        if progress:
            progress(name, done, len(runs))
        with _prepared(model, contender):
            if done < len(CONTENDERS):  # the first round warms up besides
                measure(model, prompt[:, :WARM_UP], contender.new_cache(model), 2)
            samples[name].append(_sample(model, prompt, scenario, contender))
    return Result(scenario, samples)


def _prompt(model: Any, scenario: Scenario) -> Tensor:
    """Ids `[B, n * turns]`, the same ones every time."""
    shape = (scenario.batch_size, scenario.prompt_tokens * scenario.turns)
    highest = min(model.config.get_text_config(decoder=True).vocab_size, 1 << 16)
    return torch.randint(3, highest, shape, generator=torch.Generator().manual_seed(0))


@contextmanager
def _prepared(model: Any, contender: Contender) -> Iterator[None]:
    contender.prepare(model)
    try:
        yield
    finally:
        disable(model)


def _sample(model: Any, prompt: Tensor, scenario: Scenario, contender: Contender) -> Sample:
    cache, history, runs = contender.new_cache(model), prompt[:, :0], list[Run]()
    for part in torch.split(prompt, scenario.prompt_tokens, dim=1):
        history = torch.cat((history, part), dim=1)
        runs.append(measure(model, history, cache, scenario.new_tokens, prefill_chunk=contender.prefill_chunk))
        history = torch.cat((history, torch.tensor(runs[-1].tokens).view(len(prompt), -1)), dim=1)
    rises = [run.rise_bytes for run in runs]
    return Sample(
        first_token_seconds=sum(run.first_token_seconds for run in runs),
        token_seconds=median(run.token_seconds for run in runs),
        kv_bytes=runs[-1].prompt_bytes,
        rise_bytes=None if None in rises else max(rise for rise in rises if rise is not None),
        tokens=tuple(token for run in runs for token in run.tokens),
    )
