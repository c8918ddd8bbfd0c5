"""Tokens and logits equal a forward without any cache, for every architecture, at every length around the window."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import windowkv
from tiny import (
    ARCHITECTURES,
    MODELS,
    WINDOW,
    cache_argument,
    fed,
    generated,
    left_padded,
    logits,
    shared_model,
    tokens,
    uncached,
)
from windowkv import DynamicSlidingWindowCache

PROMPTS = [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 3 * WINDOW + 1, 5 * WINDOW]


def ours(model: Any, **options: Any) -> dict[str, Any]:
    return cache_argument(model, DynamicSlidingWindowCache(model.config, **options))


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_equal_a_forward_without_cache(name: str, prompt: int) -> None:
    model, ids = shared_model(name), tokens(1, prompt)
    assert torch.equal(generated(model, ids, 2 * WINDOW, **ours(model)), uncached(model, ids, 2 * WINDOW))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ragged_rows_equal_each_row_alone(name: str) -> None:
    model = shared_model(name)
    rows = [tokens(1, length, seed=length)[0] for length in (30, 5, 17, 8, 20)]
    ids, mask = left_padded(rows)
    alone = torch.cat([uncached(model, row[None], 20) for row in rows])
    assert torch.equal(generated(model, ids, 20, mask, **ours(model)), alone)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_bfloat16_equals_transformers_in_bfloat16(name: str) -> None:
    model = MODELS[name]().to(torch.bfloat16)
    for length in (3, WINDOW, 3 * WINDOW):
        ids = tokens(2, length)
        theirs = generated(model, ids, 60, **cache_argument(model, DynamicCache(config=model.config)))
        assert torch.equal(generated(model, ids, 60, **ours(model)), theirs)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_float16_equals_transformers_in_float16(name: str) -> None:
    model, ids = MODELS[name]().to(torch.float16), tokens(2, 3 * WINDOW)
    theirs = generated(model, ids, 30, **cache_argument(model, DynamicCache(config=model.config)))
    assert torch.equal(generated(model, ids, 30, **ours(model)), theirs)


@pytest.mark.parametrize("rollback", [0, 1, 64])
@pytest.mark.parametrize("chunks", [(20,), (6, *[1] * 6), (20, 1, 3), (8, 5, 7, 8, 9, 20), (13,), (4,) * 15, ()])
@pytest.mark.parametrize("name", MODELS)
def test_logits_at_every_position_of_a_loop_by_hand(name: str, chunks: tuple[int, ...], rollback: int) -> None:
    model, ids = shared_model(name), tokens(2, 62)
    cache = DynamicSlidingWindowCache(model.config, rollback=rollback)
    torch.testing.assert_close(fed(model, cache, ids, *chunks), logits(model, ids), atol=1e-4, rtol=0)
    assert cache.get_seq_length() == 62


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_either_argument_name_is_understood(name: str) -> None:
    model, ids = shared_model(name), tokens(1, 24)
    cache = DynamicSlidingWindowCache(model.config)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split([20, 1, 3], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), logits(model, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_several_turns_on_one_cache(name: str) -> None:
    model = shared_model(name)
    cache = DynamicSlidingWindowCache(model.config)
    history = tokens(1, 11)
    for turn in range(4):
        reply = generated(model, history, 7, **cache_argument(model, cache))
        assert torch.equal(reply, uncached(model, history, 7))
        history = torch.cat((history, reply, tokens(1, 3 + 5 * turn, seed=turn)), dim=1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_chunked_prefill(name: str) -> None:
    model, ids = shared_model(name), tokens(1, 43)
    assert torch.equal(generated(model, ids, 12, prefill_chunk_size=9, **ours(model)), uncached(model, ids, 12))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_beam_search(name: str) -> None:
    model, ids = shared_model(name), tokens(2, 20)
    beams = {"num_beams": 3, "num_return_sequences": 2}
    assert torch.equal(
        generated(model, ids, 12, **beams, **ours(model)), generated(model, ids, 12, **beams, use_cache=False)
    )


def test_beam_search_with_the_cache_under_its_old_name() -> None:
    model, ids = shared_model("mistral"), tokens(1, 20)
    cache = DynamicSlidingWindowCache(model.config)
    expected = generated(model, ids, 12, num_beams=3, use_cache=False)
    assert torch.equal(generated(model, ids, 12, num_beams=3, past_key_values=cache), expected)
    assert cache.get_seq_length() == 31


@pytest.mark.parametrize("name", ["mistral", "gemma3n", "llama4-chunk8"])
def test_beam_search_over_ragged_rows(name: str) -> None:
    model = shared_model(name)
    ids, mask = left_padded([tokens(1, 20)[0], tokens(1, 5, seed=1)[0]])
    expected = generated(model, ids, 12, mask, num_beams=3, use_cache=False)
    assert torch.equal(generated(model, ids, 12, mask, num_beams=3, **ours(model)), expected)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama4-chunk8"])
def test_sampling(name: str) -> None:
    model, ids = shared_model(name), tokens(2, 20)
    torch.manual_seed(5)
    expected = generated(model, ids, 20, do_sample=True, top_k=5, num_return_sequences=3, use_cache=False)
    torch.manual_seed(5)
    assert torch.equal(
        generated(model, ids, 20, do_sample=True, top_k=5, num_return_sequences=3, **ours(model)), expected
    )


@pytest.mark.parametrize("name", ["mistral", "gemma3n"])
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}])
def test_one_prefilled_row_serves_several_sequences(name: str, options: dict[str, Any]) -> None:
    model, ids = shared_model(name), tokens(1, 25)
    cache = DynamicSlidingWindowCache(model.config)
    fed(model, cache, ids[:, :20], 20)
    torch.manual_seed(5)
    expected = generated(model, ids, 10, use_cache=False, **options)
    torch.manual_seed(5)
    assert torch.equal(generated(model, ids, 10, **cache_argument(model, cache), **options), expected)


@pytest.mark.parametrize("name", ["mistral", "qwen2", "gemma3", "gemma3n", "llama4-chunk8"])
def test_repeated_and_selected_rows_equal_each_row_alone(name: str) -> None:
    model, prefix = shared_model(name), tokens(1, 20)
    cache = DynamicSlidingWindowCache(model.config)
    fed(model, cache, prefix, 20)
    cache.batch_repeat_interleave(3)
    suffixes = tokens(3, 4, seed=7)
    whole = torch.cat((prefix.expand(3, -1), suffixes), dim=1)
    torch.testing.assert_close(fed(model, cache, suffixes, 4), logits(model, whole)[:, 20:], atol=1e-4, rtol=0)
    cache.batch_select_indices(torch.tensor([2, 0]))
    more = tokens(2, 12, seed=8)
    whole = torch.cat((whole[[2, 0]], more), dim=1)
    torch.testing.assert_close(fed(model, cache, more, 5), logits(model, whole)[:, 24:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("prompt", [3, 6, 7, 8, 9, 20])
@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama4-chunk8"])
def test_assisted_decoding_equals_greedy(name: str, prompt: int) -> None:
    model, ids = shared_model(name), tokens(1, prompt)
    expected = uncached(model, ids, 30)
    assert torch.equal(generated(model, ids, 30, prompt_lookup_num_tokens=4, **ours(model)), expected)
    assert torch.equal(generated(model, ids, 30, assistant_model=shared_model("mistral-w2"), **ours(model)), expected)


@pytest.mark.parametrize("rollback", [0, 64])
@pytest.mark.parametrize("draft", [5, 100])
@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama4-chunk8"])
def test_drafts_longer_than_the_rollback(name: str, draft: int, rollback: int) -> None:
    model, text = windowkv.enable(MODELS[name](), rollback=rollback), tokens(1, 130)
    ids = torch.cat((text, text[:, :20]), dim=1)
    expected = uncached(shared_model(name), ids, 40)
    assert torch.equal(generated(model, ids, 40, prompt_lookup_num_tokens=draft), expected)
    assistant = windowkv.enable(MODELS["mistral-w2"](), rollback=rollback)
    assistant.generation_config.num_assistant_tokens = draft
    assert torch.equal(generated(model, ids, 40, assistant_model=assistant), expected)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama4-chunk8"])
def test_memory_is_back_within_the_bound_after_drafts(name: str) -> None:
    model, text = windowkv.enable(MODELS[name]()), tokens(1, 130)
    cache = DynamicSlidingWindowCache(model.config)
    ids = torch.cat((text, text[:, :20]), dim=1)
    for options in ({"prompt_lookup_num_tokens": 100}, {}):
        ids = torch.cat((ids, generated(model, ids, 20, **options, **cache_argument(model, cache))), dim=1)
        for layer, spec in zip(cache.layers, cache.layout.layers, strict=True):
            if spec.bounded:
                assert layer.buffer.storages[0].shape[2] <= layer.buffer.retention.bound


@pytest.mark.parametrize("name", ["mistral", "gemma3n"])
def test_training_mode_equals_evaluation_without_dropout(name: str) -> None:
    model, ids = MODELS[name]().train(), tokens(1, 10)
    assert torch.equal(generated(model, ids, 5, **ours(model)), uncached(shared_model(name), ids, 5))


@pytest.mark.parametrize("name", ["mistral", "gemma3n"])
def test_gradients_through_a_cache_equal_gradients_without(name: str) -> None:
    model, ids = MODELS[name](), tokens(1, 30)
    weight = model.get_input_embeddings().weight
    (expected,) = torch.autograd.grad(model(ids, use_cache=False).logits.square().mean(), weight)
    cache = DynamicSlidingWindowCache(model.config, rollback=0)
    parts = [
        model(part, use_cache=True, **cache_argument(model, cache)).logits for part in ids.split([12, 1, 1, 16], dim=1)
    ]
    (gradient,) = torch.autograd.grad(torch.cat(parts, dim=1).square().mean(), weight)
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("then", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_cache_goes_from_one_gradient_mode_to_another(first: Any, then: Any) -> None:
    model, ids = shared_model("mistral"), tokens(1, 40)
    cache = DynamicSlidingWindowCache(model.config)
    with first():
        model(ids[:, :20], use_cache=True, **cache_argument(model, cache))
    with then():
        rest = [
            model(part, use_cache=True, **cache_argument(model, cache)).logits
            for part in ids[:, 20:].split([1] * 20, dim=1)
        ]
    torch.testing.assert_close(torch.cat(rest, dim=1).detach(), logits(model, ids)[:, 20:], atol=1e-4, rtol=0)


def test_an_empty_chunk_changes_nothing() -> None:
    cache = DynamicSlidingWindowCache(shared_model("mistral").config)
    for layer in range(len(cache)):
        keys, _ = cache.update(torch.zeros(1, 2, 0, 16), torch.zeros(1, 2, 0, 16), layer)
        assert keys.shape == (1, 2, 0, 16)
    assert (cache.get_seq_length(), cache.nbytes) == (0, 0)
