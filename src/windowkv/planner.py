"""The planner's front door: a model however it is named, and its cache's bytes beforehand.

Knows where configs come from and what a torch dtype weighs. The arithmetic is in memory.py.
"""

from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig

from windowkv.cache import ROLLBACK
from windowkv.errors import OptionError
from windowkv.layout import CacheLayout, read_layout
from windowkv.memory import Plan, largest, plan_layout
from windowkv.model_source import load_config
from windowkv.quantisation import Quantisation

ENDLESS = 1 << 40  # tokens; a cache that still fits then has no full layer and never grows


def plan(
    config_or_path: PreTrainedConfig | str | Path,
    *,
    tokens: int,
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
    rollback: int = ROLLBACK,
    kv_dtype: str | None = None,
    quantize: str = "full",
    cache: Literal["dynamic", "static"] = "dynamic",
    max_cache_len: int | None = None,
) -> Plan:
    """The bytes that a `DynamicSlidingWindowCache` will hold after `tokens` tokens in each of `batch_size` rows.

    With cache="static", those of a `SlidingWindowCache` made for `max_cache_len` tokens (`tokens` unless given), which
    are the same from the first token on. Equal to `cache.nbytes` to the byte, however the tokens come, as long as none
    was taken back. `config_or_path` is a transformers config, or a model's folder, config.json, or name. `dtype`
    defaults to the config's own.

    Raises ConfigError, ModelSourceError or OptionError, naming the value.
    """
    if cache not in ("dynamic", "static") or (cache == "dynamic" and max_cache_len is not None):
        raise OptionError(f'cache={cache!r} with max_cache_len={max_cache_len!r}: only cache="static" has that length')
    config = _config(config_or_path)
    return plan_layout(
        read_layout(config),
        tokens=tokens,
        batch_size=batch_size,
        itemsize=_itemsize(dtype, config),
        rollback=rollback,
        quantisation=Quantisation(kv_dtype, quantize),
        max_cache_len=tokens if cache == "static" and max_cache_len is None else max_cache_len,
    )


def max_tokens(
    config_or_path: PreTrainedConfig | str | Path,
    budget_bytes: int,
    *,
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
    rollback: int = ROLLBACK,
    kv_dtype: str | None = None,
    quantize: str = "full",
) -> int | None:
    """The most tokens whose cache stays within `budget_bytes`; None when the cache stops growing before.

    Same arguments and errors as `plan`.
    """
    if not isinstance(budget_bytes, int) or isinstance(budget_bytes, bool) or budget_bytes < 0:
        raise OptionError(f"budget_bytes={budget_bytes!r}: it is a number of bytes, an integer >= 0")
    config = _config(config_or_path)
    planned = partial(
        plan_layout,
        read_layout(config),
        batch_size=batch_size,
        itemsize=_itemsize(dtype, config),
        rollback=rollback,
        quantisation=Quantisation(kv_dtype, quantize),
    )

    def fits(tokens: int) -> bool:
        return planned(tokens=tokens).total_bytes <= budget_bytes

    most = largest(fits, at_most=ENDLESS)
    return None if most == ENDLESS else most


def layout(config_or_path: PreTrainedConfig | str | Path) -> CacheLayout:
    """The cache layout of a model, however it is named."""
    return read_layout(_config(config_or_path))


def _config(source: Any) -> Any:
    return load_config(source) if isinstance(source, str | Path) else source


def _itemsize(dtype: torch.dtype | None, config: Any) -> int:
    if dtype is None:
        dtype = getattr(config.get_text_config(decoder=True), "dtype", None) or getattr(config, "dtype", None)
    if dtype is None:
        return torch.float32.itemsize
    if not isinstance(dtype, torch.dtype):
        raise OptionError(f"dtype={dtype!r}: it is a torch dtype such as torch.bfloat16")
    return dtype.itemsize
