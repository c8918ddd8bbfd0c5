"""Many layers as one cache, all or nothing: what `generate` and a forward loop are handed.

Knows which operation touches which layers. Knows nothing of how one layer stores its tokens.
"""

import copy
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from math import inf
from operator import index
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig

from windowkv import cache_file, snapshot
from windowkv.buffers import Buffer, Recording
from windowkv.changes import Changes
from windowkv.codecs import CODECS
from windowkv.errors import ConfigError, InputError, OptionError, RollbackError
from windowkv.history import TokenHistory
from windowkv.layers import BufferedLayer, recurrent_states
from windowkv.layout import CacheLayout, LayerSpec, read_layout
from windowkv.offload import HostBuffer, Transfers, fetch_ahead
from windowkv.packed_buffer import PackedBuffer
from windowkv.quantisation import PackedRetention, Quantisation
from windowkv.rows import RowSelection, checked_rows

logger = logging.getLogger(__name__)

ROLLBACK = 64  # tokens that can be taken back unless asked for otherwise; transformers drafts 20 at a time


class DynamicSlidingWindowCache(DynamicCache):  # type: ignore[misc]
    """A cache whose layers with a window hold at most `window - 1 + rollback + slack` tokens; full layers hold all.

    A drop-in for transformers' `DynamicCache`: pass it to `generate` or to a model's forward. Layers of a kind that has
    no window and is not plain attention (linear, recurrent, indexed, ...) are transformers' own.

    Args:
        config: the model's config, or one that contains it as its text part.
        rollback: how far back from the furthest position reached `crop` can always go, in tokens.
        kv_dtype: "int8", "int4" or "fp8" to keep all but the newest tokens in so many bits; None for as computed. Such
            a cache carries no gradients.
        quantize: which layers that is: "full" for those that keep every token, "all" for those with a window too.
        offload: keep full layers in host memory, and bring each to the accelerator for its share of a forward, while
            the layers before it compute. Such a cache carries no gradients, and is not quantised. Without an
            accelerator it changes nothing, and says so.

    Raises:
        ConfigError: the config describes no causal decoder, or contradicts itself.
        OptionError: rollback is no integer >= 0, offload no bool, there is no such kv_dtype or quantize, or it does not
            fit a head_dim or offload.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        rollback: int = ROLLBACK,
        *,
        kv_dtype: str | None = None,
        quantize: str = "full",
        offload: bool = False,
    ) -> None:
        """See the class."""
        self.quantisation = Quantisation(kv_dtype, quantize)
        self.rollback = checked_rollback(rollback)
        self.layout = read_layout(config)
        self.quantisation.check(self.layout)
        transfers = _checked_transfers(offload, self.quantisation)
        self.offloaded = transfers is not None  # whether full layers lie in host memory
        self.history: TokenHistory | None = None  # the ids seen, once it was used in generate of an enabled model
        self.changes = Changes()
        # Not DynamicCache.__init__, which makes its own layers: that base is there for encoder-decoder caches to find.
        Cache.__init__(self, layers=_new_layers(config, self.layout, rollback, self.quantisation, transfers))
        self._unused = {i: fork_layer(layer) for i, layer in enumerate(self.layers) if i in self.layout.foreign}

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct storages that the cache holds now."""
        return storage_nbytes(self)

    @property
    def is_compileable(self) -> bool:
        """False: shapes follow the tokens, so `generate` must not compile around this cache by itself."""
        return False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add tokens `[B, H, Q, D]` to a layer and return all that they attend to, as `windowkv.buffers.Buffer.append`.

        A single row that is held serves a batch of any size, unless a layer is transformers' own: InputError then.
        """
        rows = _rows(self.layers[layer_idx]) if self.layout.foreign else None
        if rows is not None and rows != key_states.shape[0]:
            raise InputError(
                f"a batch of {key_states.shape[0]}, but this cache holds {rows} rows, and some of its layers "
                "cannot repeat them: use batch_repeat_interleave first, or a new cache"
            )
        if self.offloaded:
            buffers = [getattr(layer, "buffer", None) for layer in self.layers]
            fetch_ahead(buffers, layer_idx, key_states.device)
        states: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if not torch.compiler.is_compiling():
            self.changes.touch()
        return states

    def crop(self, tokens_to_remove: int) -> None:
        """Take back `-tokens_to_remove` tokens; 0 changes nothing.

        Any point within `rollback` of the furthest position reached can be returned to, repeatedly; as long as nothing
        was dropped, any point at all; after `activate_past_recording`, a draft of any length.

        Raises RollbackError when some layer cannot, or a change broke off; every layer is then as it was.
        """
        count = rollback_count(tokens_to_remove)
        if self.interrupted:
            raise RollbackError("a change of this cache did not end, and its layers may differ: reset it first")
        # What an encoder saw is no part of the text.
        encoder = {i for i, spec in enumerate(self.layout.layers) if spec.kind == "cross_attention"}
        layers = [layer for i, layer in enumerate(self.layers) if i not in encoder]
        for layer in layers:
            check_take_back(layer, count)
        with self._changing():
            for layer in layers:
                # transformers' recording layers drop what they recorded at crop(0)
                if count or getattr(layer, "record_past", False):
                    layer.crop(-count)
        if count and self.history is not None:
            self.history.truncate(self.get_seq_length())

    def reset(self) -> None:
        """Forget every token, and drafts, and free the storage."""
        for i, layer in enumerate(self.layers):
            if i in self._unused:  # transformers' own would keep their size, and with it the batch
                vars(layer).clear()
                vars(layer).update(vars(fork_layer(self._unused[i])))
            else:
                layer.reset()
        self.changes = Changes()
        if self.history is not None:
            self.history = TokenHistory()

    @property
    def rows(self) -> int | None:
        """How many texts it holds; None before the first."""
        buffers = [layer.buffer for layer in self.layers if isinstance(layer, BufferedLayer)]
        held = (buffer.held_tensors for buffer in buffers)
        states = map(recurrent_states, self.layers)
        return next((tensors[0].shape[0] for tensors in (*held, *states) if tensors), None)

    @property
    def interrupted(self) -> bool:
        """Whether a change broke off, so that layers may hold different tokens; `reset` mends it."""
        ends = {layer.get_seq_length() for layer in self.layers if isinstance(layer, BufferedLayer)}
        return self.changes.broken or len(ends) > 1

    def check_whole(self) -> None:
        """Raise InputError when a change broke off."""
        if self.interrupted:
            raise InputError(
                "a change of this cache did not end, and its layers may hold different tokens: "
                "pass the whole text to generate, or call cache.reset() first"
            )

    @property
    def extended(self) -> bool:
        """Whether a model added layers of its own, as one does that runs some of its layers several times."""
        return len(self.layers) > len(self.layout.layers)

    def fork(self) -> "DynamicSlidingWindowCache":
        """An independent cache at the same point.

        A layer's storage is shared until one of the two writes to it, which then takes a copy. Layers that are
        transformers' own are copied now.
        """
        twin = copy.copy(self)
        twin.layers = [fork_layer(layer) for layer in self.layers]
        twin.history = None if self.history is None else self.history.fork()
        twin.changes = copy.copy(self.changes)
        return twin

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what the cache holds to a safetensors file, which `windowkv.load` reads.

        Whatever happens, the file is then the old one or the new one, whole; of several writers at once, one's.
        What lies in reach of `crop` beyond `rollback` is not written. Raises CacheFileError when it cannot be written,
        InputError when a forward into the cache broke off, so that its layers hold different tokens, or when the model
        added layers of its own to it.
        """
        self.check_whole()
        if self.extended:
            raise InputError(
                f"this cache has {len(self.layers)} layers, and the model's config says {len(self.layout.layers)}: the "
                "model added the others itself, and a file could not tell what they are; fork works"
            )
        manifest, tensors = snapshot.take(self.layers, self.layout, self.history)
        seen = None if all(self.is_linear) else self.get_seq_length()
        more = {"version": version("windowkv"), "rollback": self.rollback, "tokens": seen}
        more |= {"kv_dtype": self.quantisation.kv_dtype, "quantize": self.quantisation.quantize}
        cache_file.write(path, tensors, more | manifest)

    def activate_past_recording(self, *, drafts: bool = False) -> None:
        """Make drafts of any length possible to take back, at the cost of holding them besides, until they are.

        `drafts` is for the cache of a model that drafts itself, token by token.
        """
        super().activate_past_recording()
        for layer in self.layers:
            if drafts and isinstance(layer, BufferedLayer):
                layer.buffer.recording = replace(layer.buffer.recording, drafts=True)

    def deactivate_past_recording(self) -> None:
        """Hold no drafts any more: what is fed from now on is bounded as ever."""
        for layer in self.layers:
            if isinstance(layer, BufferedLayer):
                layer.buffer.recording = Recording()
            elif getattr(layer, "record_past", False) and _recorded(layer) in (0, inf):
                layer.record_past = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row `beam_idx[i]` was, integers `[B']`. Raises InputError for a row that is not there."""
        self._take_rows(checked_rows(beam_idx, self.rows))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only rows `indices`: integers `[B']`, or a mask `[B]`. Raises InputError for one that is not there."""
        self._take_rows(checked_rows(indices, self.rows))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, next to itself. Raises InputError below 1."""
        try:
            count = 0 if isinstance(repeats, bool) else index(repeats)
        except TypeError:
            count = 0
        if count < 1:
            raise InputError(f"repeats={repeats!r}: every row can be repeated 1 time or more")
        if self.rows is not None:
            self._take_rows(RowSelection(torch.arange(self.rows).repeat_interleave(count)))

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Mark that layers change one by one; when that breaks off, the mark stays."""
        self.changes.begin()
        self.changes.touch()
        yield
        self.changes.end()

    def _take_rows(self, rows: RowSelection) -> None:
        if rows.keeps_all(self.rows):  # as beams often do
            return
        with self._changing():
            for layer in self.layers:
                if isinstance(layer, BufferedLayer):
                    layer.buffer.take_rows(rows)
                else:  # some of transformers' own know no other selection of rows than this one
                    layer.reorder_cache(rows.sources)
        if self.history is not None:
            self.history.take_rows(rows.sources)


def _checked_transfers(offload: Any, quantisation: Quantisation) -> Transfers | None:
    """What moves full layers to and from host memory; None where they stay. Raises OptionError."""
    if not isinstance(offload, bool):
        raise OptionError(f"offload={offload!r}: True or False")
    if offload and quantisation.kv_dtype is not None:
        raise OptionError(
            f"offload=True with kv_dtype={quantisation.kv_dtype!r}: quantised layers stay where they are; use one"
        )
    transfers = Transfers()
    if offload and not transfers.available():
        logger.warning("offload=True: this machine has no accelerator, so there is nothing to offload")
        return None
    return transfers if offload else None


def _new_layers(
    config: PreTrainedConfig,
    layout: CacheLayout,
    rollback: int,
    quantisation: Quantisation,
    transfers: Transfers | None,
) -> list[Any]:
    """A layer per spec: ours where windowkv stores it, else the one that transformers makes for it."""
    theirs: list[Any] = [None] * len(layout.layers)
    if not all(spec.buffered for spec in layout.layers):
        try:
            theirs = DynamicCache(
                config=config
            ).layers  # in older releases without the layers that share, which come last
        except KeyError as unknown:
            raise ConfigError(
                f"layers of kind {unknown} are known neither to windowkv nor to transformers so far; "
                "a model that brings its own kind must be loaded first"
            ) from unknown
    return [
        BufferedLayer(_new_buffer(spec, rollback, quantisation, transfers)) if spec.buffered else layer
        for spec, layer in zip(layout.layers, theirs, strict=False)
    ]


def _new_buffer(
    spec: LayerSpec, rollback: int, quantisation: Quantisation, transfers: Transfers | None
) -> Buffer | PackedBuffer:
    retention = quantisation.retention(spec, rollback)
    if isinstance(retention, PackedRetention):
        return PackedBuffer(retention, CODECS[str(quantisation.kv_dtype)])
    return HostBuffer(retention, transfers) if transfers and spec.kind == "full" else Buffer(retention)


def _rows(layer: Any) -> int | None:
    """How many rows a layer holds, ours or not; None while it holds nothing."""
    if isinstance(layer, BufferedLayer):
        return layer.buffer.rows
    held = getattr(layer, "keys", None)
    return held.shape[0] if held is not None and held.numel() else None


def checked_rollback(rollback: Any) -> int:
    """An integer >= 0. Raises OptionError otherwise."""
    if not isinstance(rollback, int) or isinstance(rollback, bool) or rollback < 0:
        raise OptionError(f"rollback={rollback!r}: it is a number of tokens, an integer >= 0")
    return rollback


def fork_layer(layer: Any) -> Any:
    """An independent layer: ours shares storage until it is written, transformers' own is copied."""
    if isinstance(layer, BufferedLayer):
        return layer.fork()
    twin = copy.copy(layer)
    vars(twin).update({name: _copied(value) for name, value in vars(layer).items()})
    return twin


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return copy.copy(value) if isinstance(value, list) else value


def storage_nbytes(cache: Cache) -> int:
    """Bytes of the distinct storages behind any transformers cache: what it keeps alive, not what its views show."""
    return layers_nbytes(cache.layers)


def layers_nbytes(layers: Iterable[Any]) -> int:
    """Bytes of the distinct storages behind some layers of caches."""
    return sum(storages(layers).values())


def storages(layers: Iterable[Any]) -> dict[int, int]:
    """The distinct storages behind some layers of caches: bytes by address."""
    held = (tensor.untyped_storage() for layer in layers for tensor in _tensors(layer))
    return {storage.data_ptr(): storage.nbytes() for storage in held}


def _tensors(held: Any) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        if hasattr(held, "__tensor_flatten__"):  # a quantised tensor is made of plain ones
            for name in held.__tensor_flatten__()[0]:
                yield from _tensors(getattr(held, name))
        else:
            yield held
    elif isinstance(held, BufferedLayer):
        yield from held.buffer.held_tensors
    elif isinstance(held, dict):
        for value in held.values():
            yield from _tensors(value)
    elif isinstance(held, (list, tuple)):
        for value in held:
            yield from _tensors(value)
    elif hasattr(held, "__dict__"):
        yield from _tensors(vars(held))


def rollback_count(tokens_to_remove: int) -> int:
    """How many tokens a `crop` takes back. Raises RollbackError for an argument above 0."""
    try:
        count = -index(tokens_to_remove)  # older releases hand over a tensor
    except TypeError:
        count = -1
    if count < 0:
        raise RollbackError(
            f"crop({tokens_to_remove!r}): the argument is minus the number of tokens to take back, an integer <= 0"
        )
    return count


def check_take_back(layer: Any, count: int) -> None:
    """Raise RollbackError when a layer cannot take back that many tokens."""
    if hasattr(layer, "buffer"):
        layer.buffer.check_take_back(count)
    elif count and not (layer.is_croppable and getattr(layer, "record_past", True) and _recorded(layer) >= count):
        raise RollbackError(
            f"cannot take back {count} tokens: a {type(layer).__name__} of transformers keeps a state with no way back"
        )


def _recorded(layer: Any) -> float:
    """Tokens that the convolution states of one of transformers' layers can go back; infinite where there are none."""
    states = getattr(layer, "conv_states", {})
    return min(
        (state.shape[-1] - layer.conv_kernel_size[i] for i, state in states.items() if state is not None), default=inf
    )
