"""Caches as points and blocks in files, and back.

Knows which parts go into which file. Knows nothing of where files are.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from windowkv.cache import DynamicSlidingWindowCache
from windowkv.errors import CacheFileError
from windowkv.prefix.disk import DiskTier, Point, block_name, point_name
from windowkv.prefix.parts import (
    Checkpoint,
    assemble,
    block_content,
    block_from,
    checkpoint_content,
    checkpoint_from,
    full_layers,
    take_block,
)
from windowkv.prefix.tree import BLOCK_TOKENS, Ids
from windowkv.snapshot import under

_IDS, _REST = "ids", "rest."


def write_point(
    disk: DiskTier, ids: Ids, cache: DynamicSlidingWindowCache, checkpoint: Checkpoint, row: int, padding: int
) -> None:
    """Add a checkpoint, and what a row of a cache holds of its text: blocks first, so that no point lacks one."""
    end, base = len(ids), max(1, len(ids) - checkpoint.room)
    ends = range(BLOCK_TOKENS, end + 1, BLOCK_TOKENS) if full_layers(cache) else range(0)
    keys = disk.keys(ids, [base, end, *ends])
    if disk.has_point(keys[end]):  # how far it goes back may differ, which is in its name
        return
    for stop in ends:
        if not disk.has(block_name(keys, stop)):
            block = take_block(cache, row, stop - BLOCK_TOKENS + padding, stop + padding)
            disk.write(block_name(keys, stop), block_content(block), {})
    manifest, tensors = checkpoint_content(checkpoint)
    rest = block_content(take_block(cache, row, len(ends) * BLOCK_TOKENS + padding, end + padding))
    tensors |= {_IDS: torch.from_numpy(ids.copy())} | {_REST + name: tensor for name, tensor in rest.items()}
    name = point_name(keys, end, base)
    disk.write(name, tensors, manifest)
    disk.prune({name, *(block_name(keys, stop) for stop in ends)})


def read_point(
    disk: DiskTier, point: Point, config: Any, device: torch.device
) -> tuple[Ids, DynamicSlidingWindowCache] | None:
    """The text of a point and a cache on a device that has seen it; None when some file of it is damaged or gone."""
    found = disk.read(point.name)
    if found is None:
        return None
    ((manifest, tensors),) = found
    try:
        ids = tensors[_IDS].numpy()
        keys = disk.keys(ids, range(BLOCK_TOKENS, point.end + 1, BLOCK_TOKENS) if len(ids) == point.end else [0])
        layers = len(full_layers(DynamicSlidingWindowCache(config)))
        names = [block_name(keys, stop) for stop in keys] if layers else []
        contents = disk.read(*names) if names else []
        if contents is None:
            disk.remove(point.name)
            return None
        blocks = [block_from(_moved(content, device), layers) for _, content in contents]
        tensors = _moved(tensors, device)
        blocks.append(block_from(under(_REST, tensors), layers))
        return ids, assemble(config, checkpoint_from(config, manifest, tensors, point.end), 0, blocks, point.end)
    except (CacheFileError, KeyError):
        disk.remove(point.name)
        return None


def _moved(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}
