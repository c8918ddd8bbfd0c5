"""Scenarios: contenders that take turns on one model, and ratios of their medians."""

import pytest
import torch

from tiny import MODELS
from windowkv import OptionError
from windowkv.benchmark import CONTENDERS, SCENARIOS, Result, Sample, Scenario, run_scenario

TINY = Scenario("tiny", lambda dtype: MODELS["gemma3"]().to(dtype), torch.float32, 40, batch_size=2, new_tokens=4)


def sample(seconds: float, rise: int | None = 10) -> Sample:
    return Sample(seconds, 2 * seconds, kv_bytes=100, rise_bytes=rise, tokens=(1, 2))


def test_contenders_take_turns_and_agree() -> None:
    seen: list[tuple[str, int, int]] = []
    result = run_scenario(TINY, rounds=2, progress=lambda *step: seen.append(step))
    assert [name for name, _, _ in seen] == [*CONTENDERS] * 2
    assert seen[-1][1:] == (5, 6)
    assert {name: len(samples) for name, samples in result.samples.items()} == dict.fromkeys(CONTENDERS, 2)
    assert result.tokens_equal
    assert all(len(each.tokens) == 2 * 4 for samples in result.samples.values() for each in samples)


def test_ratios_are_of_medians() -> None:
    result = Result(
        TINY, {"transformers": [sample(3), sample(9), sample(4)], "windowkv": [sample(2), sample(2), sample(50)]}
    )
    assert result.median("transformers", "first_token_seconds") == 4
    assert result.ratio("transformers", "first_token_seconds") == 2


def test_what_the_system_does_not_tell_has_no_ratio() -> None:
    result = Result(TINY, {"transformers": [sample(3, None), sample(3)], "windowkv": [sample(2), sample(2)]})
    assert result.ratio("transformers", "rise_bytes") is None


def test_a_model_is_left_as_it_was() -> None:
    model = MODELS["mistral"]()
    before = dict(vars(model))
    run_scenario(Scenario("tiny", lambda _: model, torch.float32, 20, new_tokens=2), rounds=1)
    assert vars(model) == before
    assert model.config._attn_implementation == "sdpa"


def test_no_rounds_are_refused() -> None:
    with pytest.raises(OptionError, match="rounds=0"):
        run_scenario(TINY, rounds=0)


def test_every_scenario_decodes_and_names_its_model() -> None:
    assert all(each.new_tokens >= 2 and each.title for each in SCENARIOS.values())
