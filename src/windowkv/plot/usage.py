"""What transformers' cache and windowkv's hold against the tokens that they have seen, and the bound of the second.

Knows curves and runs. Knows nothing of how they are measured.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig

from windowkv.cache import ROLLBACK
from windowkv.comparison import Comparison, Curve, curves, windows
from windowkv.errors import OptionError
from windowkv.measurement import Points
from windowkv.model_source import load_config
from windowkv.planner import plan
from windowkv.plot.canvas import (
    INK,
    NEW,
    OLD,
    PALE,
    QUIET,
    Label,
    byte_scale,
    figure_of,
    label_right,
    name_axes,
    new_axes,
    write,
)
from windowkv.units import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DTYPES = {dtype.itemsize: dtype for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64)}


def memory(
    config_or_path: PreTrainedConfig | str | Path,
    *,
    tokens: int,
    dtype: torch.dtype | None = None,
    rollback: int = ROLLBACK,
    kv_dtype: str | None = None,
    quantize: str = "full",
    comparison: Comparison | None = None,
    ax: "Axes | None" = None,
) -> "Figure":
    """Draw the bytes that transformers' cache and windowkv's hold after up to `tokens` tokens of a single text.

    Both caches are fed tensors like the model's, and every storage that they keep alive is counted; the bound is what
    `plan` says. No weights are needed.

    Args:
        config_or_path: a transformers config, or a model's folder, config.json, or name.
        tokens: the longest text, at least 2.
        dtype: number format of keys and values; the config's own unless given.
        rollback: as DynamicSlidingWindowCache.
        kv_dtype: as DynamicSlidingWindowCache.
        quantize: as DynamicSlidingWindowCache.
        comparison: a real run of that model, of `windowkv.comparison.compare`, whose points are drawn besides.
        ax: where to draw; a new figure unless given.

    Raises:
        ConfigError, ModelSourceError, OptionError: as `plan`, for fewer than 2 tokens, or where matplotlib is missing.
    """
    config = load_config(config_or_path) if isinstance(config_or_path, str | Path) else config_or_path
    options: dict[str, Any] = {"rollback": rollback, "kv_dtype": kv_dtype, "quantize": quantize}
    last = plan(config, tokens=tokens, dtype=dtype, **options)
    if tokens < 2:
        raise OptionError(f"tokens={tokens}: a curve needs at least 2")
    old, new = curves(config, dtype=dtype or _DTYPES[last.itemsize], up_to=tokens, **options)
    bound = [(n, plan(config, tokens=n, dtype=dtype, **options).total_bytes) for n, _ in new.decoding]
    lengths = windows(config)
    title, subtitle = _finding(old, new, lengths) if comparison is None else _finding_of_runs(comparison, lengths)
    axes = new_axes(ax, title=title, subtitle=subtitle, caption=_caption(last.uncounted, comparison))
    label, unit = byte_scale(old.after_prompt[-1][1], "keys and values held")
    axes.plot(*_columns(new.decoding, unit), color=PALE, linewidth=6, solid_capstyle="butt", label="windowkv")
    axes.plot(*_columns(bound, unit), color=INK, linewidth=1.3, label="bound")
    axes.plot(*_columns(old.after_prompt, unit), color=OLD, linewidth=2.4, label="transformers after the prompt")
    axes.plot(*_columns(old.decoding, unit), color=OLD, linewidth=2, linestyle=(0, (4, 2)), label="transformers later")
    if comparison is not None:
        _draw_runs(axes, comparison, unit)
    axes.set_xlim(0, tokens)
    axes.set_ylim(0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    name_axes(axes, "tokens seen", label)
    _mark_windows(axes, lengths)
    _label_lines(axes, old, new, unit)
    return figure_of(axes)


def _draw_runs(axes: "Axes", comparison: Comparison, unit: int) -> None:
    """The points of the real runs, right after the prompt and at the end larger."""
    for name, points, color in (
        ("transformers' run", comparison.baseline.points, OLD),
        ("windowkv's run", comparison.windowkv.points, NEW),
    ):
        axes.plot(*_columns(points, unit), color=color, linewidth=1, linestyle=":", clip_on=False, label=name)
        ends = _columns((points[0], points[-1]), unit)
        axes.plot(*ends, "o", color=color, markersize=7, markeredgecolor="white", clip_on=False, zorder=3)


def _mark_windows(axes: "Axes", lengths: Sequence[int]) -> None:
    shown = [window for window in lengths if window < axes.get_xlim()[1]]
    for line, window in enumerate(shown):
        axes.axvline(window, color=QUIET, linewidth=1, linestyle=(0, (2, 2)))
        place = (5, -8 - 14 * line)
        write(axes, f"window: {window:,} tokens", (window, 1), place, coordinates=("data", "axes fraction"))


def _label_lines(axes: "Axes", old: Curve, new: Curve, unit: int) -> None:
    ends = (
        (old.after_prompt, "transformers, right\nafter the prompt", OLD),
        (old.decoding, "transformers,\none token later", OLD),
        (new.decoding, "windowkv at any time,\nits bound as planned", NEW),
    )
    label_right(axes, [Label(points[-1][1] / unit, text, color) for points, text, color in ends])


def _finding(old: Curve, new: Curve, lengths: Sequence[int]) -> tuple[str, str]:
    (tokens, old_first), (_, new_first) = old.after_prompt[-1], new.after_prompt[-1]
    return _after_prompt(tokens, old_first, new_first), _later(old.decoding[-1][1], new.decoding[-1][1], lengths)


def _finding_of_runs(comparison: Comparison, lengths: Sequence[int]) -> tuple[str, str]:
    old, new = comparison.baseline, comparison.windowkv
    title = _after_prompt(comparison.prompt_tokens, old.prompt_bytes, new.prompt_bytes)
    return title, _later(old.points[-1][1], new.points[-1][1], lengths)


def _after_prompt(tokens: int, old: int, new: int) -> str:
    return f"After a {tokens:,}-token prompt: {size(old)} with transformers, {size(new)} with windowkv"


def _later(old: int, new: int, lengths: Sequence[int]) -> str:
    why = "transformers drops what left the window one token late, windowkv keeps room"
    return f"While decoding {size(old)} and {size(new)}: {why if lengths else 'no layer has a window'}"


def _caption(uncounted: Sequence[int], comparison: Comparison | None) -> str:
    """What was measured, and what is in no line."""
    lines = "the caches fed tensors like the model's, at every length."
    if comparison is not None:
        prompt, later = comparison.prompt_tokens, len(comparison.windowkv.points) - 1
        lines = f"Dots: a real run, {prompt:,} tokens of prompt and {later:,} after it. Lines: {lines}"
    else:
        lines = f"Measured: {lines}"
    left_out = f" Left out: layers {', '.join(map(str, uncounted))}, which transformers keeps." if uncounted else ""
    return lines + left_out


def _columns(points: Points | Sequence[tuple[int, int]], unit: int) -> tuple[list[int], list[float]]:
    return [tokens for tokens, _ in points], [nbytes / unit for _, nbytes in points]
