"""Caches as points and blocks in files, and back.

Knows which parts go into which file. Knows nothing of where files are.
"""

from dataclasses import asdict
from typing import Any

import torch

from windowkv.cache import DynamicSlidingWindowCache
from windowkv.errors import CacheFileError
from windowkv.prefix.disk import DiskTier, Point, block_name, point_name
from windowkv.prefix.parts import (
    Block,
    Checkpoint,
    assemble,
    block_content,
    block_from,
    block_names,
    checkpoint_content,
    checkpoint_from,
    full_layers,
    take_block,
)
from windowkv.prefix.tree import BLOCK_TOKENS, Ids
from windowkv.quantisation import Quantisation
from windowkv.snapshot import under

_IDS, _REST = "ids", "rest."


def write_point(disk: DiskTier, ids: Ids, cache: DynamicSlidingWindowCache, row: int, checkpoint: Checkpoint) -> None:
    """Add one row of a cache that has seen a text, and its checkpoint: blocks first, so that no point lacks one."""
    end, base = len(ids), max(1, len(ids) - checkpoint.room)
    ends = range(BLOCK_TOKENS, end + 1, BLOCK_TOKENS) if full_layers(cache) else range(0)
    keys = disk.keys(ids, [base, end, *ends])
    if disk.has_point(keys[end]):  # how far it goes back may differ, which is in its name
        return
    names = block_names(cache)
    for stop in ends:
        disk.write(block_name(keys, stop), block_content(take_block(cache, row, stop - BLOCK_TOKENS, stop), names), {})
    manifest, tensors = checkpoint_content(checkpoint)
    rest = block_content(take_block(cache, row, len(ends) * BLOCK_TOKENS, end), names)
    tensors |= {_IDS: torch.from_numpy(ids.copy())} | {_REST + name: tensor for name, tensor in rest.items()}
    disk.write(point_name(keys, end, base), tensors, manifest)
    disk.prune()


def read_point(
    disk: DiskTier, point: Point, config: Any, quantisation: Quantisation
) -> tuple[Ids, DynamicSlidingWindowCache] | None:
    """The text of a point and a cache that has seen it; None when some file of it is damaged or gone."""
    found = disk.read(point.name)
    if found is None:
        return None
    manifest, tensors = found
    try:
        ids = tensors[_IDS].numpy()
        keys = disk.keys(ids, range(BLOCK_TOKENS, point.end + 1, BLOCK_TOKENS) if len(ids) == point.end else [0])
        names = block_names(DynamicSlidingWindowCache(config, **asdict(quantisation)))
        blocks: list[Block] = []
        for stop in keys if names else ():
            block = disk.read(block_name(keys, stop))
            if block is None:
                disk.remove(point.name)
                return None
            blocks.append(block_from(block[1], names))
        blocks.append(block_from(under(_REST, tensors), names))
        checkpoint = checkpoint_from(config, quantisation, manifest, tensors, point.end)
        return ids, assemble(config, checkpoint, 0, blocks, point.end)
    except (CacheFileError, KeyError):
        disk.remove(point.name)
        return None
