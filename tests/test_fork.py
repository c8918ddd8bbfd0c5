"""A fork costs nothing until it is written, and neither side ever sees what the other does."""

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from tiny import ARCHITECTURES, MODELS, STATEFUL, WINDOW, cache_argument, fed, generated, logits, shared_model, tokens
from windowkv import DynamicSlidingWindowCache
from windowkv.cache import storage_nbytes

LENGTHS = [0, 1, WINDOW - 1, WINDOW, 3 * WINDOW]


def filled(model: Any, ids: Tensor, **options: Any) -> DynamicSlidingWindowCache:
    cache = DynamicSlidingWindowCache(model.config, **options)
    if ids.shape[1]:
        fed(model, cache, ids, ids.shape[1])
    return cache


def continued(model: Any, cache: Any, before: Tensor, seed: int, length: int = 2 * WINDOW) -> None:
    """Feed a text of its own, one by one, and compare with a forward without cache; many appends, so one compacts."""
    more = tokens(1, length, seed=seed)
    whole = torch.cat((before, more), dim=1)
    if cache.layout.foreign:  # whose model code itself rounds differently token by token
        alone = DynamicCache(config=model.config)
        expected = fed(model, alone, whole, *[before.shape[1]] * (before.shape[1] > 0))[:, before.shape[1] :]
    else:
        expected = logits(model, whole)[:, before.shape[1] :]
    torch.testing.assert_close(fed(model, cache, more), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", [*ARCHITECTURES, *STATEFUL])
def test_both_sides_go_on_with_texts_of_their_own(name: str, length: int) -> None:
    model = STATEFUL[name]() if name in STATEFUL else shared_model(name)
    ids = tokens(1, length)
    cache = filled(model, ids, rollback=3)
    first, second = cache.fork(), cache.fork()
    for seed, one in enumerate((first, cache, second, cache.fork().fork()), start=7):
        if one is not cache:
            continued(model, one, ids, seed)
    continued(model, cache, ids, 5)


def distinct_bytes(caches: list[Any]) -> int:
    """Bytes of all distinct storages behind several caches."""
    together = copy.copy(caches[0])
    together.layers = [layer for cache in caches for layer in cache.layers]
    return storage_nbytes(together)


def test_forks_share_every_byte_until_one_is_written() -> None:
    model = shared_model("gemma3")
    cache = filled(model, tokens(1, 500))
    forks = [cache.fork() for _ in range(20)]
    assert distinct_bytes([cache, *forks]) == cache.nbytes
    fed(model, forks[3], tokens(1, 1))
    assert distinct_bytes([cache, *forks]) == cache.nbytes + forks[3].nbytes
    forks[3].crop(-1)
    assert [fork.get_seq_length() for fork in forks] == [500] * 20
    del forks
    gc.collect()
    assert cache.nbytes == cache.fork().nbytes


def test_a_fork_that_wrote_writes_in_place_from_then_on() -> None:
    model = shared_model("mistral")
    cache = filled(model, tokens(1, 100))
    fork = cache.fork()
    fed(model, fork, tokens(1, 1))
    places = [layer.buffer.storages[0].data_ptr() for layer in fork.layers]
    fed(model, fork, tokens(1, 3))
    assert [layer.buffer.storages[0].data_ptr() for layer in fork.layers] == places


def crop(cache: Any) -> None:
    cache.crop(-3)


def reset(cache: Any) -> None:
    cache.reset()


def reorder(cache: Any) -> None:
    cache.reorder_cache(torch.tensor([1, 0]))


def select(cache: Any) -> None:
    cache.batch_select_indices(torch.tensor([1]))


def repeat(cache: Any) -> None:
    cache.batch_repeat_interleave(2)


def deep_copy(cache: Any) -> None:
    fed(shared_model("gemma3"), copy.deepcopy(cache), tokens(2, 3))


def pickled(cache: Any) -> None:
    fed(shared_model("gemma3"), pickle.loads(pickle.dumps(cache)), tokens(2, 3))


def crop_and_feed(cache: Any) -> None:
    cache.crop(-3)
    fed(shared_model("gemma3"), cache, tokens(2, 40, seed=3), 5)


def record(cache: Any) -> None:
    cache.activate_past_recording()
    fed(shared_model("gemma3"), cache, tokens(2, 40, seed=3), 30)
    cache.crop(-20)


@pytest.mark.parametrize("operation", [crop, reset, reorder, select, repeat, deep_copy, pickled, crop_and_feed, record])
@pytest.mark.parametrize("on_the_fork", [True, False])
def test_no_operation_reaches_the_other_side(operation: Any, on_the_fork: bool) -> None:
    model, ids = shared_model("gemma3"), tokens(2, 25)
    cache = filled(model, ids)
    fork = cache.fork()
    changed, other = (fork, cache) if on_the_fork else (cache, fork)
    operation(changed)
    assert other.get_seq_length() == 25
    more = tokens(2, 2 * WINDOW, seed=9)
    expected = logits(model, torch.cat((ids, more), dim=1))[:, 25:]
    torch.testing.assert_close(fed(model, other, more), expected, atol=1e-4, rtol=0)


def test_a_hybrid_is_forked_with_gradients_too() -> None:
    model, ids = STATEFUL["lfm2"](), tokens(1, 20)
    cache = DynamicSlidingWindowCache(model.config)
    model(ids, use_cache=True, **cache_argument(model, cache))
    fork = cache.fork()
    assert torch.equal(fed(model, fork, tokens(1, 3)), fed(model, cache, tokens(1, 3)))


def test_a_fork_keeps_what_its_class_was_given() -> None:
    model = MODELS["mistral"]()
    cache = filled(model, tokens(1, 20), rollback=5)
    fork = cache.fork()
    assert type(fork) is DynamicSlidingWindowCache
    assert (fork.rollback, fork.layout) == (5, cache.layout)
    assert generated(model, tokens(1, 20), 3, past_key_values=fork).shape == (1, 3)
    assert cache.get_seq_length() == 20
