"""How generate feeds a prompt by way of a store: what it takes from there, and what it leaves.

Knows the arguments of generate's first forward. Knows nothing of models.
"""

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

from windowkv.cache import DynamicSlidingWindowCache
from windowkv.continuation import handed_cache
from windowkv.prefix.store import PrefixStore

_BESIDES_IDS = frozenset({"attention_mask", "position_ids"})
Feed = Callable[[Tensor, Any, dict[str, Any]], Any]  # ids [B, n], generation config, arguments of the forward


def is_one_text(cache: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> bool:
    """Whether a prompt is all that a cache will have seen: ids alone, whole, without padding, equal in every row."""
    mask = model_kwargs.get("attention_mask")
    return (
        isinstance(cache, DynamicSlidingWindowCache)
        and cache.history is not None
        and {name for name, value in model_kwargs.items() if isinstance(value, Tensor)} <= _BESIDES_IDS
        and cache.get_seq_length() < input_ids.shape[1]
        and (mask is None or (mask.shape[1] == input_ids.shape[1] and bool(mask.all())))
        and bool((input_ids == input_ids[:1]).all())
    )


def feed_through(
    store: PrefixStore, feed: Feed, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
) -> Any:
    """Start from what the store has of a prompt, feed the rest, and leave the prompt's end there.

    Where the prompt leaves the texts that are stored, it is fed in two parts, and the end of the first is left too: the
    next prompt with that beginning finds it.
    """
    cache = handed_cache(model_kwargs)
    if not cache.get_seq_length():
        _start_from(store, cache, input_ids)
    point = store.branch_point(input_ids[0], after=cache.get_seq_length())
    if point is not None:
        feed(input_ids[:, :point], *_of_beginning(generation_config, model_kwargs, point))
        store.insert(input_ids[0], cache)
    output = feed(input_ids, generation_config, model_kwargs)
    store.insert(input_ids[0], cache)
    return output


def _start_from(store: PrefixStore, cache: DynamicSlidingWindowCache, input_ids: Tensor) -> None:
    found = store.lookup(input_ids[0])
    if found is None:
        return
    cache.layers, cache.history = found.layers, found.history
    if len(input_ids) > 1 and cache.layout.foreign:  # transformers' own layers do not repeat a single row by themselves
        cache.reorder_cache(input_ids.new_zeros(len(input_ids)))


def _of_beginning(generation_config: Any, model_kwargs: dict[str, Any], width: int) -> tuple[Any, dict[str, Any]]:
    config, kwargs = copy.copy(generation_config), dict(model_kwargs)
    if hasattr(config, "_mask_length"):
        config._mask_length = width
    for name in _BESIDES_IDS:
        if kwargs.get(name) is not None:
            kwargs[name] = kwargs[name][..., :width]
    return config, kwargs
