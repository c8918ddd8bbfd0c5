"""`SlidingWindowCache`: many layers with fixed addresses as one cache, all or nothing, for compiled decoding.

Knows which operation touches which layers. Knows nothing of how one layer stores its tokens.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig, StaticCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from windowkv.cache import ROLLBACK, check_take_back, checked_rollback, rollback_count, storage_nbytes
from windowkv.errors import ConfigError, InputError, OptionError, RollbackError, UnsupportedOperationError
from windowkv.layout import CacheLayout, read_layout
from windowkv.rows import checked_rows
from windowkv.static_layers import FixedLayer
from windowkv.window import Retention

# Kinds of layers that cannot be static, and why.
_NO_STATIC: Mapping[str, str] = {
    "cross_attention": "would hold what an encoder saw",
    "hybrid_sliding": "get masks of another length than they have slots",
    "reference_sliding_attention": "are neither emptied by a reset nor follow beams",
}
_ATTENTION = ("eager", "sdpa")  # what is told by a mask which key lies where; others take the order of keys for it


class SlidingWindowCache(Cache):  # type: ignore[misc]
    """A cache whose shapes and addresses never change, so that a compiled forward serves every step.

    Layers with a window hold at most `window - 1 + rollback + slack` tokens, however large `max_cache_len` is, in a
    ring: a new token takes the slot of the oldest, and nothing moves. Full layers hold `max_cache_len`. Layers of a
    kind that windowkv does not store are those of transformers' `StaticCache`.

    Args:
        config: the model's config, or one that contains it as its text part.
        max_cache_len: the most tokens that will be fed, prompt and continuation.
        rollback: how far back from the furthest position reached `crop` can always go, in tokens.

    Raises:
        ConfigError: the config describes no causal decoder, contradicts itself, names an attention implementation that
            takes keys to be in order, or a window that its model does not apply, or has layers that cannot be static.
        OptionError: max_cache_len is no integer >= 1, or rollback none >= 0.
    """

    offloaded = False

    def __init__(self, config: PreTrainedConfig, max_cache_len: int, rollback: int = ROLLBACK) -> None:
        """See the class."""
        self._max_cache_len = checked_length(max_cache_len)
        self.rollback = checked_rollback(rollback)
        self.layout = read_layout(config)
        _check_attention(config)
        _check_masks(config, self.layout)
        super().__init__(layers=_new_layers(config, self.layout, max_cache_len, rollback))

    @property
    def max_cache_len(self) -> int:
        """The most tokens that may be fed."""
        return self._max_cache_len

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct storages that the cache holds: none of keys and values before the first token."""
        return storage_nbytes(self)

    @property
    def rows(self) -> int | None:
        """How many texts it holds; None before the first."""
        buffers = (layer.buffer for layer in self.layers if isinstance(layer, FixedLayer))
        return next((buffer.rows for buffer in buffers if buffer.rows is not None), None)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """The next token's position, as a tensor, which nobody has to wait for."""
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        return layer.buffer.seen.clone() if isinstance(layer, FixedLayer) else super().get_query_offset(layer_idx)

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, Any]:
        """As `FixedLayer.get_mask_sizes`. Raises InputError when a forward broke off, so that layers differ."""
        self.check_whole()
        return super().get_mask_sizes(*args, **kwargs)  # type: ignore[no-any-return]

    @property
    def interrupted(self) -> bool:
        """Whether a forward broke off, so that layers hold different tokens; `reset` mends it.

        In a compiled graph nobody can tell, and on an accelerator it would have to be waited for at every step.
        """
        if torch.compiler.is_compiling():
            return False
        counts = [layer.buffer.seen for layer in self.layers if isinstance(layer, FixedLayer)]
        return len({int(seen) for seen in counts if seen.device.type == "cpu"}) > 1

    def check_whole(self) -> None:
        """Raise InputError when a forward broke off."""
        if self.interrupted:
            raise InputError("a forward into this cache broke off, and its layers differ: call cache.reset() first")

    def check_fits(self, tokens: int) -> None:
        """Raise InputError when that many tokens in all are more than the cache was made for."""
        if tokens > self.max_cache_len:
            raise InputError(
                f"prompt and continuation need max_cache_len={tokens}, and this cache was made for "
                f"max_cache_len={self.max_cache_len}: make a larger one, or ask for fewer new tokens"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Take back `-tokens_to_remove` tokens; 0 changes nothing.

        Any point within `rollback` of the furthest position reached can be returned to, repeatedly; as long as no slot
        was taken twice, any point at all. Raises RollbackError when some layer cannot, as those of transformers with a
        state cannot, or a forward broke off; every layer is then as it was.
        """
        count = rollback_count(tokens_to_remove)
        if not count:
            return
        if self.interrupted:
            raise RollbackError("a forward into this cache broke off, and its layers differ: reset it first")
        for layer in self.layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):  # what it records of a draft leads to other tokens
                raise RollbackError(
                    f"cannot take back {count} tokens: a {type(layer).__name__} of transformers keeps a state with no "
                    "way back"
                )
        for layer in self.layers:
            check_take_back(layer, count)
        for layer in self.layers:
            layer.crop(-count)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row `beam_idx[i]` was, in place: only rows that change are copied.

        Raises InputError for a row that is not there, and for more or fewer rows than there are.
        """
        held = self.rows
        rows = checked_rows(beam_idx, held)
        if held is not None and len(rows.sources) != held:
            raise InputError(f"{len(rows.sources)} rows: a static cache keeps the {held} that it was allocated for")
        for layer in self.layers:
            if isinstance(layer, FixedLayer):
                layer.buffer.take_rows(rows)
            else:
                layer.reorder_cache(rows.sources)

    def batch_select_indices(self, indices: Tensor) -> None:
        """As `reorder_cache`: a static cache keeps its number of rows."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Raises InputError for anything but 1: a static cache keeps its number of rows."""
        if repeats != 1:
            raise InputError(f"repeats={repeats!r}: a static cache keeps the rows that it was allocated for")

    def fork(self) -> NoReturn:
        """Not of a static cache: raises UnsupportedOperationError."""
        raise UnsupportedOperationError("a static cache shares no storage: fork a DynamicSlidingWindowCache")

    def save(self, path: Any) -> NoReturn:
        """Not of a static cache: raises UnsupportedOperationError."""
        raise UnsupportedOperationError("a static cache is not saved: save a DynamicSlidingWindowCache")


def checked_length(max_cache_len: Any) -> int:
    """An integer >= 1. Raises OptionError otherwise."""
    if not isinstance(max_cache_len, int) or isinstance(max_cache_len, bool) or max_cache_len < 1:
        raise OptionError(f"max_cache_len={max_cache_len!r}: it is a number of tokens, an integer >= 1")
    return max_cache_len


def _check_attention(config: PreTrainedConfig) -> None:
    name = getattr(config.get_text_config(decoder=True), "_attn_implementation", None)
    if name is not None and name.removeprefix("windowkv_") not in _ATTENTION:
        raise ConfigError(
            f"attention implementation {name!r}: a static cache keeps keys in slots that only a mask tells apart; "
            f"use one of {', '.join(_ATTENTION)}, or a DynamicSlidingWindowCache"
        )


def _check_masks(config: PreTrainedConfig, layout: CacheLayout) -> None:
    decoder = config.get_text_config(decoder=True)
    window = getattr(decoder, "sliding_window", None)
    slides = "sliding_attention" in getattr(decoder, "layer_types", ["sliding_attention"])  # as generate sees it
    if window is not None and slides and "sliding" not in {spec.kind for spec in layout.layers}:
        raise ConfigError(
            f"{type(decoder).__name__} names a sliding_window={window!r} that its model never applies, and generate "
            "would apply to a static cache: use a DynamicSlidingWindowCache, or sliding_window=None"
        )
    if "linear_attention" in {spec.kind for spec in layout.layers} and not hasattr(decoder, "layer_types"):
        raise ConfigError(
            f"{type(decoder).__name__} has no layer_types, so that transformers takes the size of masks from a layer "
            "that may never see a token: use a DynamicSlidingWindowCache"
        )


def _new_layers(config: PreTrainedConfig, layout: CacheLayout, max_cache_len: int, rollback: int) -> list[Any]:
    """A layer per spec: ours where windowkv stores it, else the one that transformers makes for it."""
    for kind in dict.fromkeys(spec.kind for spec in layout.layers):
        if kind in _NO_STATIC:
            raise ConfigError(f"static {kind} layers {_NO_STATIC[kind]}: use a DynamicSlidingWindowCache")
    theirs: list[Any] = [None] * len(layout.layers)
    if not all(spec.buffered for spec in layout.layers):
        try:
            theirs = StaticCache(config=config, max_cache_len=max_cache_len).layers
        except KeyError as unknown:
            raise ConfigError(f"transformers has no static layers of kind {unknown}") from unknown
    return [
        FixedLayer(Retention(spec.window, rollback).ring(max_cache_len)) if spec.buffered else layer
        for spec, layer in zip(layout.layers, theirs, strict=False)
    ]
