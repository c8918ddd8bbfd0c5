"""What a comparison measures, and that it leaves the model as it was."""

import sys
from itertools import pairwise
from typing import Any

import pytest
import torch

from tiny import MODELS, STATEFUL, WINDOW, shared_model, tokens
from windowkv import OptionError
from windowkv.comparison import Comparison, compare, curves, windows
from windowkv.planner import plan

PROMPT, NEW = 400, 6


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compare(shared_model("gemma3"), tokens(1, PROMPT), new_tokens=NEW)


def hooks(model: Any) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("name", ["mistral", "qwen2", "gemma3", "gemma3n", "gpt_oss", "llama4-chunk8"])
def test_the_bound_is_what_the_cache_holds_at_the_end_to_the_byte(name: str) -> None:
    result = compare(shared_model(name), tokens(1, PROMPT), new_tokens=NEW)
    assert result.tokens_equal
    assert result.windowkv.points[-1] == (PROMPT + NEW - 1, result.bound_bytes)
    assert result.windowkv.decoding_bytes == result.bound_bytes


def test_transformers_holds_the_whole_prompt_until_the_next_token(comparison: Comparison) -> None:
    whole = plan(shared_model("gemma3").config, tokens=PROMPT).baseline_bytes
    assert whole <= comparison.baseline.prompt_bytes < whole + 100  # each of its sliding layers counts in a tensor
    assert comparison.baseline.decoding_bytes < whole / 2


def test_windowkv_never_holds_the_whole_prompt(comparison: Comparison) -> None:
    planned = plan(shared_model("gemma3").config, tokens=PROMPT)
    assert comparison.windowkv.prompt_bytes == planned.total_bytes < planned.baseline_bytes


def test_every_forward_is_recorded_once_in_both_runs(comparison: Comparison) -> None:
    for run in (comparison.baseline, comparison.windowkv):
        assert [seen for seen, _ in run.points] == [PROMPT + i for i in range(NEW)]
        assert len(run.tokens) == NEW
        assert run.first_token_seconds > 0
        assert run.token_seconds > 0


def test_an_end_of_text_token_does_not_end_a_run_early() -> None:
    model = MODELS["gemma3"]()
    usual = compare(model, tokens(1, 20), new_tokens=4).windowkv.tokens
    model.generation_config.eos_token_id = usual[0]
    result = compare(model, tokens(1, 20), new_tokens=4)
    assert len(result.windowkv.tokens) == len(result.baseline.tokens) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process its peak and starts it anew")
def test_the_peak_is_that_of_one_run_and_not_of_what_came_before() -> None:
    quarter = 1 << 26  # numbers in 256 MiB

    def take_memory(stage: str, done: int, steps: int) -> None:
        if stage == "transformers" and done == 1:
            torch.ones(quarter).sum()

    result = compare(shared_model("gemma3"), tokens(1, PROMPT), new_tokens=2, progress=take_memory)
    assert result.baseline.peak_bytes is not None
    assert result.windowkv.peak_bytes is not None
    assert result.baseline.peak_bytes > result.windowkv.peak_bytes + 2 * quarter


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError])
def test_without_a_peak_from_the_system_there_is_none(monkeypatch: pytest.MonkeyPatch, error: type[OSError]) -> None:
    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr("windowkv.measurement.Path.write_text", refuse)
    assert compare(shared_model("gemma3"), tokens(1, PROMPT), new_tokens=2).windowkv.peak_bytes is None


def test_progress_goes_through_the_layers_and_then_the_tokens() -> None:
    seen: list[tuple[str, int, int]] = []
    compare(shared_model("gemma3"), tokens(1, PROMPT), new_tokens=NEW, progress=lambda *step: seen.append(step))
    steps = 4 + NEW
    assert seen == [(stage, done, steps) for stage in ("transformers", "windowkv") for done in range(steps + 1)]


def test_nothing_stays_on_the_model_not_even_after_an_interruption() -> None:
    model = MODELS["gemma3"]()

    def interrupt(stage: str, done: int, steps: int) -> None:
        if done == 2:
            assert hooks(model) > 0
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(model, tokens(1, PROMPT), new_tokens=NEW, progress=interrupt)
    assert hooks(model) == 0
    compare(model, tokens(1, PROMPT), new_tokens=NEW)
    assert hooks(model) == 0


def test_one_new_token_is_refused() -> None:
    with pytest.raises(OptionError, match="new_tokens=1"):
        compare(shared_model("gemma3"), tokens(1, PROMPT), new_tokens=1)


def test_layers_that_transformers_keeps_are_named_and_not_in_the_bound() -> None:
    model = STATEFUL["lfm2"]()
    result = compare(model, tokens(1, PROMPT), new_tokens=NEW)
    assert result.tokens_equal
    assert result.uncounted == (0, 2)
    assert result.bound_bytes < result.windowkv.points[-1][1]


@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama4-chunk8"])
def test_curves_say_what_a_real_run_holds(name: str) -> None:
    model = shared_model(name)
    result = compare(model, tokens(1, PROMPT), new_tokens=2)
    at_prompt, one_later = (curves(model.config, dtype=model.dtype, up_to=PROMPT + later) for later in (0, 1))
    for run, first, second in zip((result.baseline, result.windowkv), at_prompt, one_later, strict=True):
        assert run.points == (first.after_prompt[-1], second.decoding[-1])


def test_curves_know_the_dtype_and_the_edge_of_the_window() -> None:
    config = shared_model("gemma3").config
    (old, new), (_, halved) = (curves(config, dtype=dtype, up_to=2000) for dtype in (torch.float32, torch.bfloat16))
    assert [2 * nbytes for _, nbytes in halved.decoding] == [nbytes for _, nbytes in new.decoding]
    assert WINDOW in dict(old.after_prompt)
    assert all(before[0] < after[0] and before[1] <= after[1] for before, after in pairwise(new.after_prompt))


@pytest.mark.parametrize(("name", "expected"), [("gemma3", (WINDOW,)), ("mistral-full", ()), ("llama4-chunk4", (4,))])
def test_windows_are_named_once(name: str, expected: tuple[int, ...]) -> None:
    assert windows(shared_model(name).config) == expected
