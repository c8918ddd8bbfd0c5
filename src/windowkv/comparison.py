"""One prompt through transformers' cache and through windowkv's: the same tokens, and what each run held and took.

Knows what to compare and how to count what a cache keeps alive. Knows nothing of text, tables or pictures.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig

from windowkv.cache import DynamicSlidingWindowCache, storage_nbytes
from windowkv.errors import OptionError
from windowkv.integration import disable, enable
from windowkv.layout import CacheLayout, LayerSpec, read_layout
from windowkv.measurement import WARM_UP, Points, Run, measure
from windowkv.planner import plan

Progress = Callable[[str, int, int], None]  # stage, steps done, steps in all

_GRID = 96  # lengths at which a curve is measured, the edges of the windows besides


@dataclass(frozen=True)
class Comparison:
    """The two runs of one prompt."""

    prompt_tokens: int
    baseline: Run
    windowkv: Run
    bound_bytes: int  # what `plan` says of the tokens that the caches have seen at the end
    uncounted: tuple[int, ...]  # layers of kinds that transformers stores, which the bound leaves out

    @property
    def tokens_equal(self) -> bool:
        """Whether both caches led to the same tokens."""
        return self.baseline.tokens == self.windowkv.tokens


@dataclass(frozen=True)
class Curve:
    """What a cache holds after n tokens, for many n."""

    after_prompt: Points  # n tokens fed in one forward
    decoding: Points  # n tokens of which the last was fed alone


def compare(model: Any, prompt: Tensor, *, new_tokens: int, progress: Progress | None = None) -> Comparison:
    """Continue a prompt `[1, n]` greedily by exactly `new_tokens` tokens, once with each cache, and measure both.

    The model is as `disable` leaves it, before and after, and enabled while windowkv runs.
    `progress` is told of every decoder layer that has read the prompt and of every token.
    Raises OptionError for fewer than 2 new tokens: the first one comes before anything is decoded.
    """
    if new_tokens < 2:
        raise OptionError(f"new_tokens={new_tokens}: at least 2, or nothing is measured while decoding")
    measure(disable(model), prompt[:, :WARM_UP], DynamicCache(config=model.config), 2)
    progress = progress or _silent
    baseline = measure(
        model, prompt, DynamicCache(config=model.config), new_tokens, progress=partial(progress, "transformers")
    )
    cache = DynamicSlidingWindowCache(model.config)
    try:
        ours = measure(enable(model), prompt, cache, new_tokens, progress=partial(progress, "windowkv"))
    finally:
        disable(model)
    seen, _ = ours.points[-1]
    planned = plan(model.config, tokens=seen, dtype=model.dtype)
    return Comparison(prompt.shape[1], baseline, ours, planned.total_bytes, planned.uncounted)


def curves(config: PreTrainedConfig, *, dtype: torch.dtype, up_to: int, **options: Any) -> tuple[Curve, Curve]:
    """What transformers' cache and windowkv's, made with these options, hold at lengths up to `up_to`.

    Both are fed tensors in the proportions of the model's, and the storages that they keep alive are counted.
    """
    layout = read_layout(config)
    lengths = _grid(layout, up_to)
    plain = options.get("kv_dtype") is None  # a quantised cache packs by what is in a head
    return (
        _curve(partial(DynamicCache, config=config), layout, lengths, dtype, narrow=True),
        _curve(partial(DynamicSlidingWindowCache, config, **options), layout, lengths, dtype, narrow=plain),
    )


def windows(config: PreTrainedConfig) -> tuple[int, ...]:
    """The distinct windows of a model's layers, smallest first."""
    return tuple(sorted({spec.window for spec in read_layout(config).layers if spec.window is not None}))


def _silent(*_: Any) -> None:
    """Tell nobody."""


def _grid(layout: CacheLayout, up_to: int) -> list[int]:
    """Lengths from 2 to `up_to`, evenly and where the windows fill up."""
    even = {2 + step * (up_to - 2) // _GRID for step in range(_GRID + 1)}
    return sorted(n for n in even | {spec.window for spec in layout.layers if spec.window} if 2 <= n <= up_to)


def _curve(
    make_cache: Callable[[], Cache], layout: CacheLayout, lengths: list[int], dtype: torch.dtype, *, narrow: bool
) -> Curve:
    def held(*chunks: int) -> int:
        return _bytes_held(make_cache, layout, chunks, dtype, narrow=narrow)

    return Curve(
        after_prompt=tuple((n, held(n)) for n in lengths), decoding=tuple((n, held(n - 1, 1)) for n in lengths)
    )


@torch.no_grad()
def _bytes_held(
    make_cache: Callable[[], Cache], layout: CacheLayout, chunks: Sequence[int], dtype: torch.dtype, *, narrow: bool
) -> int:
    """Bytes that all layers hold after these chunks of tokens, by feeding one layer of each kind."""
    empty = storage_nbytes(make_cache())  # transformers' sliding layers come with a number in a tensor
    total = empty
    for spec, layers in Counter(spec for spec in layout.layers if spec.buffered).items():
        cache = make_cache()
        heads, dims, times = _shape(spec, narrow=narrow)
        for tokens in chunks:
            keys, values = (torch.empty(1, heads, tokens, dim, dtype=dtype) for dim in dims)
            cache.update(keys, values, layout.layers.index(spec))
        total += layers * times * (storage_nbytes(cache) - empty)
    return total


def _shape(spec: LayerSpec, *, narrow: bool) -> tuple[int, tuple[int, int], int]:
    """`(heads, (dimensions of keys, of values), how many times as many bytes a layer has)` of what a layer is fed.

    What is stored as it is fed may be as narrow as can be: the tensors of a large model take a minute to write.
    """
    dims = spec.head_dim, spec.value_head_dim
    common = gcd(*dims)
    if not narrow or not common:
        return spec.kv_heads, dims, 1
    return 1, (dims[0] // common, dims[1] // common), spec.kv_heads * common
