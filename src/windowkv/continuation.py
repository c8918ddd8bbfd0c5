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
from windowkv.history import MISSED, UNKNOWN, TokenHistory, masked_ids

logger = logging.getLogger(__name__)

CACHE_NAMES = ("cache", "past_key_values")  # transformers renames the second to the first
# What generate hands to every forward of a text model besides ids.
TEXT_INPUTS = frozenset({"attention_mask", "position_ids"})
# What a forward may be given besides ids without computing anything else than they say; of others, only zeros.
_BESIDES_IDS = TEXT_INPUTS | {"input_ids", "cache_position"}


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
        cache.history.append_same(UNKNOWN, cache.get_seq_length())


def before_forward(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note that a cache is about to change, layer by layer; a forward pre-hook.

    Raises InputError when an earlier change broke off.
    """
    if (cache := _recording(args, kwargs)) is not None:
        cache.check_whole()
        cache.changes.begin()
        if cache.layout.foreign:  # their states are written by model code, past the cache
            cache.changes.touch()


def after_forward(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Remember the ids that a cache was fed; a forward hook."""
    cache = _recording(args, kwargs)
    if cache is None or cache.history is None:
        return
    arguments = _named(module, args, kwargs)
    history, new = cache.history, cache.get_seq_length() - len(cache.history)
    ids = _plain_ids(arguments)
    if ids is None:
        history.append_same(UNKNOWN, new)
    else:
        history.append_same(MISSED, new - ids.shape[1])
        history.append(history.under(arguments.get("attention_mask"), ids))
    cache.changes.end()


def align(cache: DynamicSlidingWindowCache, ids: Tensor, mask: Tensor | None) -> None:
    """Bring a cache back to where it agrees with a whole text, ids and mask `[B, n]`, and leaves a token to be run.

    Where that is out of reach, the cache is emptied, and the text will be computed anew. Raises InputError for texts
    that are not as many as the cache holds.
    """
    history = cache.history
    if history is None:
        return
    if cache.interrupted:
        logger.warning("a change of this cache did not end: %d tokens are computed anew", ids.shape[1])
        cache.reset()
        return
    check_rows(cache, ids)
    seen = cache.get_seq_length()
    if not seen:
        return
    history.append_same(MISSED, seen - len(history))
    common, target = _agreement(cache, ids, mask)
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


def reusable(cache: DynamicSlidingWindowCache, ids: Tensor) -> int:
    """How many tokens of a whole text, ids `[B, n]` without padding, `align` would leave in a cache."""
    if cache.interrupted:
        return 0
    trial = cache.fork()
    start_recording(trial)
    target, seen = _agreement(trial, ids, None)[1], trial.get_seq_length()
    try:
        trial.crop(target - seen)
    except RollbackError:
        return 0
    return target


def check_rows(cache: DynamicSlidingWindowCache, ids: Tensor) -> None:
    """Raise InputError when ids `[B, n]` cannot continue the rows that a cache holds; one row serves any number."""
    if cache.rows in (None, len(ids)) or (cache.rows == 1 and not cache.layout.foreign):
        return
    raise InputError(
        f"a batch of {len(ids)}, but this cache holds {cache.rows} rows: "
        "select or repeat its rows first (batch_select_indices, batch_repeat_interleave), or use a new cache"
    )


def start_anew(cache: DynamicSlidingWindowCache) -> None:
    """Empty a cache for assisted decoding, which in transformers feeds a whole prompt on top of what is there."""
    if cache.history is not None and (cache.get_seq_length() or cache.interrupted):
        logger.warning("assisted decoding feeds the whole prompt: the %d tokens held go", cache.get_seq_length())
        cache.reset()
        cache.activate_past_recording()  # which transformers has done already


def check_continuable(cache: DynamicSlidingWindowCache, ids: Tensor, told: int | None = None) -> None:
    """Raise InputError when a cache cannot be continued by new tokens alone, ids `[B, q]`.

    told: of how many tokens in all the attention mask tells, where there is one.
    """
    cache.check_whole()
    check_rows(cache, ids)
    seen, new = cache.get_seq_length(), ids.shape[1]
    if told is not None and seen and told != seen + new:
        raise InputError(
            f"a mask of {told} for {new} new tokens on top of the {seen} that this cache has seen: it has "
            f"{seen + new}. The last token that generate returns was not fed yet: it is the first of the new ones"
        )


def _agreement(cache: DynamicSlidingWindowCache, ids: Tensor, mask: Tensor | None) -> tuple[int, int]:
    """How many tokens of a text a cache has seen, and how many of these leave one to be run."""
    common = 0 if cache.history is None else cache.history.common_prefix(masked_ids(ids, mask))
    return common, max(0, min(common, ids.shape[1] - 1))


def _named(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward, all by name."""
    return inspect.signature(module.forward).bind_partial(*args).arguments | kwargs if args else kwargs


def _plain_ids(arguments: dict[str, Any]) -> Tensor | None:
    """The ids of a forward; None where they and a mask of padding do not say all that it computes."""
    ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
    others = [value for name, value in arguments.items() if isinstance(value, Tensor) and name not in _BESIDES_IDS]
    if any(value.is_floating_point() or bool(value.any()) for value in others):
        return None
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        return None
    return ids if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2) else None


def _recording(args: tuple[Any, ...], kwargs: dict[str, Any]) -> DynamicSlidingWindowCache | None:
    """The cache among a forward's arguments, if it remembers ids.

    One without a keyword is found by its type, since naming arguments takes time.
    """
    # A compiled graph would be compiled anew for every length of the history.
    if torch.compiler.is_compiling():
        return None
    cache = handed_cache(kwargs)
    if cache is None:
        cache = next((value for value in args if isinstance(value, DynamicSlidingWindowCache)), None)
    return cache if isinstance(cache, DynamicSlidingWindowCache) and cache.history is not None else None
