"""Measurements as pictures: what caches hold against the tokens that they have seen, and ratios.

Knows points, names and matplotlib, which is an extra. Knows nothing of caches, models or how anything was measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from windowkv.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[int, int]]  # (tokens seen, bytes held)

FORMATS = (".png", ".svg", ".pdf")

_MIB = 1 << 20
_OLD, _NEW, _INK, _QUIET = "#b3441e", "#0b5cad", "#222222", "#6b6b6b"  # at least 4.5:1 on white, also in shades of grey


@dataclass(frozen=True)
class Usage:
    """What one cache holds: lines over many lengths, and the points of one real run."""

    name: str
    after_prompt: Points
    decoding: Points
    measured: Points


def draw_comparison(path: Path, *, baseline: Usage, windowkv: Usage, windows: Sequence[int]) -> Path:
    """Draw both usages with the windows marked, write the picture, and return where it is.

    Raises OptionError without matplotlib, and for a path that does not end in one of `FORMATS`.
    """
    figure = _new_figure(path)
    axes = _new_axes(figure)
    _draw_usage(axes, baseline, _OLD)
    _draw_usage(axes, windowkv, _NEW)
    axes.set_xlim(0, max(tokens for tokens, _ in baseline.after_prompt))
    axes.set_ylim(0)
    _mark_windows(axes, windows)
    _label_ends(axes, baseline, windowkv)
    _entitle(axes, baseline, windowkv)
    figure.savefig(path)
    return path


def draw_ratios(path: Path, bars: Mapping[str, Mapping[str, float | None]]) -> Path:
    """Draw a panel of bars for every measure, one bar for each name, against a line at 1; return where it is.

    Raises OptionError as `draw_comparison`.
    """
    figure = _new_figure(path)
    names = list(next(iter(bars.values())))
    columns = 2
    figure.set_size_inches(9, 1 + (0.6 + 0.24 * len(names)) * -(-len(bars) // columns))
    panels = figure.subplots(-(-len(bars) // columns), columns, squeeze=False, sharey=True).flat
    for panel, (title, ratios) in zip(panels, bars.items(), strict=False):
        lengths = [ratios[name] or 0.0 for name in names]
        panel.barh(names, lengths, color=[_NEW if length >= 1 else _OLD for length in lengths], height=0.7)
        panel.bar_label(panel.containers[0], fmt="%.2fx", padding=3, fontsize=8, color=_INK)
        panel.axvline(1, color=_QUIET, linewidth=1)
        panel.set_title(title, fontsize=9, loc="left", color=_INK)
        panel.set_xlim(0, 1.15 * max(1.0, *lengths))
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8, colors=_QUIET, labelcolor=_INK)
    panels[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path)
    return path


def _new_figure(path: Path) -> "Figure":
    if path.suffix not in FORMATS:
        raise OptionError(f"{path}: a picture's name ends in {', '.join(FORMATS)}")
    try:
        from matplotlib.figure import Figure  # not pyplot: no window system, no global state
    except ImportError as missing:
        raise OptionError("a picture needs matplotlib: pip install 'windowkv[plot]'") from missing
    return Figure(figsize=(9, 5), dpi=160)


def _new_axes(figure: "Figure") -> "Axes":
    axes = figure.add_axes((0.085, 0.155, 0.68, 0.65))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_QUIET)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.tick_params(colors=_QUIET, labelcolor=_INK, labelsize=9)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_axisbelow(True)
    axes.set_xlabel("tokens seen", color=_INK, fontsize=10)
    axes.set_ylabel("keys and values held (MiB)", color=_INK, fontsize=10)
    return axes


def _draw_usage(axes: "Axes", usage: Usage, color: str) -> None:
    axes.plot(*_columns(usage.after_prompt), color=color, linewidth=2.2)
    axes.plot(*_columns(usage.decoding), color=color, linewidth=1.8, linestyle=(0, (4, 2)))
    axes.plot(*_columns(usage.measured), color=color, linewidth=1, linestyle=":", clip_on=False)
    ends = (usage.measured[0], usage.measured[-1])
    axes.plot(*_columns(ends), "o", color=color, markersize=7, markeredgecolor="white", clip_on=False, zorder=3)


def _mark_windows(axes: "Axes", windows: Sequence[int]) -> None:
    shown = [window for window in windows if window < axes.get_xlim()[1]]
    for line, window in enumerate(shown):
        axes.axvline(window, color=_QUIET, linewidth=1, linestyle=(0, (2, 2)))
        _write(
            axes, f"window: {window:,} tokens", (window, 1), (5, -8 - 14 * line), coordinates=("data", "axes fraction")
        )


def _label_ends(axes: "Axes", baseline: Usage, windowkv: Usage) -> None:
    """Write each line's name at its right end."""
    labels = [
        (baseline.after_prompt, f"{baseline.name}, right\nafter the prompt", _OLD),
        (baseline.decoding, f"{baseline.name},\none token later", _OLD),
        (windowkv.decoding, f"{windowkv.name}, right after\nthe prompt and later", _NEW),
    ]
    labels.sort(key=lambda label: label[0][-1][1])
    heights = spread([points[-1][1] / _MIB / axes.get_ylim()[1] for points, _, _ in labels], gap=0.13)
    for height, (_, text, color) in zip(heights, labels, strict=True):
        _write(axes, text, (1, height), (12, 0), size=10, weight="bold", color=color)


def spread(heights: Sequence[float], *, gap: float) -> list[float]:
    """Heights from 0 to 1, lowest first, moved as little as keeps them `gap` apart and not above 1.

    >>> spread([0.2, 0.25, 1.0], gap=0.25)
    [0.2, 0.45, 1.0]
    >>> spread([0.9, 0.95], gap=0.25)
    [0.75, 1.0]
    """
    upward = list(accumulate(heights, lambda below, height: max(height, below + gap)))
    downward = accumulate(
        reversed([min(height, 1.0) for height in upward]), lambda above, height: min(height, above - gap)
    )
    return list(downward)[::-1]


def _entitle(axes: "Axes", baseline: Usage, windowkv: Usage) -> None:
    (prompt, old_first), (last, old_last) = baseline.measured[0], baseline.measured[-1]
    (_, new_first), (_, new_last) = windowkv.measured[0], windowkv.measured[-1]
    old, new = baseline.name, windowkv.name
    title = f"After a {prompt:,}-token prompt: {_mib(old_first)} with {old}, {_mib(new_first)} with {new}"
    subtitle = (
        f"While decoding {_mib(old_last)} and {_mib(new_last)}: {old} drops what left the window one token late, "
        f"{new} keeps some room"
    )
    caption = (
        f"Dots: a real run, {prompt:,} tokens of prompt and {last - prompt:,} after it. "
        "Lines: the same caches fed tensors of the model's shapes, at every length."
    )
    write = partial(_write, axes, coordinates="figure fraction")
    write(title, (0.02, 0.945), size=13, weight="bold", color=_INK)
    write(subtitle, (0.02, 0.88), size=10)
    write(caption, (0.02, 0.035), size=8.5)


def _write(
    axes: "Axes",
    text: str,
    at: tuple[float, float],
    offset: tuple[float, float] = (0, 0),
    *,
    coordinates: str | tuple[str, str] = "axes fraction",
    size: float = 9,
    weight: str = "normal",
    color: str = _QUIET,
) -> None:
    """Write text, its left end in the middle of the line at a place and an offset in points from there."""
    axes.annotate(
        text,
        at,
        xycoords=coordinates,
        xytext=offset,
        textcoords="offset points",
        verticalalignment="center",
        fontsize=size,
        fontweight=weight,
        color=color,
    )


def _columns(points: Points) -> tuple[list[int], list[float]]:
    return [tokens for tokens, _ in points], [nbytes / _MIB for _, nbytes in points]


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.3g} MiB" if nbytes < 1000 * _MIB else f"{nbytes / _MIB:,.0f} MiB"
