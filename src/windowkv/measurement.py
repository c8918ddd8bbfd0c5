"""One `generate`: what it returned, what its cache held, what memory and time it took.

Knows `generate`, clocks and the counters of the process. Knows nothing of what runs are compared for.
"""

import ctypes
import gc
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, LogitsProcessor

from windowkv.cache import storage_nbytes
from windowkv.continuation import cache_name

Points = tuple[tuple[int, int], ...]  # (tokens seen, bytes held)

WARM_UP = 8  # tokens; enough to load kernels and thread pools before anything is timed


@dataclass(frozen=True)
class Run:
    """What one `generate` returned, held and took."""

    tokens: tuple[int, ...]  # the new ones
    points: Points  # after every forward: the prompt's first, then one per token fed back
    first_token_seconds: float
    token_seconds: float  # median of the tokens after the first
    start_bytes: int | None  # memory of the whole process before, weights included; None where the system does not tell
    peak_bytes: int | None  # the most of it meanwhile

    @property
    def prompt_bytes(self) -> int:
        """Bytes of keys and values right after the prompt."""
        return self.points[0][1]

    @property
    def rise_bytes(self) -> int | None:
        """How far the memory of the process rose."""
        return None if self.start_bytes is None or self.peak_bytes is None else self.peak_bytes - self.start_bytes

    @property
    def decoding_bytes(self) -> int:
        """The most bytes of keys and values held after a token that followed the prompt."""
        return max(nbytes for _, nbytes in self.points[1:])


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


def measure(
    model: Any,
    prompt: Tensor,
    cache: Cache,
    new_tokens: int,
    *,
    prefill_chunk: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Run:
    """Continue a prompt `[B, n]` greedily by exactly `new_tokens` >= 2 tokens in that cache.

    `progress` is told `(steps done, steps in all)` of every decoder layer that has read the prompt and of every token.
    """
    _release_memory()  # before anything is shown: an interrupt that a finalizer happens to meet is swallowed
    layers = decoder_layers(model)
    recorder = _Recorder(cache, _ticker(progress or _silent, len(layers) + new_tokens))
    start_bytes = _process_nbytes("VmRSS") if _reset_peak() else None
    start = perf_counter()
    with _hooked(layers, recorder.on_layer):
        output = _generate(model, prompt, cache, new_tokens, recorder, prefill_chunk)
    gaps = [after - before for before, after in zip(recorder.moments, recorder.moments[1:], strict=False)]
    return Run(
        tokens=tuple(output[:, prompt.shape[1] :].flatten().tolist()),
        points=tuple(recorder.points),
        first_token_seconds=recorder.moments[0] - start,
        token_seconds=median(gaps),
        start_bytes=start_bytes,
        peak_bytes=None if start_bytes is None else _process_nbytes("VmHWM"),
    )


def _generate(
    model: Any, prompt: Tensor, cache: Cache, new_tokens: int, recorder: _Recorder, prefill_chunk: int | None
) -> Tensor:
    """Greedy `[B, n + new_tokens]`; ends for no token, so that every run has as many steps to time."""
    # transformers renames the argument between the releases that are supported.
    output: Tensor = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        do_sample=False,
        num_beams=1,
        logits_processor=[recorder],
        prefill_chunk_size=prefill_chunk,
        **{cache_name(model): cache},
    )
    return output


def decoder_layers(model: Any) -> Sequence[torch.nn.Module]:
    """The layers of a model's decoder, in order, whatever it calls them; none where it has no list of modules."""
    decoder = model.get_decoder()
    lists = [child for child in decoder.children() if isinstance(child, torch.nn.ModuleList)]
    return tuple(getattr(decoder, "layers", None) or max(lists, key=len, default=()))


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


def _process_nbytes(counter: str) -> int | None:
    """One of Linux's counters of this process's memory: VmRSS now, VmHWM at most."""
    found = re.search(rf"^{counter}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
