"""Continuing a cache with a text: what of it the cache has seen already, and what happens where the two differ.

Knows a model's forward and generate's first one. Knows nothing of how a model comes by them.
"""

import inspect
import logging
from typing import Any

import torch
from torch import Tensor

from windowkv.cache import DynamicSlidingWindowCache
from windowkv.errors import InputError, RollbackError
from windowkv.history import TokenHistory, masked_ids

logger = logging.getLogger(__name__)

CACHE_NAMES = ("cache", "past_key_values")  # transformers renames the second to the first
# What a forward may be given besides ids without computing anything else than they say.
_BESIDES_IDS = frozenset({"input_ids", "attention_mask", "position_ids", "cache_position"})


def handed_cache(kwargs: dict[str, Any]) -> Any:
    """The cache among a call's arguments, under either name."""
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)


def cache_name(model: Any) -> str:
    """What a model calls the cache that it is handed."""
    return next(name for name in CACHE_NAMES if name in inspect.signature(model.forward).parameters)


def start_recording(cache: DynamicSlidingWindowCache) -> None:
    """Let a cache remember the ids that it is fed from now on.

    Without an attention layer a cache counts no tokens, and transformers feeds every prompt on top of it.
    """
    if cache.history is None and not all(cache.is_linear):
        cache.history = TokenHistory()
        cache.history.append_unknown(cache.get_seq_length())


def before_forward(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note that a cache is about to change, layer by layer; a forward pre-hook."""
    if (history := _recording(kwargs)) is not None:
        history.interrupted = True


def after_forward(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Remember the ids that a cache was fed; a forward hook."""
    history = _recording(kwargs)
    if history is None:
        return
    new = handed_cache(kwargs).get_seq_length() - len(history)
    ids = _plain_ids(args, kwargs)
    if ids is not None and ids.shape[1] <= new:
        history.append_unknown(new - ids.shape[1])
        history.append(ids)
    else:
        history.append_unknown(new)
    history.interrupted = False


def align(cache: DynamicSlidingWindowCache, ids: Tensor, mask: Tensor | None) -> None:
    """Bring a cache back to where it agrees with a whole text, ids and mask `[B, n]`, and leaves a token to be run.

    Where that is out of reach, the cache is emptied, and the text will be computed anew.
    """
    history = cache.history
    if history is None:
        return
    seen = cache.get_seq_length()
    if history.interrupted:
        logger.warning("a forward into this cache did not end: its %d tokens are computed again", ids.shape[1])
        cache.reset()
        return
    if not seen:
        return
    history.append_unknown(seen - len(history))
    if history.rows not in (1, len(ids)):
        return  # no continuation of these texts: the layers say so themselves
    common = history.common_prefix(masked_ids(ids, mask))
    target = max(0, min(common, ids.shape[1] - 1))
    if target == seen:
        return
    try:
        cache.crop(target - seen)
    except RollbackError as why:
        logger.warning(
            "the text differs from this cache's after %d of its %d tokens, and is computed anew: %s", common, seen, why
        )
        cache.reset()
    else:
        logger.info("the text differs from this cache's after %d of its %d tokens, and goes on there", common, seen)


def start_anew(cache: DynamicSlidingWindowCache) -> None:
    """Empty a cache for assisted decoding, which in transformers feeds the whole prompt on top of what is there."""
    if cache.history is not None and (cache.get_seq_length() or cache.history.interrupted):
        logger.warning("assisted decoding feeds the whole prompt: the %d tokens held go", cache.get_seq_length())
        cache.reset()


def check_uninterrupted(cache: DynamicSlidingWindowCache) -> None:
    """Raise InputError when a cache cannot be continued by new tokens alone."""
    if cache.history is not None and cache.history.interrupted:
        raise InputError(
            "a forward into this cache did not end, and new tokens alone cannot mend it: "
            "pass the whole text, or call cache.reset() first"
        )


def _plain_ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The ids of a forward, padding marked; None where they do not say all that it computes."""
    ids, mask = kwargs.get("input_ids", args[0] if args else None), kwargs.get("attention_mask")
    others = [name for name, value in kwargs.items() if isinstance(value, Tensor) and name not in _BESIDES_IDS]
    if others or not isinstance(ids, Tensor) or ids.ndim != 2:
        return None
    if mask is None:
        return ids
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < ids.shape[1]:
        return None
    return masked_ids(ids, mask[:, mask.shape[1] - ids.shape[1] :])


def _recording(kwargs: dict[str, Any]) -> TokenHistory | None:
    # A compiled graph would be compiled anew for every length of the history.
    if torch.compiler.is_compiling():
        return None
    cache = handed_cache(kwargs)
    return cache.history if isinstance(cache, DynamicSlidingWindowCache) else None
