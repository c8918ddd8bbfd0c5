"""What is kept of a cache: blocks of its full layers, and checkpoints of all others; and a cache made of them again.

Knows which layer goes where. Knows nothing of texts, and of what is kept how long.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from windowkv.buffers import Buffer
from windowkv.cache import DynamicSlidingWindowCache, fork_layer, layers_nbytes
from windowkv.errors import CacheFileError
from windowkv.history import TokenHistory
from windowkv.layers import BufferedLayer
from windowkv.snapshot import restore_layer, take_layer, under
from windowkv.window import Span

Block = tuple[tuple[Tensor, Tensor], ...]  # keys and values [1, H, tokens, D] of each full layer


@dataclass
class Checkpoint:
    """All that one row of a cache held at one position beside its full layers."""

    layers: dict[int, Any]  # by index: bounded layers, and transformers' own
    room: int  # how many tokens it can go back
    rollback: int
    nbytes: int


def full_layers(cache: DynamicSlidingWindowCache) -> list[BufferedLayer]:
    """The layers that keep every token."""
    return [layer for layer, spec in zip(cache.layers, cache.layout.layers, strict=False) if spec.kind == "full"]


def take_block(cache: DynamicSlidingWindowCache, row: int, start: int, end: int) -> Block:
    """A copy of positions [start, end) of the full layers."""
    return tuple(_plain(layer).between(row, start, end) for layer in full_layers(cache))  # type: ignore[misc]


def take_checkpoint(cache: DynamicSlidingWindowCache, row: int, padding: int = 0) -> Checkpoint:
    """A copy of all other layers, of a row in which so much padding comes before the text."""
    layers: dict[int, Any] = {}
    room = cache.get_seq_length() - padding
    for i, (layer, spec) in enumerate(zip(cache.layers, cache.layout.layers, strict=False)):
        if spec.bounded:
            layers[i], back = _taken(layer, row, padding)
            room = min(room, back)
        elif spec.kind != "full":
            layers[i] = fork_layer(layer)
            if spec.kind != "shared":
                room = 0
                layers[i].reorder_cache(torch.tensor([row]))
    return Checkpoint(layers, room, cache.rollback, layers_nbytes(layers.values()))


def split_block(block: Block, at: int) -> tuple[Block, Block]:
    """Its first `at` tokens, and the others; copies, since a view of either half would keep both alive."""
    first = tuple((keys[:, :, :at].clone(), values[:, :, :at].clone()) for keys, values in block)
    others = tuple((keys[:, :, at:].clone(), values[:, :, at:].clone()) for keys, values in block)
    return first, others


def block_nbytes(block: Block | None) -> int:
    """Bytes of a block, which owns its storages."""
    return sum(states.untyped_storage().nbytes() for pair in block or () for states in pair)


def assemble(
    config: Any, checkpoint: Checkpoint, back: int, blocks: Iterable[Block], point: int, rollback: int | None = None
) -> DynamicSlidingWindowCache:
    """A cache that has seen `point` tokens, `back` fewer than the checkpoint; nothing is copied until it is written."""
    cache = DynamicSlidingWindowCache(config, rollback=checkpoint.rollback if rollback is None else rollback)
    for i, layer in checkpoint.layers.items():
        if isinstance(layer, BufferedLayer):
            buffer, retention = _plain(layer).fork(), cache.layers[i].buffer.retention
            buffer.take_back(back)
            buffer.retention = retention
            cache.layers[i].buffer = Buffer.over(retention, *buffer.kept())
        else:
            cache.layers[i] = fork_layer(layer)
    columns = list(zip(*blocks, strict=True))
    for layer, pairs in zip(full_layers(cache), columns, strict=True):
        pieces = tuple(zip(*pairs, strict=True))
        layer.buffer = Buffer.in_pieces(layer.buffer.retention, Span(0, point), pieces)
    return cache


def checkpoint_content(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A checkpoint as a manifest and tensors by name."""
    manifest: dict[str, Any] = {"room": checkpoint.room, "rollback": checkpoint.rollback, "layers": {}}
    tensors: dict[str, Tensor] = {}
    for i, layer in checkpoint.layers.items():
        manifest["layers"][str(i)], named = take_layer(layer)
        tensors |= {f"{i}.{name}": tensor for name, tensor in named.items()}
    return manifest, tensors


def checkpoint_from(config: Any, manifest: Mapping[str, Any], tensors: Mapping[str, Tensor], seen: int) -> Checkpoint:
    """The checkpoint that `checkpoint_content` tells of. Raises CacheFileError when it is none of this config's."""
    try:
        cache = DynamicSlidingWindowCache(config, rollback=manifest["rollback"])
        layers = {}
        for i, (layer, spec) in enumerate(zip(cache.layers, cache.layout.layers, strict=False)):
            if spec.kind != "full":
                restore_layer(layer, spec, manifest["layers"][str(i)], under(f"{i}.", tensors), seen)
                layers[i] = layer
        return Checkpoint(layers, int(manifest["room"]), cache.rollback, layers_nbytes(layers.values()))
    except (KeyError, TypeError, ValueError) as wrong:
        raise CacheFileError(f"no checkpoint: {wrong}") from wrong


def block_content(block: Block) -> dict[str, Tensor]:
    """A block as tensors by name."""
    return {
        f"{i}.{name}": each for i, pair in enumerate(block) for name, each in zip(("keys", "values"), pair, strict=True)
    }


def block_from(tensors: Mapping[str, Tensor], layers: int) -> Block:
    """The block that `block_content` tells of. Raises CacheFileError when it has not that many layers."""
    try:
        return tuple((tensors[f"{i}.keys"], tensors[f"{i}.values"]) for i in range(layers))
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


def _stacked(buffers: list[Buffer | None], end: int) -> Buffer:
    """Rows of one buffer, as long as the one that holds least; one that holds its text whole goes on with zeros."""
    kept = [buffer.kept() for buffer in buffers if buffer is not None]
    held = min([end, *(span.held for span, _ in kept if span.start)])
    like = kept[0][1]
    rows = [_last(like, 0, held) if buffer is None else _last(buffer.kept()[1], held, held) for buffer in buffers]
    retention = next(buffer.retention for buffer in buffers if buffer is not None)
    return Buffer.over(retention, Span(end - held, end), tuple(torch.cat(column) for column in zip(*rows, strict=True)))


def _last(states: tuple[Tensor, ...], taken: int, width: int) -> list[Tensor]:
    """The last `taken` tokens of each, with zeros before them up to a width."""
    last = [state[:, :, max(0, state.shape[2] - taken) :] for state in states]
    return [pad(state, (0, 0, width - state.shape[2], 0)) for state in last]


def _stack_states(layer: Any, others: list[Any]) -> None:
    """transformers' own layers: tensors whose first dimension is the batch, alone or by number."""
    for name, value in vars(layer).items():
        if isinstance(value, Tensor):
            setattr(layer, name, torch.cat([getattr(other, name) for other in others]))
        elif isinstance(value, dict):
            for key, state in value.items():
                if isinstance(state, Tensor):
                    value[key] = torch.cat([getattr(other, name)[key] for other in others])


def _taken(layer: BufferedLayer, row: int, padding: int) -> tuple[BufferedLayer, int]:
    buffer = _plain(layer)
    retention, (span, _) = buffer.retention, buffer.kept()
    states = buffer.between(row, max(span.start, padding), span.end)
    text = Span(max(0, span.start - padding), span.end - padding)
    twin = copy.copy(layer)
    twin.buffer = Buffer.over(retention, text, states)
    return twin, retention.rollback_room(text)


def _plain(layer: BufferedLayer) -> Buffer:
    """A layer's buffer, which is not quantised in a store."""
    assert isinstance(layer.buffer, Buffer)
    return layer.buffer
