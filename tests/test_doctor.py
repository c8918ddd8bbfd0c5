"""Whose fault it is: what doctor says of caches that are known to be wrong, or to lack something."""

from dataclasses import replace
from typing import Any

import transformers as hf
from transformers import DynamicCache

from tiny import shared_model
from windowkv import DynamicSlidingWindowCache, InputError
from windowkv.doctor import CACHES, CacheKind, Outcome, examine
from windowkv.operations import OPERATIONS
from windowkv.tiny_model import tiny_model


def outcomes(model: Any, kind: CacheKind, *names: str) -> list[Outcome]:
    examination = examine(model, caches=[kind], operations={name: OPERATIONS[name] for name in names or OPERATIONS})
    return [cell.outcome for _, _, cell in examination.all()]


def _too_small(model: Any, tokens: int) -> Any:
    return DynamicSlidingWindowCache(hf.MistralConfig(num_hidden_layers=4, sliding_window=4), rollback=0)


def _refusing(model: Any, tokens: int) -> Any:
    raise InputError("no room")


def _broken(model: Any, tokens: int) -> Any:
    raise RuntimeError("no idea")


def test_a_cache_that_drops_too_early_fails_where_it_shows() -> None:
    kind = CacheKind("too small", _too_small)
    assert outcomes(shared_model("mistral"), kind, "instantiate", "generate short") == [Outcome.SAME] * 2
    assert outcomes(shared_model("mistral"), kind, "generate past the window", "two turns") == [Outcome.FAILURE] * 2


def test_an_error_on_purpose_is_a_refusal_and_any_other_a_failure() -> None:
    model = shared_model("mistral")
    assert set(outcomes(model, CacheKind("refusing", _refusing))) == {Outcome.REFUSED}
    assert set(outcomes(model, CacheKind("broken", _broken))) == {Outcome.FAILURE}


def test_what_fails_with_the_cache_of_transformers_too_is_its_fault() -> None:
    plain = CacheKind("plain", lambda model, tokens: DynamicCache(config=model.config))
    model = tiny_model(hf.MoshiConfig())  # its config names a window that its code never applies
    assert outcomes(model, plain, "generate past the window") == [Outcome.THEIRS]


def test_a_window_that_no_code_applies_is_none_with_windowkv() -> None:
    model = tiny_model(hf.MoshiConfig())
    for kind in CACHES:
        if kind.ours:
            static = kind.name == "SlidingWindowCache"  # generate masks what such a cache holds itself, by the window
            assert set(outcomes(model, kind)) == {Outcome.REFUSED if static else Outcome.SAME}


def test_a_static_cache_may_have_the_faults_of_a_static_one() -> None:
    model = tiny_model(hf.MoshiConfig())
    static = next(kind for kind in CACHES if kind.name == "StaticCache")
    plain = CacheKind("plain", static.new)
    assert outcomes(model, plain, "generate past the window") == [Outcome.FAILURE]
    assert outcomes(model, replace(plain, theirs=(static.new,)), "generate past the window") == [Outcome.THEIRS]


def test_what_a_cache_lacks_is_said() -> None:
    row = examine(shared_model("mistral"), operations={"fork": OPERATIONS["fork"]}).cells["fork"]
    assert str(row["DynamicCache"]) == "does not apply: a DynamicCache has no fork"


def test_only_failures_of_windowkv_count() -> None:
    model = shared_model("mistral")
    assert examine(model).cells["crop"]["StaticCache"].outcome is Outcome.FAILURE  # silently wrong past the window
    assert examine(model).failures == []


def test_a_model_is_as_it_was_afterwards() -> None:
    model = tiny_model(hf.MistralConfig())
    before = dict(vars(model)), dict(vars(model.config)), len(model._forward_hooks)
    examine(model)
    assert (dict(vars(model)), dict(vars(model.config)), len(model._forward_hooks)) == before
