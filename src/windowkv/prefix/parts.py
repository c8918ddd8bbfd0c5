"""What is kept of a cache: blocks of its full layers, and checkpoints of all else; and a cache made of them again.

A block holds tokens as a layer stores them for good, packed where it packs them; what is newest is as computed in a
checkpoint. Knows which layer goes where. Knows nothing of texts, and of what is kept how long.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from windowkv.buffers import TOKENS, Buffer
from windowkv.cache import DynamicSlidingWindowCache, fork_layer, layers_nbytes
from windowkv.errors import CacheFileError
from windowkv.history import TokenHistory
from windowkv.layers import BufferedLayer
from windowkv.packed_buffer import Held, PackedBuffer
from windowkv.quantisation import PackedRetention, Quantisation
from windowkv.snapshot import restore_layer, take_layer, under
from windowkv.window import Retention, Span

Block = tuple[tuple[Tensor, ...], ...]  # of each full layer: keys and values, or their parts, [1, H, tokens, ...] each


@dataclass
class Checkpoint:
    """All that one row of a cache held at one position beside the blocks of its full layers."""

    layers: dict[int, Any]  # by index: bounded layers, transformers' own, and the newest tokens of packed full ones
    room: int  # how many tokens it can go back
    rollback: int
    quantisation: Quantisation
    nbytes: int


def full_layers(cache: DynamicSlidingWindowCache) -> list[BufferedLayer]:
    """The layers that keep every token."""
    return [layer for layer, spec in zip(cache.layers, cache.layout.layers, strict=False) if spec.kind == "full"]


def take_block(cache: DynamicSlidingWindowCache, row: int, start: int, end: int) -> Block:
    """A copy of positions [start, end) of the full layers."""
    return tuple(layer.buffer.between(row, start, end) for layer in full_layers(cache))


def is_same(block: Block, cache: DynamicSlidingWindowCache, row: int, start: int, end: int) -> bool:
    """Whether a cache holds at positions [start, end) what a block begins with, for the same ids.

    As computed, that differs in rounding alone, however a text was fed. Packed, a token is what its past was packed to.
    """
    if cache.quantisation.kv_dtype is None:
        return True
    return all(
        torch.equal(mine.view(torch.uint8), kept[:, :, : end - start].view(torch.uint8))
        for theirs, ours in zip(block, take_block(cache, row, start, end), strict=True)
        for kept, mine in zip(theirs, ours, strict=True)
    )


def take_checkpoint(cache: DynamicSlidingWindowCache, row: int, padding: int = 0) -> Checkpoint:
    """A copy of all that is in no block, of a row in which so much padding comes before the text."""
    layers: dict[int, Any] = {}
    room = cache.get_seq_length() - padding
    for i, (layer, spec) in enumerate(zip(cache.layers, cache.layout.layers, strict=False)):
        if spec.buffered:
            taken, back = _taken(layer.buffer, row, padding, whole=spec.bounded)
            room = min(room, back)
            if taken is not None:
                layers[i] = BufferedLayer(taken)
        else:
            layers[i] = fork_layer(layer)
            if spec.kind != "shared":
                room = 0
                layers[i].reorder_cache(torch.tensor([row]))
    return Checkpoint(layers, room, cache.rollback, cache.quantisation, layers_nbytes(layers.values()))


def split_block(block: Block, at: int) -> tuple[Block, Block]:
    """Its first `at` tokens, and the others; copies, since a view of either half would keep both alive."""
    first = tuple(tuple(part[:, :, :at].clone() for part in layer) for layer in block)
    others = tuple(tuple(part[:, :, at:].clone() for part in layer) for layer in block)
    return first, others


def block_nbytes(block: Block | None) -> int:
    """Bytes of a block, which owns its storages."""
    return sum(part.untyped_storage().nbytes() for layer in block or () for part in layer)


def assemble(
    config: Any, checkpoint: Checkpoint, back: int, blocks: Iterable[Block], point: int, rollback: int | None = None
) -> DynamicSlidingWindowCache:
    """A cache that has seen `point` tokens, `back` fewer than the checkpoint; nothing is copied until it is written.

    It is packed as far as one is that was fed so many tokens. (A layer with a window packs some for that now.)
    """
    rollback = checkpoint.rollback if rollback is None else rollback
    cache = DynamicSlidingWindowCache(config, rollback, **asdict(checkpoint.quantisation))
    columns = iter(zip(*blocks, strict=True))  # by full layer
    for i, (layer, spec) in enumerate(zip(cache.layers, cache.layout.layers, strict=False)):
        kept: Any = checkpoint.layers.get(i)
        if spec.kind == "full":
            layer.buffer = _refilled(layer.buffer, next(columns), kept.buffer if kept else None, point)
        elif spec.bounded:
            layer.buffer = _resumed(kept.buffer, layer.buffer, back)
        else:
            cache.layers[i] = fork_layer(kept)
    return cache


def checkpoint_content(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A checkpoint as a manifest and tensors by name."""
    manifest: dict[str, Any] = {"room": checkpoint.room, "rollback": checkpoint.rollback, "layers": {}}
    tensors: dict[str, Tensor] = {}
    for i, layer in checkpoint.layers.items():
        manifest["layers"][str(i)], named = take_layer(layer)
        tensors |= {f"{i}.{name}": tensor for name, tensor in named.items()}
    return manifest, tensors


def checkpoint_from(
    config: Any, quantisation: Quantisation, manifest: Mapping[str, Any], tensors: Mapping[str, Tensor], seen: int
) -> Checkpoint:
    """The checkpoint that `checkpoint_content` tells of. Raises CacheFileError when it is none of this config's."""
    try:
        cache = DynamicSlidingWindowCache(config, manifest["rollback"], **asdict(quantisation))
        layers = {}
        for i, (layer, spec) in enumerate(zip(cache.layers, cache.layout.layers, strict=False)):
            if spec.kind == "full":
                if not isinstance(layer.buffer, PackedBuffer):
                    continue
                layer = BufferedLayer(Buffer(_newest(layer.buffer.parts)))
            restore_layer(layer, spec, manifest["layers"][str(i)], under(f"{i}.", tensors), seen)
            layers[i] = layer
        return Checkpoint(layers, int(manifest["room"]), cache.rollback, quantisation, layers_nbytes(layers.values()))
    except (KeyError, TypeError, ValueError) as wrong:
        raise CacheFileError(f"no checkpoint: {wrong}") from wrong


def block_content(block: Block) -> dict[str, Tensor]:
    """A block as tensors by name."""
    return {f"{i}.{j}": part for i, layer in enumerate(block) for j, part in enumerate(layer)}


def block_from(tensors: Mapping[str, Tensor], layers: int) -> Block:
    """The block that `block_content` tells of. Raises CacheFileError when it has not that many layers."""
    named = [under(f"{i}.", tensors) for i in range(layers)]
    try:
        return tuple(tuple(parts[str(j)] for j in range(max(2, len(parts)))) for parts in named)
    except KeyError as missing:
        raise CacheFileError(f"no block: {missing} is missing") from missing


def stack(
    caches: list[DynamicSlidingWindowCache | None], end: int, histories: list[Tensor]
) -> DynamicSlidingWindowCache:
    """One cache of the rows of several, whose texts all end at position `end`; a single one as it is.

    What comes before a text is padding; None is a row of padding alone. histories: ids `[1, end]` of each row.
    """
    full = [cache for cache in caches if cache is not None]
    first = full[0]
    if len(caches) > 1:
        for i, layer in enumerate(first.layers):
            if isinstance(layer, BufferedLayer):
                layer.buffer = _stacked([cache and cache.layers[i].buffer for cache in caches], end)
            else:
                _stack_states(layer, [cache.layers[i] for cache in full])
    first.history = TokenHistory(torch.cat(histories))
    return first


def _taken(
    buffer: Buffer | PackedBuffer, row: int, padding: int, *, whole: bool
) -> tuple[Buffer | PackedBuffer | None, int]:
    """A copy of what no block holds of a layer, of all where it has no blocks; and how many tokens it can go back."""
    if isinstance(buffer, Buffer):
        if not whole:
            return None, buffer.span.end - padding
        tail = _row_of(buffer, row, padding)
        return tail, buffer.retention.rollback_room(tail.span)
    recent = _row_of(buffer.recent, row, padding)
    room = buffer.parts.way_back(recent.span)
    if not whole:
        return Buffer.over(_newest(buffer.parts), recent.span, recent.storages), room
    # Nothing is both packed and as computed: going back packs what it must.
    until = recent.span.start + padding
    start = min(max(buffer.held().packed.start, padding), until)
    packed = Span(start - padding, recent.span.start)
    parts = buffer.between(row, start, until) if packed.held else ()
    taken = PackedBuffer.over(buffer.parts, buffer.codecs, Held(packed, parts, recent.span, recent.storages))
    return taken, min(room, buffer.retention.rollback_room(taken.span))


def _row_of(buffer: Buffer, row: int, padding: int) -> Buffer:
    """A copy of what must be kept of a row, at the positions that it has without padding."""
    span, _ = buffer.kept()
    start = min(max(span.start, padding), span.end)
    return Buffer.over(
        buffer.retention, Span(start - padding, span.end - padding), buffer.between(row, start, span.end)
    )


def _newest(parts: PackedRetention) -> Retention:
    """What a checkpoint keeps of a packed full layer: as many of the newest tokens as computed as the layer does."""
    return Retention(1, rollback=parts.recent.kept or 0)


def _resumed(kept: Buffer | PackedBuffer, empty: Buffer | PackedBuffer, back: int) -> Buffer | PackedBuffer:
    """What a checkpoint holds of a bounded layer, so many tokens earlier, as the layer of a new cache keeps it."""
    buffer = kept.fork()
    buffer.take_back(back)
    if isinstance(buffer, Buffer):
        return _kept(buffer, empty.retention)
    assert isinstance(empty, PackedBuffer)
    empty.packed, empty.recent = _kept(buffer.packed, empty.parts.packed), _kept(buffer.recent, empty.parts.recent)
    return empty


def _refilled(
    empty: Buffer | PackedBuffer, blocks: Sequence[tuple[Tensor, ...]], newest: Buffer | None, point: int
) -> Buffer | PackedBuffer:
    """What blocks hold of a full layer up to a point, beside what a checkpoint holds of it where it is packed."""
    if isinstance(empty, Buffer):
        return _in_pieces(blocks, point, empty.retention)
    assert newest is not None
    recent = newest.fork()
    recent.cut(point)
    empty.recent = _kept(recent, empty.parts.recent)
    empty.packed = _in_pieces(blocks, max(empty.parts.packed_until(point), empty.recent.span.start), empty.parts.packed)
    return empty


def _in_pieces(blocks: Sequence[tuple[Tensor, ...]], end: int, retention: Retention) -> Buffer:
    """The first `end` tokens of some blocks of one layer."""
    needed, tokens = [], 0
    for block in blocks:
        if tokens >= end:
            break
        needed.append(block)
        tokens += block[0].shape[TOKENS]
    return Buffer.in_pieces(retention, Span(0, end), tuple(zip(*needed, strict=True)))


def _kept(buffer: Buffer, retention: Retention) -> Buffer:
    """What another retention keeps of a buffer that is nobody else's."""
    buffer.retention = retention
    return Buffer.over(retention, *buffer.kept())


def _stacked(buffers: Sequence[Buffer | PackedBuffer | None], end: int) -> Buffer | PackedBuffer:
    """Rows of one buffer, as long as the one that holds least; one that holds its text whole goes on with zeros."""
    plain = [buffer for buffer in buffers if isinstance(buffer, Buffer)]
    packed = [buffer for buffer in buffers if isinstance(buffer, PackedBuffer)]
    if plain:
        span = Span(_first(plain, end), end)
        return Buffer.over(plain[0].retention, span, _rows(buffers, span, end))
    parts, recents = packed[0].parts, [buffer and buffer.recent for buffer in buffers if not isinstance(buffer, Buffer)]
    recent = Span(_first([buffer.recent for buffer in packed], end), end)
    until = max(parts.packed_until(end), recent.start)
    old = Span(min(_first(packed, end), until), until)
    held = Held(old, _rows(buffers, old, end) if old.held else (), recent, _rows(recents, recent, end))
    return PackedBuffer.over(parts, packed[0].codecs, held)


def _first(buffers: Sequence[Buffer | PackedBuffer], end: int) -> int:
    """From which position of a batch on all of them hold their texts, which end at `end`."""
    return max((end - buffer.span.held for buffer in buffers if buffer.span.start), default=0)


def _rows(buffers: Sequence[Buffer | PackedBuffer | None], span: Span, end: int) -> tuple[Tensor, ...]:
    """What buffers hold at positions of a batch in which their texts end at `end`, a row each; zeros before a text."""
    rows: list[tuple[Tensor, ...] | None] = []
    for buffer in buffers:
        if buffer is None:
            rows.append(None)
            continue
        padding = end - buffer.span.end
        last = span.end - padding
        first = min(max(span.start - padding, buffer.span.start), last)
        rows.append(buffer.between(0, first, last))
    nothing = next(tuple(state[:, :, :0] for state in row) for row in rows if row is not None)
    filled = [[_filled(state, span.held) for state in (nothing if row is None else row)] for row in rows]
    return tuple(torch.cat(column) for column in zip(*filled, strict=True))


def _filled(state: Tensor, width: int) -> Tensor:
    """The same with zeros before it, up to a width."""
    held = state.shape[TOKENS]
    if held == width:
        return state
    filled = state.new_zeros((*state.shape[:TOKENS], width, state.shape[-1]))
    filled[:, :, width - held :] = state
    return filled


def _stack_states(layer: Any, others: list[Any]) -> None:
    """transformers' own layers: tensors whose first dimension is the batch, alone or by number."""
    for name, value in vars(layer).items():
        if isinstance(value, Tensor):
            setattr(layer, name, torch.cat([getattr(other, name) for other in others]))
        elif isinstance(value, dict):
            for key, state in value.items():
                if isinstance(state, Tensor):
                    value[key] = torch.cat([getattr(other, name)[key] for other in others])
