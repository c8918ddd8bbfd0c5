"""How generate feeds a prompt by way of a store: what it takes from there, and what it leaves.

Knows the arguments of generate's first forward. Knows nothing of models.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from windowkv.cache import DynamicSlidingWindowCache
from windowkv.continuation import TEXT_INPUTS, handed_cache
from windowkv.prefix.store import PrefixStore

_FED: ContextVar[list[DynamicSlidingWindowCache] | None] = ContextVar("fed", default=None)  # in this generate
Feed = Callable[[Tensor, Any, dict[str, Any]], Any]  # ids [B, n], generation config, arguments of the forward


def is_plain_text(store: PrefixStore, cache: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> bool:
    """Whether a prompt is all that a cache of the store's kind will have seen: ids alone, whole and without padding."""
    mask = model_kwargs.get("attention_mask")
    return (
        isinstance(cache, DynamicSlidingWindowCache)
        and cache.quantisation == store.quantisation
        and cache.history is not None
        and cache.history.complete
        and {name for name, value in model_kwargs.items() if isinstance(value, Tensor)} <= TEXT_INPUTS
        and cache.get_seq_length() < input_ids.shape[1]
        and (mask is None or (mask.shape[1] == input_ids.shape[1] and bool(mask.all())))
    )


def feed_through(
    store: PrefixStore, feed: Feed, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
) -> Any:
    """Start from what the store has of a prompt, feed the rest, and leave the prompt's end there.

    Where the prompt leaves the texts that are stored, it is fed in two parts, and the end of the first is left too: the
    next prompt with that beginning finds it. Of several texts, that is done where all leave them together.
    """
    cache = handed_cache(model_kwargs)
    texts = input_ids[:1] if bool((input_ids == input_ids[:1]).all()) else input_ids
    if not cache.get_seq_length():
        _start_from(store, cache, texts, rows=len(input_ids))
    points = {store.branch_point(text, after=cache.get_seq_length()) for text in texts}
    point = points.pop()
    if point is not None and not points:
        feed(input_ids[:, :point], *_of_beginning(generation_config, model_kwargs, point))
        _leave(store, cache, texts)
    output = feed(input_ids, generation_config, model_kwargs)
    _leave(store, cache, texts)
    if (fed := _FED.get()) is not None:
        fed.append(cache)
    return output


@contextmanager
def leaving_ends(store: PrefixStore) -> Iterator[None]:
    """Leave in the store where the single texts end that are generated meanwhile."""
    token = _FED.set([])
    try:
        yield
        for cache in _FED.get() or ():
            if cache.rows == 1 and cache.history is not None and cache.history.complete:
                store.insert(cache.history.tokens, cache)
    finally:
        _FED.reset(token)


def _start_from(store: PrefixStore, cache: DynamicSlidingWindowCache, texts: Tensor, *, rows: int) -> None:
    found = store.lookup_rows(list(texts))
    if found is None:
        return
    cache.layers, cache.history = found.layers, found.history
    if rows > len(texts) and cache.layout.foreign:  # transformers' own layers do not repeat a single row by themselves
        cache.reorder_cache(texts.new_zeros(rows))


def _leave(store: PrefixStore, cache: DynamicSlidingWindowCache, texts: Tensor) -> None:
    for row, text in enumerate(texts):
        store.insert(text, cache, row=row)


def _of_beginning(generation_config: Any, model_kwargs: dict[str, Any], width: int) -> tuple[Any, dict[str, Any]]:
    config, kwargs = copy.copy(generation_config), dict(model_kwargs)
    if hasattr(config, "_mask_length"):
        config._mask_length = width
    for name in TEXT_INPUTS:
        if kwargs.get(name) is not None:
            kwargs[name] = kwargs[name][..., :width]
    return config, kwargs
