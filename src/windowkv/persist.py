"""Loading a cache from a file, and telling what is in one.

Knows what must agree between a file and a model. Knows nothing of bytes on the disk.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from windowkv import cache_file, snapshot
from windowkv.cache import DynamicSlidingWindowCache
from windowkv.errors import CacheFileError, OptionError
from windowkv.layout import CacheLayout, LayerSpec, difference
from windowkv.quantisation import Quantisation

_MOST = 1 << 40  # tokens that a file may say that it has seen


@dataclass(frozen=True)
class CacheFileInfo:
    """What a file says of the cache in it."""

    format: int
    version: str  # of the windowkv that wrote it
    tokens: int | None  # seen; None where no layer counts them
    rollback: int
    kv_dtype: str | None  # what is quantised is in that
    quantize: str  # and in which layers
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
    rollback: int | None = None,
    kv_dtype: str | None = "saved",
) -> DynamicSlidingWindowCache:
    """The cache that `cache.save(path)` wrote, for a model of the same config.

    Every byte is verified. Without a device and a dtype to convert to, the tensors stay in the file, and come into
    memory layer by layer as they are read and written. The file may be replaced meanwhile, not overwritten.

    Args:
        path: the file.
        config: the model's config, or one that contains it as its text part.
        dtype: what keys and values are converted to. Without it, a file of another dtype than the config's is refused.
        device: where the tensors go; the CPU without it.
        rollback: how far back `crop` can go from what is fed from now on, in tokens; as saved without it.
        kv_dtype: what the file must have been quantised to, None for not at all; without it, anything will do. The
            cache is quantised as the file is: quantising anew what is quantised already would lose more.

    Raises:
        CacheFileError: the file is missing, no cache, of a newer format, damaged, or of another layout, dtype or
            kv_dtype.
        ConfigError: as DynamicSlidingWindowCache.
        OptionError: dtype is no floating-point dtype, there is no such device, or rollback is no integer >= 0.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise OptionError(f"dtype={dtype!r}: a floating-point dtype, such as torch.bfloat16")
    if rollback is not None:
        DynamicSlidingWindowCache(config, rollback)  # a mistake of the caller's is no fault of the file
    manifest, tensors = cache_file.read(path)
    info = _info(path, manifest, 0)
    room = info.rollback if rollback is None else rollback
    try:
        if kv_dtype not in ("saved", info.kv_dtype):
            raise CacheFileError(
                f"it holds a cache with kv_dtype={info.kv_dtype!r}, which loads into no cache with {kv_dtype!r}: "
                f"ask for kv_dtype={info.kv_dtype!r}, or compute it anew"
            )
        cache = DynamicSlidingWindowCache(config, room, kv_dtype=info.kv_dtype, quantize=info.quantize)
        if unlike := difference(_layout(manifest), cache.layout):
            raise CacheFileError(f"it is of another model: {unlike}")
        if dtype is None:
            _check_dtype(tensors, config.get_text_config(decoder=True))
        moved = {
            name: _moved(tensor, None if snapshot.is_packed(name) else dtype, device)
            for name, tensor in tensors.items()
        }
        snapshot.restore(cache.layers, cache.layout, manifest, moved)
        cache.history = snapshot.restore_history(tensors, manifest, cache.rows)
    except (CacheFileError, OptionError) as why:
        raise type(why)(f"{path}: {why}") from why
    return cache


def describe(path: str | os.PathLike[str], *, verify: bool = False) -> CacheFileInfo:
    """What is in a file, without loading it. Raises CacheFileError as `load` does, for damage only with `verify`."""
    header = (cache_file.verified if verify else cache_file.read_header)(path)
    return _info(path, header.manifest, header.tensor_bytes)


def _info(path: str | os.PathLike[str], manifest: Mapping[str, Any], tensor_bytes: int) -> CacheFileInfo:
    """A manifest whose every entry is of the kind that it should be."""
    try:
        layout = _layout(manifest)
        kinds = [spec.kind for spec in layout.layers]
        seen = manifest["tokens"]
        return CacheFileInfo(
            format=manifest["format"],
            version=_word(manifest["version"]),
            tokens=None if seen is None else _count(seen),
            rollback=_count(manifest["rollback"]),
            **asdict(Quantisation(manifest.get("kv_dtype"), manifest.get("quantize", "full"))),
            dtypes=tuple(map(_word, manifest["dtypes"])),
            kinds={_word(kind): kinds.count(kind) for kind in dict.fromkeys(kinds)},
            windows=tuple(sorted({_count(spec.window) for spec in layout.layers if spec.window is not None})),
            tensor_bytes=tensor_bytes,
            ids_sha256=None if manifest.get("ids_sha256") is None else _word(manifest["ids_sha256"]),
        )
    except (KeyError, TypeError, ValueError, OptionError) as why:
        raise CacheFileError(f"{path} is no cache of windowkv: its manifest is wrong, {str(why)!r}") from why


def _layout(manifest: Mapping[str, Any]) -> CacheLayout:
    return CacheLayout(tuple(LayerSpec(**spec) for spec in manifest["layout"]))


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MOST:
        raise ValueError(f"{value!r} is no number of tokens")
    return value


def _word(value: Any) -> str:
    """A name as windowkv writes them; whatever else may do harm on a terminal."""
    if not isinstance(value, str) or not re.fullmatch(r"[\w.+-]{1,100}", value, re.ASCII):
        raise ValueError(f"{value!r} is no name")
    return value


def _check_dtype(tensors: Mapping[str, Tensor], decoder: Any) -> None:
    states = [each for name, each in tensors.items() if not snapshot.is_packed(name)]
    wanted = str(getattr(decoder, "dtype", None) or "").removeprefix("torch.")
    held = sorted({str(each.dtype).removeprefix("torch.") for each in states if each.is_floating_point()})
    if wanted and held and held != [wanted]:
        raise CacheFileError(
            f"it holds {' and '.join(held)}, and the config says {wanted}: "
            f"pass dtype=torch.{held[0]} if that is what the model computes in, or dtype=torch.{wanted} to convert it"
        )


def _moved(tensor: Tensor, dtype: torch.dtype | None, device: torch.device | str | None) -> Tensor:
    try:
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
    except (RuntimeError, AssertionError, TypeError) as why:
        raise OptionError(f"device={device!r}: {str(why).splitlines()[0]}") from why
