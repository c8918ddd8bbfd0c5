"""What is kept of a cache: blocks of its full layers, and checkpoints of all others; and a cache made of them again.

Knows which layer goes where. Knows nothing of texts, and of what is kept how long.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windowkv.buffers import Buffer
from windowkv.cache import DynamicSlidingWindowCache, fork_layer, layers_nbytes
from windowkv.layers import BufferedLayer
from windowkv.window import Span

Block = tuple[tuple[Tensor, Tensor], ...]  # keys and values [1, H, tokens, D] of each full layer


@dataclass
class Checkpoint:
    """All that one row of a cache held at one position beside its full layers."""

    layers: dict[int, Any]  # by index: bounded layers, and transformers' own
    room: int  # how many tokens it can go back
    rollback: int
    nbytes: int
    used: int = 0  # when, as a count of uses


def full_layers(cache: DynamicSlidingWindowCache) -> list[BufferedLayer]:
    """The layers that keep every token."""
    return [layer for layer, spec in zip(cache.layers, cache.layout.layers, strict=False) if spec.kind == "full"]


def take_block(cache: DynamicSlidingWindowCache, row: int, start: int, end: int) -> Block:
    """A copy of positions [start, end) of the full layers."""
    return tuple(
        tuple(storage[row : row + 1, :, start:end].clone() for storage in layer.buffer.storages)  # type: ignore[misc]
        for layer in full_layers(cache)
    )


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
    config: Any, checkpoint: Checkpoint, back: int, blocks: Iterable[Block], point: int
) -> DynamicSlidingWindowCache:
    """A cache that has seen `point` tokens, `back` fewer than the checkpoint; nothing is copied until it is written."""
    cache = DynamicSlidingWindowCache(config, rollback=checkpoint.rollback)
    for i, layer in checkpoint.layers.items():
        cache.layers[i] = fork_layer(layer)
        if isinstance(layer, BufferedLayer):
            cache.layers[i].buffer.take_back(back)
    columns = list(zip(*blocks, strict=True))
    for layer, pairs in zip(full_layers(cache), columns, strict=True):
        pieces = tuple(zip(*pairs, strict=True))
        layer.buffer = Buffer.in_pieces(layer.buffer.retention, Span(0, point), pieces)
    return cache


def _taken(layer: BufferedLayer, row: int) -> tuple[BufferedLayer, int]:
    span, states = layer.buffer.kept()
    twin = copy.copy(layer)
    twin.buffer = Buffer.over(layer.buffer.retention, span, tuple(state[row : row + 1].clone() for state in states))
    return twin, layer.buffer.retention.rollback_room(span)
