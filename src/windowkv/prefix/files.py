"""Caches as points and blocks in files, and back.

Knows which parts go into which file. Knows nothing of where files are.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128

from windowkv.cache import DynamicSlidingWindowCache
from windowkv.errors import CacheFileError
from windowkv.prefix.disk import DiskTier, Point, block_name, point_name
from windowkv.prefix.fingerprint import bytes_of
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
from windowkv.quantisation import Quantisation
from windowkv.snapshot import under

_IDS, _REST, _MARKS = "ids", "rest.", "blocks"


def write_point(
    disk: DiskTier, ids: Ids, cache: DynamicSlidingWindowCache, checkpoint: Checkpoint, row: int, padding: int
) -> None:
    """Add a checkpoint, and what a row of a cache holds of its text: blocks first, so that no point lacks one."""
    end, base = len(ids), max(1, len(ids) - checkpoint.room)
    ends = range(BLOCK_TOKENS, end + 1, BLOCK_TOKENS) if full_layers(cache) else range(0)
    keys = disk.keys(ids, [base, end, *ends])
    if disk.has_point(keys[end]):  # how far it goes back may differ, which is in its name
        return
    marks = []
    for stop in ends:
        block = partial(take_block, cache, row, stop - BLOCK_TOKENS + padding, stop + padding)
        # As computed, one block of the same ids is as good as another. Packed, they may differ.
        marks.append(_digest(block_content(block())) if cache.quantisation.kv_dtype else "")
        if not disk.has(block_name(keys, stop, marks[-1])):
            disk.write(block_name(keys, stop, marks[-1]), block_content(block()), {})
    manifest, tensors = checkpoint_content(checkpoint)
    rest = block_content(take_block(cache, row, len(ends) * BLOCK_TOKENS + padding, end + padding))
    tensors |= {_IDS: torch.from_numpy(ids.copy())} | {_REST + name: tensor for name, tensor in rest.items()}
    name = point_name(keys, end, base)
    disk.write(name, tensors, manifest | {_MARKS: marks})
    disk.prune({name, *(block_name(keys, stop, mark) for stop, mark in zip(ends, marks, strict=True))})


def read_point(
    disk: DiskTier, point: Point, config: Any, quantisation: Quantisation, device: torch.device
) -> tuple[Ids, DynamicSlidingWindowCache] | None:
    """The text of a point and a cache on a device that has seen it; None when some file of it is damaged or gone."""
    found = disk.read(point.name)
    if found is None:
        return None
    ((manifest, tensors),) = found
    try:
        ids = tensors[_IDS].numpy()
        layers = len(full_layers(DynamicSlidingWindowCache(config, **asdict(quantisation))))
        if len(ids) != point.end:
            raise CacheFileError(f"{len(ids)} ids of a text of {point.end}")
        names = _block_names(disk, ids, point.end if layers else 0, manifest[_MARKS])
        contents = disk.read(*names) if names else []
        if contents is None:
            disk.remove(point.name)
            return None
        blocks = [block_from(_moved(content, device), layers) for _, content in contents]
        tensors = _moved(tensors, device)
        blocks.append(block_from(under(_REST, tensors), layers))
        checkpoint = checkpoint_from(config, quantisation, manifest, tensors, point.end)
        return ids, assemble(config, checkpoint, 0, blocks, point.end)
    except (CacheFileError, KeyError):
        disk.remove(point.name)
        return None


def _block_names(disk: DiskTier, ids: Ids, end: int, marks: Any) -> list[str]:
    """The names of a text's blocks up to a token. Raises CacheFileError when there are not as many marks of them."""
    keys = disk.keys(ids, range(BLOCK_TOKENS, end + 1, BLOCK_TOKENS))
    if not isinstance(marks, list) or len(marks) != len(keys) or any(re.search(r"\W", str(mark)) for mark in marks):
        raise CacheFileError(f"marks {marks!r} of {len(keys)} blocks")
    return [block_name(keys, stop, str(mark)) for stop, mark in zip(keys, marks, strict=True)]


def _digest(content: Mapping[str, Tensor]) -> str:
    digest = xxh3_128()
    for name in sorted(content):
        digest.update(bytes_of(content[name]))
    return digest.hexdigest()


def _moved(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}
