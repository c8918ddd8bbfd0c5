"""One prompt through transformers' cache and through windowkv's: the same tokens, and what each run held and took.

Knows `generate` and how to count what a cache keeps alive. Knows nothing of text, tables or pictures.
"""

import ctypes
import gc
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, LogitsProcessor, PreTrainedConfig

from windowkv.cache import DynamicSlidingWindowCache, storage_nbytes
from windowkv.errors import OptionError
from windowkv.integration import disable, enable
from windowkv.layout import CacheLayout, read_layout
from windowkv.planner import plan

Points = tuple[tuple[int, int], ...]  # (tokens seen, bytes held)
Progress = Callable[[str, int, int], None]  # stage, steps done, steps in all

_WARM_UP = 8  # tokens; enough to load kernels and thread pools before anything is timed
_GRID = 96  # lengths at which a curve is measured, the edges of the windows besides


@dataclass(frozen=True)
class Run:
    """What one `generate` returned, held and took."""

    tokens: tuple[int, ...]  # the new ones
    points: Points  # after every forward: the prompt's first, then one per token fed back
    first_token_seconds: float
    token_seconds: float  # median of the tokens after the first
    peak_bytes: int | None  # of the whole process, weights included; None where the system does not tell

    @property
    def prompt_bytes(self) -> int:
        """Bytes of keys and values right after the prompt."""
        return self.points[0][1]

    @property
    def decoding_bytes(self) -> int:
        """The most bytes of keys and values held after a token that followed the prompt."""
        return max(nbytes for _, nbytes in self.points[1:])


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
    _generate(disable(model), prompt[:, :_WARM_UP], 2)
    progress = progress or _silent
    baseline = _measure(model, prompt, DynamicCache(config=model.config), new_tokens, partial(progress, "transformers"))
    cache = DynamicSlidingWindowCache(model.config)
    try:
        ours = _measure(enable(model), prompt, cache, new_tokens, partial(progress, "windowkv"))
    finally:
        disable(model)
    seen, _ = ours.points[-1]
    planned = plan(model.config, tokens=seen, dtype=model.dtype)
    return Comparison(prompt.shape[1], baseline, ours, planned.total_bytes, planned.uncounted)


def curves(config: PreTrainedConfig, *, dtype: torch.dtype, up_to: int) -> tuple[Curve, Curve]:
    """What transformers' cache and windowkv's hold at lengths up to `up_to`, without a model.

    Both are fed tensors of the model's shapes, and the storages that they keep alive are counted.
    """
    layout = read_layout(config)
    lengths = _grid(layout, up_to)
    return (
        _curve(partial(DynamicCache, config=config), layout, lengths, dtype),
        _curve(partial(DynamicSlidingWindowCache, config), layout, lengths, dtype),
    )


def windows(config: PreTrainedConfig) -> tuple[int, ...]:
    """The distinct windows of a model's layers, smallest first."""
    return tuple(sorted({spec.window for spec in read_layout(config).layers if spec.window is not None}))


class _Recorder(LogitsProcessor):  # type: ignore[misc]
    """What `generate` calls after each forward: notes when, and what the cache holds. Changes no logit."""

    def __init__(self, cache: Cache, tick: Callable[[], None]) -> None:
        self.cache = cache
        self.tick = tick
        self.moments: list[float] = []
        self.points: list[tuple[int, int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.moments.append(perf_counter())
        self.points.append((input_ids.shape[1], storage_nbytes(self.cache)))
        self.tick()
        return scores

    def on_layer(self, *_: Any) -> None:
        """A decoder layer has run; of interest while the prompt is read, which takes long."""
        if not self.points:
            self.tick()


def _measure(model: Any, prompt: Tensor, cache: Cache, new_tokens: int, progress: Callable[[int, int], None]) -> Run:
    layers = _decoder_layers(model)
    recorder = _Recorder(cache, _ticker(progress, len(layers) + new_tokens))
    _release_memory()
    peak_is_known = _reset_peak()
    start = perf_counter()
    with _hooked(layers, recorder.on_layer):
        output = _generate(model, prompt, new_tokens, cache=cache, recorder=recorder)
    gaps = [after - before for before, after in zip(recorder.moments, recorder.moments[1:], strict=False)]
    return Run(
        tokens=tuple(output[0, prompt.shape[1] :].tolist()),
        points=tuple(recorder.points),
        first_token_seconds=recorder.moments[0] - start,
        token_seconds=median(gaps),
        peak_bytes=_peak_nbytes() if peak_is_known else None,
    )


def _generate(
    model: Any, prompt: Tensor, new_tokens: int, cache: Cache | None = None, recorder: _Recorder | None = None
) -> Tensor:
    """Greedy `[1, n + new_tokens]`; ends for no token, so that every run has as many steps to time."""
    # transformers renames the argument between the releases that are supported.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    output: Tensor = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        do_sample=False,
        num_beams=1,
        logits_processor=[recorder] if recorder else [],
        **{name: cache},
    )
    return output


def _decoder_layers(model: Any) -> Sequence[torch.nn.Module]:
    return tuple(getattr(model.get_decoder(), "layers", ()))


@contextmanager
def _hooked(layers: Sequence[torch.nn.Module], on_layer: Callable[..., None]) -> Iterator[None]:
    hooks = [layer.register_forward_hook(on_layer) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _ticker(progress: Callable[[int, int], None], steps: int) -> Callable[[], None]:
    """A function that reports one step more at each call."""
    done = iter(range(1, steps + 1))
    progress(0, steps)
    return lambda: progress(next(done, steps), steps)


def _silent(*_: Any) -> None:
    """Tell nobody."""


def _release_memory() -> None:
    """Give freed memory back to the system, or one run's leftovers would count in the next run's peak."""
    gc.collect()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _reset_peak() -> bool:
    """Start a new high-water mark of this process's memory; False where that cannot be done."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak_nbytes() -> int | None:
    mark = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(mark[1]) * 1024 if mark else None


def _grid(layout: CacheLayout, up_to: int) -> list[int]:
    """Lengths from 2 to `up_to`, evenly and where the windows fill up."""
    even = {2 + step * (up_to - 2) // _GRID for step in range(_GRID + 1)}
    return sorted(n for n in even | {spec.window for spec in layout.layers if spec.window} if 2 <= n <= up_to)


def _curve(make_cache: Callable[[], Cache], layout: CacheLayout, lengths: list[int], dtype: torch.dtype) -> Curve:
    def held(*chunks: int) -> int:
        return _bytes_held(make_cache, layout, chunks, dtype)

    return Curve(
        after_prompt=tuple((n, held(n)) for n in lengths), decoding=tuple((n, held(n - 1, 1)) for n in lengths)
    )


@torch.no_grad()
def _bytes_held(make_cache: Callable[[], Cache], layout: CacheLayout, chunks: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes that all layers hold after these chunks of tokens, by feeding one layer of each kind."""
    empty = storage_nbytes(make_cache())  # transformers' sliding layers come with a number in a tensor
    total = empty
    for spec, layers in Counter(spec for spec in layout.layers if spec.buffered).items():
        cache = make_cache()
        for tokens in chunks:
            keys, values = (
                torch.empty(1, spec.kv_heads, tokens, head_dim, dtype=dtype)
                for head_dim in (spec.head_dim, spec.value_head_dim)
            )
            cache.update(keys, values, layout.layers.index(spec))
        total += layers * (storage_nbytes(cache) - empty)
    return total
