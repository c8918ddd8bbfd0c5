"""What is kept of a cache: blocks of its full layers, and checkpoints of all others; and a cache made of them again.

Knows which layer goes where. Knows nothing of texts, and of what is kept how long.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from windowkv.buffers import Buffer
from windowkv.cache import DynamicSlidingWindowCache, fork_layer, layers_nbytes
from windowkv.errors import CacheFileError
from windowkv.history import TokenHistory
from windowkv.layers import BufferedLayer
from windowkv.packed_buffer import Held, PackedBuffer
from windowkv.quantisation import Quantisation
from windowkv.snapshot import restore_layer, take_layer, under
from windowkv.window import Span

_RECENT, _STATES = "recent.", ("keys", "values")

Block = tuple[tuple[Tensor, ...], ...]  # of each full layer, what it stores of some tokens: [1, H, tokens, ...] each


@dataclass
class Checkpoint:
    """All that one row of a cache held at one position beside the blocks of its full layers."""

    layers: dict[int, Any]  # by index: bounded layers, and transformers' own
    recent: list[Buffer]  # what each full layer held unpacked, where they are quantised
    room: int  # how many tokens it can go back
    rollback: int
    quantisation: Quantisation
    nbytes: int
    used: int = 0  # when, as a count of uses


def full_layers(cache: DynamicSlidingWindowCache) -> list[BufferedLayer]:
    """The layers that keep every token."""
    return [layer for layer, spec in zip(cache.layers, cache.layout.layers, strict=False) if spec.kind == "full"]


def take_block(cache: DynamicSlidingWindowCache, row: int, start: int, end: int) -> Block:
    """A copy of positions [start, end) of the full layers, packed where they are quantised."""
    buffers = [layer.buffer for layer in full_layers(cache)]
    states = [
        buffer.as_packed(start, end) if isinstance(buffer, PackedBuffer) else buffer.states(start, end)
        for buffer in buffers
    ]
    return tuple(tuple(state[row : row + 1].clone() for state in each) for each in states)


def block_names(cache: DynamicSlidingWindowCache) -> list[tuple[str, ...]]:
    """What the tensors of a block are called, by full layer."""
    buffers = [layer.buffer for layer in full_layers(cache)]
    return [buffer.names if isinstance(buffer, PackedBuffer) else ("keys", "values") for buffer in buffers]


def take_checkpoint(cache: DynamicSlidingWindowCache, row: int) -> Checkpoint:
    """A copy of all other layers."""
    layers: dict[int, Any] = {}
    room = cache.get_seq_length()
    for i, (layer, spec) in enumerate(zip(cache.layers, cache.layout.layers, strict=False)):
        if spec.bounded:
            layers[i], back = _taken(layer, row)
            room = min(room, back)
        elif spec.kind != "full":
            layers[i] = fork_layer(layer)
            if spec.kind != "shared":
                room = 0
                layers[i].reorder_cache(torch.tensor([row]))
    packed = [layer.buffer for layer in full_layers(cache) if isinstance(layer.buffer, PackedBuffer)]
    recent = [_row_of(buffer.held(), row) for buffer in packed]
    buffers = [
        Buffer.over(each.parts.recent, held.recent, held.states) for each, held in zip(packed, recent, strict=True)
    ]
    return _checkpoint(layers, buffers, room, cache)


def split_block(block: Block, at: int) -> tuple[Block, Block]:
    """Its first `at` tokens, and the others; copies, since a view of either half would keep both alive."""
    first = tuple(tuple(states[:, :, :at].clone() for states in layer) for layer in block)
    others = tuple(tuple(states[:, :, at:].clone() for states in layer) for layer in block)
    return first, others


def block_nbytes(block: Block | None) -> int:
    """Bytes of a block, which owns its storages."""
    return sum(states.untyped_storage().nbytes() for layer in block or () for states in layer)


def assemble(
    config: Any, checkpoint: Checkpoint, back: int, blocks: Iterable[Block], point: int
) -> DynamicSlidingWindowCache:
    """A cache that has seen `point` tokens, `back` fewer than the checkpoint; nothing is copied until it is written."""
    cache = DynamicSlidingWindowCache(config, checkpoint.rollback, **asdict(checkpoint.quantisation))
    for i, layer in checkpoint.layers.items():
        cache.layers[i] = fork_layer(layer)
        if isinstance(layer, BufferedLayer):
            cache.layers[i].buffer.take_back(back)
    columns = list(zip(*blocks, strict=True))
    recent = iter(checkpoint.recent)
    for layer, layers in zip(full_layers(cache), columns, strict=True):
        buffer, pieces = layer.buffer, tuple(zip(*layers, strict=True))
        if isinstance(buffer, PackedBuffer):
            buffer.recent = next(recent).fork()
            packed = Span(0, min(point, buffer.recent.span.start))
            buffer.recent.cut(point)
            buffer.packed = Buffer.in_pieces(buffer.packed.retention, packed, pieces)
        else:
            layer.buffer = Buffer.in_pieces(buffer.retention, Span(0, point), pieces)
    return cache


def checkpoint_content(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A checkpoint as a manifest and tensors by name."""
    manifest: dict[str, Any] = {"room": checkpoint.room, "rollback": checkpoint.rollback, "layers": {}}
    tensors: dict[str, Tensor] = {}
    for i, layer in checkpoint.layers.items():
        manifest["layers"][str(i)], named = take_layer(layer)
        tensors |= {f"{i}.{name}": tensor for name, tensor in named.items()}
    for i, buffer in enumerate(checkpoint.recent):
        manifest.setdefault("packed", []).append(buffer.span.start)
        tensors |= {f"{_RECENT}{i}.{name}": each for name, each in zip(_STATES, buffer.storages, strict=True)}
    return manifest, tensors


def checkpoint_from(
    config: Any, quantisation: Quantisation, manifest: Mapping[str, Any], tensors: Mapping[str, Tensor], seen: int
) -> Checkpoint:
    """The checkpoint that `checkpoint_content` tells of. Raises CacheFileError when it is none of this config's."""
    try:
        cache = DynamicSlidingWindowCache(config, manifest["rollback"], **asdict(quantisation))
        layers = {}
        for i, (layer, spec) in enumerate(zip(cache.layers, cache.layout.layers, strict=False)):
            if spec.kind != "full":
                restore_layer(layer, spec, manifest["layers"][str(i)], under(f"{i}.", tensors), seen)
                layers[i] = layer
        packed = [layer.buffer for layer in full_layers(cache) if isinstance(layer.buffer, PackedBuffer)]
        recent = [
            Buffer.over(
                buffer.parts.recent, Span(start, seen), tuple(tensors[f"{_RECENT}{i}.{name}"] for name in _STATES)
            )
            for i, (buffer, start) in enumerate(zip(packed, manifest.get("packed", ()), strict=True))
        ]
        return _checkpoint(layers, recent, int(manifest["room"]), cache)
    except (KeyError, TypeError, ValueError) as wrong:
        raise CacheFileError(f"no checkpoint: {wrong}") from wrong


def block_content(block: Block, names: list[tuple[str, ...]]) -> dict[str, Tensor]:
    """A block as tensors by name, which `block_names` tells."""
    named = [dict(zip(layer_names, layer, strict=True)) for layer_names, layer in zip(names, block, strict=True)]
    return {f"{i}.{name}": each for i, layer in enumerate(named) for name, each in layer.items()}


def block_from(tensors: Mapping[str, Tensor], names: list[tuple[str, ...]]) -> Block:
    """The block that `block_content` tells of. Raises CacheFileError when it has not these names."""
    try:
        return tuple(tuple(tensors[f"{i}.{name}"] for name in layer) for i, layer in enumerate(names))
    except KeyError as missing:
        raise CacheFileError(f"no block: {missing} is missing") from missing


def stack(caches: list[DynamicSlidingWindowCache]) -> DynamicSlidingWindowCache:
    """One cache of the rows of several, which have seen as many tokens; a single one as it is."""
    first = caches[0]
    if len(caches) == 1:
        return first
    for i, layer in enumerate(first.layers):
        others = [cache.layers[i] for cache in caches]
        if isinstance(layer, BufferedLayer):
            layer.buffer = _stacked_layer([other.buffer for other in others])
        else:
            _stack_states(layer, others)
    histories = [cache.history.tokens for cache in caches if cache.history is not None]
    first.history = TokenHistory(torch.cat(histories)) if len(histories) == len(caches) else None
    return first


def _stacked_layer(buffers: list[Any]) -> Any:
    first = buffers[0]
    if not isinstance(first, PackedBuffer):
        return _stacked(buffers)
    until = max(buffer.packed.span.end for buffer in buffers)  # in a batch, packing stands at one position
    for buffer in buffers:
        buffer.pack_until(until)
    held = [buffer.held() for buffer in buffers]
    start = max(each.packed.start for each in held)
    parts = [[part[:, :, start - each.packed.start :] for part in each.parts] for each in held]
    stacked = Held(
        Span(start, until),
        tuple(map(torch.cat, zip(*parts, strict=True))),
        held[0].recent,
        tuple(map(torch.cat, zip(*(each.states for each in held), strict=True))),
    )
    return PackedBuffer.over(first.parts, first.codecs, stacked)


def _stacked(buffers: list[Buffer]) -> Buffer:
    held = min(buffer.kept()[0].held for buffer in buffers)
    end = buffers[0].span.end
    rows = [[state[:, :, state.shape[2] - held :] for state in buffer.kept()[1]] for buffer in buffers]
    states = tuple(torch.cat(column) for column in zip(*rows, strict=True))
    return Buffer.over(buffers[0].retention, Span(end - held, end), states)


def _stack_states(layer: Any, others: list[Any]) -> None:
    """transformers' own layers: tensors whose first dimension is the batch, alone or by number."""
    for name, value in vars(layer).items():
        if isinstance(value, Tensor):
            setattr(layer, name, torch.cat([getattr(other, name) for other in others]))
        elif isinstance(value, dict):
            for key, state in value.items():
                if isinstance(state, Tensor):
                    value[key] = torch.cat([getattr(other, name)[key] for other in others])


def _taken(layer: BufferedLayer, row: int) -> tuple[BufferedLayer, int]:
    buffer, twin = layer.buffer, copy.copy(layer)
    if isinstance(buffer, PackedBuffer):
        twin.buffer = PackedBuffer.over(buffer.parts, buffer.codecs, _row_of(buffer.held(), row))
    else:
        span, states = buffer.kept()
        twin.buffer = Buffer.over(buffer.retention, span, tuple(state[row : row + 1].clone() for state in states))
    return twin, buffer.retention.rollback_room(twin.buffer.span)


def _row_of(held: Held, row: int) -> Held:
    parts, states = (tuple(each[row : row + 1].clone() for each in tensors) for tensors in (held.parts, held.states))
    return Held(held.packed, parts, held.recent, states)


def _checkpoint(
    layers: dict[int, Any], recent: list[Buffer], room: int, cache: DynamicSlidingWindowCache
) -> Checkpoint:
    nbytes = layers_nbytes([*layers.values(), *map(BufferedLayer, recent)])
    return Checkpoint(layers, recent, room, cache.rollback, cache.quantisation, nbytes)
