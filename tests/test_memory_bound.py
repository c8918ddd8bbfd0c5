"""How much a cache holds, measured from outside: by the storages behind its tensors, not by its own word."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny import MODELS, WINDOW, cache_argument, fed, generated, shared_model, tokens
from windowkv import DynamicSlidingWindowCache
from windowkv.cache import storage_nbytes

ROLLBACK, SLACK = 5, 32


def held_tokens(layer: Any) -> int:
    """Tokens that the layer's storage has room for, from the storage behind the keys that it shows."""
    if layer.keys is None:
        return 0
    batch, heads, _, dim = layer.keys.shape
    return layer.keys.untyped_storage().nbytes() // (batch * heads * dim * layer.keys.element_size())


def bounded_layers(model: Any, cache: DynamicSlidingWindowCache) -> list[tuple[Any, int]]:
    """The layers with a window, each with its bound in tokens."""
    windows = [spec.window for spec in cache.layout.layers]
    return [
        (layer, window - 1 + ROLLBACK + SLACK)
        for layer, window in zip(cache.layers, windows, strict=False)
        if window is not None
    ]


@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama4-chunk8"])
@pytest.mark.parametrize("prefill", [(10_000,), (1000,) * 10])
def test_a_long_prompt_never_exceeds_the_bound_while_later_layers_still_prefill(
    name: str, prefill: tuple[int, ...]
) -> None:
    model = MODELS[name]()
    cache = DynamicSlidingWindowCache(model.config, rollback=ROLLBACK)
    moments = []

    def look(*_: Any) -> None:
        held = [(held_tokens(layer), bound) for layer, bound in bounded_layers(model, cache)]
        assert all(tokens <= bound for tokens, bound in held)
        moments.append(sum(tokens for tokens, _ in held))

    for block in model.model.layers:
        block.register_forward_hook(look)
    with torch.no_grad():
        for part in tokens(1, 10_000).split(prefill, dim=1):
            model(part, use_cache=True, logits_to_keep=1, **cache_argument(model, cache))
    layers = bounded_layers(model, cache)
    assert len(moments) == len(prefill) * len(model.model.layers)
    assert moments[-1] == sum(bound for _, bound in layers), "the bound is reached, and kept"
    assert moments[0] == layers[0][1], "after the first layer, only the first layer holds anything"


def test_a_copy_is_no_larger() -> None:
    model = shared_model("gemma3")
    cache = DynamicSlidingWindowCache(model.config, rollback=ROLLBACK)
    fed(model, cache, tokens(2, 500), 500)
    assert storage_nbytes(copy.deepcopy(cache)) == cache.nbytes


@pytest.mark.parametrize("chunks", [(4,) * 30, (13,), (1,) * 60, (7, 8, 9, 40)])
@pytest.mark.parametrize("name", ["mistral", "mistral-w1", "gemma3n"])
def test_the_bound_holds_after_every_update(name: str, chunks: tuple[int, ...]) -> None:
    model = shared_model(name)
    cache = DynamicSlidingWindowCache(model.config, rollback=ROLLBACK)
    for i, chunk in enumerate((*chunks, *[1] * 40)):
        fed(model, cache, tokens(2, chunk, seed=i), chunk)
        assert all(held_tokens(layer) <= bound for layer, bound in bounded_layers(model, cache))


def test_a_window_of_one_keeps_no_past() -> None:
    model = shared_model("mistral-w1")
    cache = DynamicSlidingWindowCache(model.config, rollback=0)
    for i in range(100):
        fed(model, cache, tokens(1, 1, seed=i))
        assert [layer.keys.shape[2] for layer in cache.layers] == [0] * 4
    assert {held_tokens(layer) for layer in cache.layers} == {SLACK}


def test_the_positions_held_at_the_windows_edge() -> None:
    cache = DynamicSlidingWindowCache(shared_model("mistral").config, rollback=0)

    def feed(first: int, last: int) -> Tensor:
        keys = torch.arange(first, last, dtype=torch.float32).reshape(1, 1, -1, 1).expand(1, 2, -1, 16)
        return cache.update(keys, keys, 0)[0][0, 0, :, 0]

    assert feed(0, 6).tolist() == [0, 1, 2, 3, 4, 5]
    for position in range(6, 60):
        visible = list(range(max(0, position - WINDOW + 1), position + 1))
        assert feed(position, position + 1).tolist() == visible


@pytest.mark.parametrize(("query", "expected"), [(1, 8), (5, 12), (7, 14), (8, 15), (9, 16), (20, 27)])
def test_the_mask_is_as_wide_as_the_keys(query: int, expected: int) -> None:
    cache = DynamicSlidingWindowCache(shared_model("mistral").config)
    states = torch.zeros(1, 2, 30, 16)
    cache.update(states, states, 0)
    length, offset = cache.get_mask_sizes(query, 0)
    keys, values = cache.update(states[:, :, :query], states[:, :, :query], 0)
    assert keys.shape[2] == values.shape[2] == length == expected
    assert offset + length == 30 + query


def test_the_window_is_no_maximum_length() -> None:
    assert DynamicSlidingWindowCache(shared_model("gemma3").config).get_max_length() == -1
    assert DynamicSlidingWindowCache(shared_model("mistral").config).get_max_length() == -1


def test_beams_and_batches_stay_within_the_bound() -> None:
    model = shared_model("gemma3")
    cache = DynamicSlidingWindowCache(model.config, rollback=ROLLBACK)
    generated(model, tokens(2, 100), 30, num_beams=3, **cache_argument(model, cache))
    assert all(held_tokens(layer) <= bound for layer, bound in bounded_layers(model, cache))


def test_assisted_decoding_leaves_the_cache_within_the_bound() -> None:
    model = shared_model("mistral")
    cache = DynamicSlidingWindowCache(model.config, rollback=64)
    prompt = tokens(1, 20)
    reply = generated(model, prompt, 100, prompt_lookup_num_tokens=4, **cache_argument(model, cache))
    generated(model, torch.cat((prompt, reply), dim=1), 100, **cache_argument(model, cache))
    assert all(held_tokens(layer) <= WINDOW - 1 + 64 + SLACK for layer in cache.layers)
