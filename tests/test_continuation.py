"""generate on a cache that has seen another text: back to where they agree, or anew; never a wrong token."""

import copy
import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import windowkv
from tiny import (
    ARCHITECTURES,
    MODELS,
    STATEFUL,
    WINDOW,
    cache_argument,
    counted,
    fed,
    generated,
    left_padded,
    logits,
    shared_model,
    tokens,
    uncached,
)
from windowkv import DynamicSlidingWindowCache, InputError, RollbackError
from windowkv.continuation import after_forward


def enabled(name: str, **options: Any) -> Any:
    return windowkv.enable((MODELS | STATEFUL)[name](), **options)


def used(model: Any, ids: Tensor, new: int = 10, *, mask: Tensor | None = None, **options: Any) -> Any:
    """A cache that generate has filled with a text and its continuation."""
    cache = DynamicSlidingWindowCache(model.config, **options)
    generated(model, ids, new, mask, **cache_argument(model, cache))
    return cache


def changed(ids: Tensor, at: int) -> Tensor:
    """The same ids but for one."""
    other = ids.clone()
    other[0, at] = 3 + (other[0, at] - 2) % 100
    return other


@pytest.mark.parametrize("rollback", [0, 64])
@pytest.mark.parametrize("at", [0, 9, 28, 29])
@pytest.mark.parametrize("name", [*ARCHITECTURES, *STATEFUL])
def test_an_edited_history(name: str, at: int, rollback: int) -> None:
    model, ids = enabled(name), tokens(1, 30)
    cache = used(model, ids, rollback=rollback)
    other = changed(ids, at)
    expected = uncached(model, other, 20)
    assert torch.equal(generated(model, other, 20, **cache_argument(model, cache)), expected)
    # And again on what that left, from which nothing has been taken for granted.
    assert torch.equal(generated(model, ids, 20, **cache_argument(model, cache)), uncached(model, ids, 20))


@pytest.mark.parametrize("length", [1, 2, WINDOW, 29])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_fewer_tokens_than_the_cache_has_seen(name: str, length: int) -> None:
    model, ids = enabled(name), tokens(1, 30)
    cache = used(model, ids)
    assert torch.equal(
        generated(model, ids[:, :length], 20, **cache_argument(model, cache)), uncached(model, ids[:, :length], 20)
    )


@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama4-chunk8"])
def test_only_what_follows_the_common_prefix_is_computed(name: str) -> None:
    model, ids = enabled(name), tokens(1, 40)
    cache = used(model, ids, new=1)
    other = torch.cat((ids[:, :36], tokens(1, 4, seed=5)), dim=1)
    with counted(model) as widths:
        reply = generated(model, other, 5, **cache_argument(model, cache))
    assert widths == [4, 1, 1, 1, 1]
    assert torch.equal(reply, uncached(model, other, 5))


@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama4-chunk8"])
def test_the_same_prompt_again_leaves_one_token_to_run(name: str) -> None:
    model, ids = enabled(name), tokens(1, 20)
    cache = used(model, ids, new=10)
    with counted(model) as widths:
        reply = generated(model, ids, 10, **cache_argument(model, cache))
    assert widths[0] == 1
    assert torch.equal(reply, uncached(model, ids, 10))


def test_a_growing_chat_computes_new_tokens_only() -> None:
    model, history = enabled("gemma3"), tokens(1, 25)
    cache = DynamicSlidingWindowCache(model.config)
    for turn in range(5):
        with counted(model) as widths:
            reply = generated(model, history, 6, **cache_argument(model, cache))
        assert sum(widths) == (25 if not turn else 1 + 4) + 5
        assert torch.equal(reply, uncached(shared_model("gemma3"), history, 6))
        history = torch.cat((history, reply, tokens(1, 4, seed=turn)), dim=1)


def test_what_is_out_of_reach_is_computed_anew_and_said(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = enabled("mistral"), tokens(1, 200)
    cache = used(model, ids)
    other = changed(ids, 9)
    with caplog.at_level(logging.INFO, logger="windowkv"), counted(model) as widths:
        reply = generated(model, other, 5, **cache_argument(model, cache))
    assert widths[0] == 200
    assert torch.equal(reply, uncached(shared_model("mistral"), other, 5))
    assert "differs from this cache's after 9 of its 209 tokens, and is computed anew" in caplog.text


def test_going_back_is_said_too(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = enabled("mistral"), tokens(1, 30)
    cache = used(model, ids)
    with caplog.at_level(logging.INFO, logger="windowkv"):
        generated(model, changed(ids, 25), 5, **cache_argument(model, cache))
    assert "after 25 of its 39 tokens, and goes on there" in caplog.text


@pytest.mark.parametrize("name", ["mistral", "gemma3n", "llama4-chunk8"])
def test_rows_go_back_to_where_the_first_of_them_differs(name: str) -> None:
    model, ids = enabled(name), tokens(3, 30)
    cache = used(model, ids)
    other = ids.clone()
    other[1, 20:] = tokens(1, 10, seed=4)
    assert torch.equal(generated(model, other, 10, **cache_argument(model, cache)), uncached(model, other, 10))


def test_another_padding_of_the_same_ids_is_another_text() -> None:
    model = enabled("mistral")
    ids, mask = left_padded([tokens(1, 20)[0], tokens(1, 12, seed=1)[0]])
    cache = used(model, ids, mask=mask)
    other = mask.clone()
    other[1, 10] = 0
    for new_mask in (mask, other, torch.ones_like(mask)):
        expected = uncached(shared_model("mistral"), ids, 10, new_mask)
        assert torch.equal(generated(model, ids, 10, new_mask, **cache_argument(model, cache)), expected)


@pytest.mark.parametrize("chunk", [7, 100])
def test_prompts_in_chunks(chunk: int) -> None:
    model, ids = enabled("gemma3", prefill_chunk=chunk), tokens(1, 50)
    cache = used(model, ids)
    for at in (45, 3):
        other = changed(ids, at)
        expected = uncached(shared_model("gemma3"), other, 10)
        assert torch.equal(generated(model, other, 10, **cache_argument(model, cache)), expected)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}])
def test_beams(options: dict[str, Any]) -> None:
    model, ids = enabled("gemma3"), tokens(1, 30)
    cache = DynamicSlidingWindowCache(model.config)
    for text in (ids, changed(ids, 25), changed(ids, 2)):
        expected = generated(shared_model("gemma3"), text, 10, use_cache=False, **options)
        assert torch.equal(generated(model, text, 10, **options, **cache_argument(model, cache)), expected)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_assisted_decoding_on_a_cache_that_has_seen_something(name: str) -> None:
    model, ids = enabled(name), tokens(1, 30)
    cache = used(model, ids)
    for text in (changed(ids, 25), torch.cat((ids, tokens(1, 5, seed=3)), dim=1)):
        expected = uncached(shared_model(name), text, 20)
        reply = generated(model, text, 20, prompt_lookup_num_tokens=3, **cache_argument(model, cache))
        assert torch.equal(reply, expected)
    for text in (ids, changed(ids, 3)):
        expected = uncached(shared_model(name), text, 20)
        assert torch.equal(generated(model, text, 20, **cache_argument(model, cache)), expected)


def test_a_cache_that_was_fed_by_hand_continues_as_it_did() -> None:
    model, ids = enabled("mistral"), tokens(1, 30)
    cache = DynamicSlidingWindowCache(model.config)
    fed(model, cache, ids, 30)
    assert cache.history is None
    placeholders = torch.cat((torch.full((1, 30), 5), tokens(1, 4, seed=2)), dim=1)
    whole = torch.cat((ids, tokens(1, 4, seed=2)), dim=1)
    reply = generated(model, placeholders, 10, **cache_argument(model, cache))
    assert torch.equal(reply, uncached(shared_model("mistral"), whole, 10))


def test_new_tokens_alone_continue_as_they_did() -> None:
    model, ids = enabled("mistral"), tokens(1, 30)
    cache = used(model, ids, new=1)
    new = tokens(1, 4, seed=2)
    reply = generated(model, new, 10, torch.ones(1, 34, dtype=torch.long), **cache_argument(model, cache))
    expected = uncached(shared_model("mistral"), torch.cat((ids, new), dim=1), 10)
    assert torch.equal(reply, expected)
    whole = torch.cat((ids, new, reply, tokens(1, 3)), dim=1)
    expected = uncached(shared_model("mistral"), whole, 10)
    assert torch.equal(generated(model, whole, 10, **cache_argument(model, cache)), expected)


def test_forwards_by_hand_in_between_are_remembered_too() -> None:
    model, ids = enabled("mistral"), tokens(1, 30)
    cache = used(model, ids, new=1)
    fed(model, cache, tokens(1, 5, seed=8), 5)
    text = torch.cat((ids, tokens(1, 9, seed=9)), dim=1)
    expected = uncached(shared_model("mistral"), text, 10)
    assert torch.equal(generated(model, text, 10, **cache_argument(model, cache)), expected)


class Stop(Exception):
    pass


def failing(*_: Any) -> None:
    raise Stop


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("first", [True, False])
def test_a_forward_that_broke_off_in_the_middle_is_computed_anew(first: bool, layer: int) -> None:
    model, ids = enabled("gemma3"), tokens(1, 30)
    cache = DynamicSlidingWindowCache(model.config) if first else used(model, ids)
    hook = model.model.layers[layer].register_forward_hook(failing)
    with pytest.raises(Stop):
        generated(model, ids, 5, **cache_argument(model, cache))
    hook.remove()
    with pytest.raises(InputError, match="did not end"):
        generated(model, tokens(1, 2), 5, torch.ones(1, 42, dtype=torch.long), **cache_argument(model, cache))
    expected = uncached(shared_model("gemma3"), ids, 10)
    assert torch.equal(generated(model, ids, 10, **cache_argument(model, cache)), expected)


def test_a_break_is_not_forgotten_by_what_follows() -> None:
    model, ids = enabled("gemma3"), tokens(1, 30)
    cache = used(model, ids, new=1)
    hook = model.model.layers[2].register_forward_hook(failing)
    with pytest.raises(Stop):
        fed(model, cache, tokens(1, 1), 1)
    hook.remove()
    with pytest.raises(InputError, match="did not end"):
        fed(model, cache, tokens(1, 1), 1)
    with pytest.raises(RollbackError, match="did not end"):
        cache.crop(-1)
    text = torch.cat((ids, tokens(1, 6, seed=9)), dim=1)
    expected = uncached(shared_model("gemma3"), text, 10)
    assert torch.equal(generated(model, text, 10, **cache_argument(model, cache)), expected)


@pytest.mark.parametrize("change", ["take_back", "take_rows"])
def test_a_change_that_broke_off_among_the_layers_is_computed_anew(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = enabled("gemma3"), tokens(1, 30)
    cache = used(model, ids)
    monkeypatch.setattr(cache.layers[2].buffer, change, failing)
    broken_by = {"take_back": lambda: cache.crop(-10), "take_rows": lambda: cache.reorder_cache(torch.tensor([0, 0]))}
    with pytest.raises(Stop):
        broken_by[change]()
    monkeypatch.undo()
    expected = uncached(shared_model("gemma3"), ids[:, :20], 10)
    assert torch.equal(generated(model, ids[:, :20], 10, **cache_argument(model, cache)), expected)


@pytest.mark.parametrize("used_before", [True, False])
@pytest.mark.parametrize("way", ["inner", "disabled"])
def test_a_forward_that_broke_off_unheard_is_computed_anew(way: str, used_before: bool) -> None:
    model, ids = enabled("gemma3"), tokens(1, 30)
    cache = used(model, ids) if used_before else DynamicSlidingWindowCache(model.config)
    if way == "disabled":
        windowkv.disable(model)
    decoder = model.model if way == "inner" else model
    hook = model.model.layers[2].register_forward_hook(failing)
    with pytest.raises(Stop), torch.no_grad():
        decoder(tokens(1, 5), use_cache=True, **cache_argument(decoder, cache))
    hook.remove()
    windowkv.enable(model)
    text = torch.cat((ids, tokens(1, 14, seed=9)), dim=1)
    with pytest.raises(InputError, match="did not end"):
        generated(model, tokens(1, 2), 5, torch.ones(1, 99, dtype=torch.long), **cache_argument(model, cache))
    expected = uncached(shared_model("gemma3"), text, 10)
    assert torch.equal(generated(model, text, 10, **cache_argument(model, cache)), expected)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss", "llama4-chunk8"])
def test_what_was_fed_under_another_past_is_computed_anew(name: str) -> None:
    model, ids, new = enabled(name), tokens(1, 30), tokens(1, 4, seed=2)
    whole, mask = torch.cat((ids, new), dim=1), torch.ones(1, 34, dtype=torch.long)
    expected = uncached(shared_model(name), whole, 10)
    mask[:, :28] = 0
    for feed in (
        lambda cache: generated(model, new, 2, mask, **cache_argument(model, cache)),
        lambda cache: model(new, attention_mask=mask, **cache_argument(model, cache)),
    ):
        cache = used(model, ids, new=1)
        with torch.no_grad():
            feed(cache)
        assert torch.equal(generated(model, whole, 10, **cache_argument(model, cache)), expected)


@pytest.mark.parametrize("wrong", [5, 20, 42, 44, 100])
def test_new_tokens_with_a_mask_of_another_length_are_refused(wrong: int) -> None:
    model, ids = enabled("gemma3"), tokens(1, 30)
    cache = used(model, ids)
    with pytest.raises(InputError, match=f"a mask of {wrong} for 4 new tokens on top of the 39 .* it has 43"):
        generated(model, tokens(1, 4), 5, torch.ones(1, wrong, dtype=torch.long), **cache_argument(model, cache))
    assert not cache.interrupted


@pytest.mark.parametrize("then", ["generate", "by hand", "fork", "reset"])
def test_drafts_are_held_no_longer_than_generate_drafts(then: str) -> None:
    model, ids, more = enabled("gemma3", rollback=2), tokens(1, 30), tokens(1, 900, seed=4)
    cache = DynamicSlidingWindowCache(model.config, rollback=2)
    reply = generated(model, ids, 20, prompt_lookup_num_tokens=3, **cache_argument(model, cache))
    text = torch.cat((ids, reply, more), dim=1)
    if then == "reset":
        cache.reset()
    cache = cache.fork() if then == "fork" else cache
    if then == "generate":
        generated(model, text, 1, prefill_chunk_size=500, **cache_argument(model, cache))
    else:
        fed(model, cache, more, 900)
    planned = windowkv.plan(model.config, tokens=cache.get_seq_length(), rollback=2, dtype=torch.float32)
    assert cache.nbytes == planned.total_bytes


def test_drafts_that_broke_off_end_no_later_ones() -> None:
    model, ids, kept, calls = enabled("mistral", rollback=0), tokens(1, 30), [], []
    drafter = MODELS["mistral-full"]()  # a plain one with a window cannot draft past it in older releases
    drafter.generation_config.num_assistant_tokens = 60
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    drafter.generation_config.assistant_confidence_threshold = 0
    cache = DynamicSlidingWindowCache(model.config, rollback=0)

    def stop(all_ids: Tensor, scores: Tensor, **options: Any) -> Tensor:
        calls.append(all_ids)
        if len(calls) == 2:
            raise Stop
        if kept:
            kept.clear()
            gc.collect()
        return torch.zeros(1, dtype=torch.bool)

    options: dict[str, Any] = {"assistant_model": drafter, "stopping_criteria": [stop], **cache_argument(model, cache)}
    try:
        generated(model, ids, 70, **options)
    except Stop as stopped:
        kept.append(stopped)
    assert kept
    assert torch.equal(generated(model, ids, 70, **options), uncached(shared_model("mistral"), ids, 70))


def test_a_call_that_fails_before_any_layer_leaves_the_cache_whole(tmp_path: Path) -> None:
    model, ids = enabled("gemma3"), tokens(2, 30)
    cache = used(model, ids)
    for wrong in (tokens(3, 1), torch.full((2, 1), 10_000)):
        with pytest.raises((InputError, IndexError)):
            fed(model, cache, wrong)
    for rows in ("abc", None, {}, [[0, 1]], [1.5], [1j], [5]):
        with pytest.raises(InputError, match="rows"):
            cache.reorder_cache(rows)
    cache.batch_select_indices(torch.tensor([1, 0], dtype=torch.int16))
    cache.save(tmp_path / "whole.cache")
    text = torch.cat((ids.flip(0), tokens(2, 12, seed=3)), dim=1)
    assert torch.equal(
        generated(model, text, 5, **cache_argument(model, cache)), uncached(shared_model("gemma3"), text, 5)
    )


def test_a_selection_that_broke_off_is_noticed_without_ids_too(tmp_path: Path) -> None:
    model = MODELS["gemma3"]()
    cache = DynamicSlidingWindowCache(model.config)
    fed(model, cache, tokens(2, 20), 20)
    cache.layers[2].buffer.take_rows = failing
    with pytest.raises(Stop):
        cache.reorder_cache(torch.tensor([1, 0]))
    with pytest.raises(InputError, match="did not end"):
        cache.save(tmp_path / "torn.cache")


def test_a_cache_that_was_emptied_by_going_back_takes_another_batch() -> None:
    model = shared_model("gemma3")
    cache = DynamicSlidingWindowCache(model.config)
    fed(model, cache, tokens(3, 20), 20)
    cache.crop(-20)
    assert (cache.nbytes, cache.rows) == (0, None)
    ids = tokens(1, 9)
    torch.testing.assert_close(fed(model, cache, ids, 9), logits(model, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", STATEFUL)
def test_a_hybrid_that_was_reset_takes_a_batch_of_any_size(name: str, rows: int) -> None:
    model, ids = enabled(name), tokens(rows, 12, seed=3)
    cache = used(model, tokens(2, 20))
    cache.reset()
    assert cache.nbytes == 0
    expected = generated(STATEFUL[name](), ids, 5)
    assert torch.equal(generated(model, ids, 5, **cache_argument(model, cache)), expected)


def positional(model: Any, cache: Any, ids: Tensor) -> None:
    model(ids, None, None, cache)


def past_the_recording(model: Any, cache: Any, ids: Tensor) -> None:
    model.model(ids, use_cache=True, **cache_argument(model.model, cache))


def while_disabled(model: Any, cache: Any, ids: Tensor) -> None:
    windowkv.disable(model)
    fed(model, cache, ids, ids.shape[1])
    windowkv.enable(model)


def compiled(model: Any, cache: Any, ids: Tensor) -> None:
    model.compile(backend="eager")
    fed(model, cache, ids, ids.shape[1])


@pytest.mark.parametrize("feed", [positional, past_the_recording, while_disabled, compiled])
def test_what_is_fed_in_between_by_any_way_is_not_taken_for_another_text(feed: Any) -> None:
    model, ids = enabled("mistral"), tokens(1, 30)
    cache = used(model, ids, new=1)
    with torch.no_grad():
        feed(model, cache, tokens(1, 4, seed=5))
    assert cache.get_seq_length() == 34
    text = torch.cat((ids, tokens(1, 8, seed=9)), dim=1)
    expected = uncached(shared_model("mistral"), text, 10)
    assert torch.equal(generated(model, text, 10, **cache_argument(model, cache)), expected)


def test_a_forward_with_two_caches_is_remembered_by_the_one_that_it_uses() -> None:
    model, ids = enabled("mistral"), tokens(1, 30)
    cache = used(model, ids)
    after_forward(model, (), {"input_ids": tokens(1, 4), "cache": DynamicCache(), "past_key_values": cache}, None)
    assert len(cache.history) == 39


def test_a_shallow_copy_takes_nothing_along_when_it_is_disabled() -> None:
    model, ids = enabled("mistral"), tokens(1, 30)
    windowkv.disable(copy.copy(model))
    cache = used(model, ids)
    assert len(cache.history) == 39


def test_new_tokens_alone_with_drafts_go_on_where_the_cache_is() -> None:
    model, ids, new = enabled("mistral"), tokens(1, 30), tokens(1, 4, seed=2)
    cache = used(model, ids, new=1)
    mask = torch.ones(1, 34, dtype=torch.long)
    reply = generated(model, new, 10, mask, prompt_lookup_num_tokens=3, **cache_argument(model, cache))
    expected = uncached(shared_model("mistral"), torch.cat((ids, new), dim=1), 10)
    assert torch.equal(reply, expected)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
def test_another_number_of_texts_is_refused_before_anything_runs(name: str, rows: int) -> None:
    model, ids = enabled(name), tokens(3, 20)
    cache = used(model, ids)
    with pytest.raises(InputError, match="this cache holds 3 rows"):
        generated(model, tokens(rows, 24), 5, **cache_argument(model, cache))
    assert not cache.interrupted
    alone = MODELS.get(name, STATEFUL.get(name))()
    text = torch.cat((ids, tokens(3, 14, seed=4)), dim=1)
    expected = generated(alone, text, 5) if name == "lfm2" else uncached(alone, text, 5)
    assert torch.equal(generated(model, text, 5, **cache_argument(model, cache)), expected)


def test_one_row_of_a_hybrid_serves_no_batch_and_says_so() -> None:
    model = enabled("lfm2")
    cache = used(model, tokens(1, 20))
    with pytest.raises(InputError, match="a batch of 3, but this cache holds 1 rows"):
        generated(model, tokens(3, 40), 5, **cache_argument(model, cache))


def test_a_cache_of_another_model_is_refused() -> None:
    model = enabled("gemma3")
    cache = DynamicSlidingWindowCache(shared_model("mistral").config)
    with pytest.raises(InputError, match="for another model: layer 3 has kind sliding instead of full"):
        generated(model, tokens(1, 20), 5, **cache_argument(model, cache))


@pytest.mark.parametrize("rows", [[1], [2, 0], [0, 0, 1, 2]])
@pytest.mark.parametrize("name", STATEFUL)
def test_rows_of_hybrids_are_selected_in_all_layers(name: str, rows: list[int]) -> None:
    model, ids, more = STATEFUL[name](), tokens(3, 20), tokens(len(rows), 5, seed=3)
    cache, alone = (DynamicSlidingWindowCache(model.config) for _ in range(2))
    fed(model, cache, ids, 20)
    fed(model, alone, ids[rows], 20)
    cache.batch_select_indices(torch.tensor(rows))
    torch.testing.assert_close(fed(model, cache, more), fed(model, alone, more), atol=1e-5, rtol=0)


def test_a_generation_that_was_broken_off_between_tokens_goes_on() -> None:
    model, ids = enabled("gemma3"), tokens(1, 30)
    cache = DynamicSlidingWindowCache(model.config)
    seen: list[Tensor] = []

    def stop(all_ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(all_ids)
        if len(seen) == 4:
            raise Stop
        return scores

    with pytest.raises(Stop):
        generated(model, ids, 10, logits_processor=[stop], **cache_argument(model, cache))
    with counted(model) as widths:
        reply = generated(model, ids, 10, **cache_argument(model, cache))
    assert widths[0] == 1
    assert torch.equal(reply, uncached(shared_model("gemma3"), ids, 10))


def test_embeddings_are_not_mistaken_for_ids() -> None:
    model = enabled("mistral")
    cache = DynamicSlidingWindowCache(model.config)
    embeds = model.get_input_embeddings()(tokens(1, 30, seed=4)).detach()
    model.generate(inputs_embeds=embeds, max_new_tokens=3, **cache_argument(model, cache))
    assert cache.history is not None
    assert (cache.history.tokens[:, :30] == -2).all()


def test_masks_that_are_no_padding_are_not_mistaken_for_it() -> None:
    model, ids = enabled("mistral"), tokens(1, 30)
    cache = used(model, ids, new=1)
    causal = torch.zeros(1, 1, 4, WINDOW - 1 + 4).masked_fill(
        torch.ones(4, WINDOW - 1 + 4).triu(WINDOW).bool() | torch.ones(4, WINDOW - 1 + 4).tril(-1).bool(), -1e9
    )
    with torch.no_grad():
        model(tokens(1, 4), attention_mask=causal, **cache_argument(model, cache))
    assert cache.history.tokens[0, 30:].tolist() == [-2] * 4


def test_disabled_models_remember_nothing() -> None:
    model, ids = windowkv.disable(enabled("mistral")), tokens(1, 30)
    assert used(model, ids).history is None
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("order", [[0, 1], [1, 1, 0], [1]])
def test_rows_are_remembered_through_selections(order: list[int]) -> None:
    model, ids = enabled("mistral"), tokens(2, 30)
    cache = used(model, ids, new=1)
    cache.batch_select_indices(torch.tensor(order))
    text = torch.cat((ids[order], tokens(len(order), 3, seed=6)), dim=1)
    with counted(model) as widths:
        reply = generated(model, text, 5, **cache_argument(model, cache))
    assert widths[0] == 3
    assert torch.equal(reply, uncached(shared_model("mistral"), text, 5))
    assert torch.equal(
        generated(model, ids[:1].expand(len(order), -1), 5, **cache_argument(model, cache)),
        uncached(shared_model("mistral"), ids[:1], 5).expand(len(order), -1),
    )
