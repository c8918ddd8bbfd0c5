"""The planner's front door: a model however it is named, and its cache's bytes beforehand.

Knows where configs come from and what a torch dtype weighs. The arithmetic is in memory.py.
"""

from collections.abc import Callable
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
from windowkv.weights import parameter_count, stored_bytes

ENDLESS = 1 << 40  # tokens or rows; a cache that still fits then never grows
CacheKind = Literal["dynamic", "static"]


def plan(
    config_or_path: PreTrainedConfig | str | Path,
    *,
    tokens: int,
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
    rollback: int = ROLLBACK,
    kv_dtype: str | None = None,
    quantize: str = "full",
    cache: CacheKind = "dynamic",
    max_cache_len: int | None = None,
    ranks: int = 1,
) -> Plan:
    """The bytes that a `DynamicSlidingWindowCache` will hold after `tokens` tokens in each of `batch_size` rows.

    With cache="static", those of a `SlidingWindowCache` made for `max_cache_len` tokens (`tokens` unless given), which
    are the same from the first token on. Equal to `cache.nbytes` to the byte, however the tokens come, as long as none
    was taken back. With `ranks`, of one of so many tensor-parallel ranks, each of which keeps its share of the heads.

    `config_or_path` is a transformers config, a model's folder, config.json or id on the hub, or the name of a public
    model that `windowkv plan --list` tells. `dtype` defaults to the config's own.

    Raises ConfigError, ModelSourceError or OptionError, naming the value.
    """
    planned = _planner(config_or_path, dtype, rollback, kv_dtype, quantize, cache, max_cache_len, ranks)
    return planned(tokens=tokens, batch_size=batch_size)


def max_tokens(
    config_or_path: PreTrainedConfig | str | Path,
    budget_bytes: int,
    *,
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
    rollback: int = ROLLBACK,
    kv_dtype: str | None = None,
    quantize: str = "full",
    cache: CacheKind = "dynamic",
    ranks: int = 1,
) -> int | None:
    """The most tokens whose cache stays within `budget_bytes`; None when the cache stops growing before.

    With cache="static", the largest `max_cache_len`. Same arguments and errors as `plan`.
    """
    _check_budget(budget_bytes)
    planned = _planner(config_or_path, dtype, rollback, kv_dtype, quantize, cache, None, ranks)
    return _most(lambda tokens: planned(tokens=tokens, batch_size=batch_size).total_bytes <= budget_bytes)


def max_batch_size(
    config_or_path: PreTrainedConfig | str | Path,
    budget_bytes: int,
    *,
    tokens: int,
    dtype: torch.dtype | None = None,
    rollback: int = ROLLBACK,
    kv_dtype: str | None = None,
    quantize: str = "full",
    cache: CacheKind = "dynamic",
    max_cache_len: int | None = None,
    ranks: int = 1,
) -> int | None:
    """The most rows of `tokens` tokens each whose cache stays within `budget_bytes`; None when any number does.

    0 when not even one does. Same arguments and errors as `plan`.
    """
    _check_budget(budget_bytes)
    planned = _planner(config_or_path, dtype, rollback, kv_dtype, quantize, cache, max_cache_len, ranks)
    return _most(lambda rows: planned(tokens=tokens, batch_size=rows).total_bytes <= budget_bytes)


def weight_bytes(config_or_path: PreTrainedConfig | str | Path, *, dtype: torch.dtype | None = None) -> int | None:
    """Bytes of a model's weights: as they lie in its folder, else as a model of that config has them in `dtype`.

    None where nobody can say without the weights: they are packed, or need code that is not transformers' own. `dtype`
    defaults to the config's own, and changes nothing of what lies in a folder. Raises ModelSourceError or OptionError.
    """
    if isinstance(config_or_path, str | Path):
        folder = Path(config_or_path).parent if Path(config_or_path).is_file() else Path(config_or_path)
        stored = stored_bytes(folder)
        if stored is not None:
            return stored
    config = _config(config_or_path)
    itemsize, parameters = _itemsize(dtype, config), parameter_count(config)
    return None if parameters is None else parameters * itemsize


def layout(config_or_path: PreTrainedConfig | str | Path) -> CacheLayout:
    """The cache layout of a model, however it is named."""
    return read_layout(_config(config_or_path))


def _planner(
    config_or_path: Any,
    dtype: torch.dtype | None,
    rollback: int,
    kv_dtype: str | None,
    quantize: str,
    cache: str,
    max_cache_len: int | None,
    ranks: int,
) -> Callable[..., Plan]:
    """What plans a cache of these options for `tokens` tokens in each of `batch_size` rows."""
    if cache not in ("dynamic", "static"):
        raise OptionError(f'cache={cache!r}: "dynamic" or "static"')
    if cache == "dynamic" and max_cache_len is not None:
        raise OptionError(f'cache={cache!r} with max_cache_len={max_cache_len!r}: only cache="static" has that length')
    quantisation = Quantisation(kv_dtype, quantize)
    if cache == "static" and kv_dtype is not None:
        raise OptionError(f'kv_dtype={kv_dtype!r} with cache="static": static caches are not quantised')
    config = _config(config_or_path)
    planned = partial(
        plan_layout,
        read_layout(config, ranks=ranks),
        itemsize=_itemsize(dtype, config),
        rollback=rollback,
        quantisation=quantisation,
    )
    if cache == "dynamic":
        return planned
    return lambda tokens, batch_size: planned(
        tokens=tokens, batch_size=batch_size, max_cache_len=tokens if max_cache_len is None else max_cache_len
    )


def _most(fits: Callable[[int], bool]) -> int | None:
    """The largest number that fits, 0 at least; None where there is no largest."""
    most = largest(lambda number: number == 0 or fits(number), at_most=ENDLESS)
    return None if most == ENDLESS else most


def _check_budget(budget_bytes: Any) -> None:
    if not isinstance(budget_bytes, int) or isinstance(budget_bytes, bool) or budget_bytes < 0:
        raise OptionError(f"budget_bytes={budget_bytes!r}: it is a number of bytes, an integer >= 0")


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
