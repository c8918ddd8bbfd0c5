"""How generate feeds a prompt by way of a store: what it takes from there, and what it leaves.

Knows the arguments of generate's first forward. Knows nothing of how a model is changed.
"""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from windowkv.attention_interface import is_plain_decoder
from windowkv.cache import DynamicSlidingWindowCache
from windowkv.continuation import TEXT_INPUTS, handed_cache
from windowkv.errors import InputError
from windowkv.history import PADDING
from windowkv.layout import keys_follow_length
from windowkv.prefix.fingerprint import is_as_given
from windowkv.prefix.store import PrefixStore
from windowkv.prefix.texts import Text, texts_of

logger = logging.getLogger(__name__)

_FED: ContextVar[list[DynamicSlidingWindowCache] | None] = ContextVar("fed", default=None)  # in this generate
# Windows that begin where the first forward ended: a text fed in two parts is another one to these.
_FED_AT_ONCE = "reference_sliding_attention"
Feed = Callable[[Tensor, Any, dict[str, Any]], Any]  # ids [B, n], generation config, arguments of the forward


def stored_texts(model: Any, cache: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[Text] | None:
    """The texts of a prompt that are all that a cache will have seen, one where all rows are equal.

    None for prompts that a store cannot serve: of more than ids, not whole, or computed in a way of their own.
    """
    if not (
        isinstance(cache, DynamicSlidingWindowCache)
        and cache.history is not None
        and not cache.interrupted
        and cache.history.complete
        and {name for name, value in model_kwargs.items() if isinstance(value, Tensor)} <= TEXT_INPUTS
        and cache.get_seq_length() < input_ids.shape[1]
        and is_as_given(model)
        and not keys_follow_length(model.config)
        and all(spec.kind != _FED_AT_ONCE for spec in cache.layout.layers)
    ):
        return None
    texts = texts_of(input_ids, *(model_kwargs.get(name) for name in ("attention_mask", "position_ids")))
    return texts if texts and (_pads_like_none(model, cache) or not any(text.padding for text in texts)) else None


def feed_through(
    store: PrefixStore,
    texts: list[Text],
    feed: Feed,
    input_ids: Tensor,
    generation_config: Any,
    model_kwargs: dict[str, Any],
) -> Any:
    """Start from what the store has of a prompt, feed the rest, and leave the prompt's end there.

    Where the prompt leaves the texts that are stored, it is fed in two parts, and the end of the first is left too: the
    next prompt with that beginning finds it. Of several texts, that is done where all leave them together.
    """
    cache = handed_cache(model_kwargs)
    if not cache.get_seq_length():
        _start_from(store, cache, texts, rows=len(input_ids))
    form = cache.quantisation.form(cache.rollback)
    points = {store.branch_point(text, form, after=cache.get_seq_length()) for text in texts}
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
            if cache.rows == 1 and cache.history is not None and cache.history.complete and not cache.interrupted:
                tokens = cache.history.tokens
                _leave(store, cache, texts_of(tokens.clamp_min(0), tokens != PADDING, None) or [])
    finally:
        _FED.reset(token)


def _pads_like_none(model: Any, cache: DynamicSlidingWindowCache) -> bool:
    """Whether a text leaves the same in a cache after padding as alone, but for the place."""
    kinds = {spec.kind for spec in cache.layout.layers}
    return is_plain_decoder(model) and kinds <= {"full", "sliding", "shared"}


def _start_from(store: PrefixStore, cache: DynamicSlidingWindowCache, texts: list[Text], *, rows: int) -> None:
    form = cache.quantisation.form(cache.rollback)
    found = store.lookup_rows(texts, form, rollback=cache.rollback)
    if found is None:
        return
    cache.layers, cache.history = found.layers, found.history
    if rows > len(texts) and cache.layout.foreign:  # transformers' own layers do not repeat a single row by themselves
        cache.batch_repeat_interleave(rows)


def _leave(store: PrefixStore, cache: DynamicSlidingWindowCache, texts: list[Text]) -> None:
    for row, text in enumerate(texts):
        if text.padding < cache.get_seq_length():
            try:
                store.insert(text.ids, cache, row=row, padding=text.padding)
            except InputError as why:  # somebody fed the cache besides: no reason for generate to fail
                logger.warning("a beginning was not stored: %s", why)


def _of_beginning(generation_config: Any, model_kwargs: dict[str, Any], width: int) -> tuple[Any, dict[str, Any]]:
    config, kwargs = copy.copy(generation_config), dict(model_kwargs)
    if hasattr(config, "_mask_length"):
        config._mask_length = width
    for name in TEXT_INPUTS:
        if kwargs.get(name) is not None:
            kwargs[name] = kwargs[name][..., :width]
    return config, kwargs
