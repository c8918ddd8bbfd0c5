"""Loading a cache from a file, and telling what is in one.

Knows what must agree between a file and a model. Knows nothing of bytes on the disk.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from windowkv import cache_file, snapshot
from windowkv.cache import DynamicSlidingWindowCache
from windowkv.errors import CacheFileError, OptionError


@dataclass(frozen=True)
class CacheFileInfo:
    """What a file says of the cache in it."""

    format: int
    version: str  # of the windowkv that wrote it
    tokens: int | None  # seen; None where no layer counts them
    rollback: int
    dtypes: tuple[str, ...]
    kinds: Mapping[str, int]  # how many layers there are of each kind
    windows: tuple[int, ...]
    tensor_bytes: int
    ids_sha256: str | None  # of the token ids seen; None where they are not known


def load(
    path: str | os.PathLike[str],
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> DynamicSlidingWindowCache:
    """The cache that `cache.save(path)` wrote, for a model of the same config.

    Every byte is verified. Without a device and a dtype to convert to, the tensors stay in the file, and come into
    memory layer by layer as they are read and written. The file may be replaced meanwhile, not overwritten.

    Args:
        path: the file.
        config: the model's config, or one that contains it as its text part.
        dtype: what keys and values are converted to. Without it, a file of another dtype than the config's is refused.
        device: where the tensors go; the CPU without it.

    Raises:
        CacheFileError: the file is missing, no cache, of a newer format, damaged, or of another layout or dtype.
        ConfigError: as DynamicSlidingWindowCache.
        OptionError: dtype is no floating-point dtype.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise OptionError(f"dtype={dtype!r}: a floating-point dtype, such as torch.bfloat16")
    manifest, tensors = cache_file.read(path)
    try:
        cache = DynamicSlidingWindowCache(config, rollback=manifest["rollback"])
        _check_layout(manifest, cache)
        if dtype is None:
            _check_dtype(manifest, config.get_text_config(decoder=True))
        moved = {name: _moved(tensor, dtype, device) for name, tensor in tensors.items()}
        snapshot.restore(cache.layers, cache.layout, manifest, moved)
        cache.history = snapshot.restore_history(manifest, tensors, manifest["tokens"])
    except (CacheFileError, KeyError, OptionError) as why:
        raise CacheFileError(f"{path}: {why}") from why
    return cache


def describe(path: str | os.PathLike[str], *, verify: bool = False) -> CacheFileInfo:
    """What is in a file, without loading it. Raises CacheFileError as `load` does, for damage only with `verify`."""
    header = (cache_file.verified if verify else cache_file.read_header)(path)
    manifest = header.manifest
    try:
        kinds = [spec["kind"] for spec in manifest["layout"]]
        windows = {spec["window"] for spec in manifest["layout"]} - {None}
        return CacheFileInfo(
            format=manifest["format"],
            version=manifest["version"],
            tokens=manifest["tokens"],
            rollback=manifest["rollback"],
            dtypes=tuple(manifest["dtypes"]),
            kinds={kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
            windows=tuple(sorted(windows)),
            tensor_bytes=header.tensor_bytes,
            ids_sha256=manifest.get("ids_sha256"),
        )
    except (KeyError, TypeError) as why:
        raise CacheFileError(f"{path} is no cache of windowkv: {why}") from why


def _check_layout(manifest: Mapping[str, Any], cache: DynamicSlidingWindowCache) -> None:
    theirs, ours = manifest["layout"], [asdict(spec) for spec in cache.layout.layers]
    if len(theirs) != len(ours):
        raise CacheFileError(f"it is of a model with {len(theirs)} layers, and this one has {len(ours)}")
    for i, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        if their != our:
            unlike = ", ".join(
                f"{key} {their.get(key)} instead of {our[key]}" for key in our if their.get(key) != our[key]
            )
            raise CacheFileError(f"it is of another model: its layer {i} has {unlike}")


def _check_dtype(manifest: Mapping[str, Any], decoder: Any) -> None:
    wanted = str(getattr(decoder, "dtype", None) or "").removeprefix("torch.")
    if wanted and manifest["dtypes"] not in ([], [wanted]):
        held = " and ".join(manifest["dtypes"])
        raise CacheFileError(f"it holds {held}, and the config says {wanted}: pass dtype=torch.{wanted} to convert it")


def _moved(tensor: Tensor, dtype: torch.dtype | None, device: torch.device | str | None) -> Tensor:
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
