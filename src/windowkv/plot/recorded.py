"""What a recorded cache held over time, by kind of layer.

Knows samples. Knows nothing of how they were taken.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from windowkv.errors import OptionError
from windowkv.plot.canvas import INK, Label, byte_scale, figure_of, fill, label_right, name_axes, new_axes, write
from windowkv.recording import Recording, Sample
from windowkv.units import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def recording(recording: Recording, *, ax: "Axes | None" = None) -> "Figure":
    """Draw the bytes that each kind of layer held over time, kinds on top of each other, and each run's peak.

    Args:
        recording: a MemoryRecorder, or what was read of its file.
        ax: where to draw; a new figure unless given.

    Raises:
        OptionError: nothing was recorded, or matplotlib is missing.
    """
    if not recording.samples:
        raise OptionError("nothing was recorded: no forward with a cache ran in that time")
    runs = recording.runs
    axes = new_axes(ax, title=_title(runs, recording.peak_bytes), subtitle=_subtitle(runs))
    label, unit = byte_scale(recording.peak_bytes, "held by caches")
    for number, run in enumerate(runs):
        _draw_run(axes, run, recording.kinds, unit, first=number == 0)
    axes.set_xlim(0, runs[-1][-1].seconds or 1)
    axes.set_ylim(0, 1.15 * recording.peak_bytes / unit or 1)
    name_axes(axes, "time (s)", label)
    for number, run in enumerate(runs, start=1):
        _mark_peak(axes, run, unit, name=f"run {number}: " if len(runs) > 1 else "")
    _label_kinds(axes, runs[-1][-1], recording.kinds, unit)
    return figure_of(axes)


def _draw_run(axes: "Axes", run: Sequence[Sample], kinds: Sequence[str], unit: int, *, first: bool) -> None:
    """Each kind's area on top of those before, and a line around all; what is held stays until the next sample."""
    seconds = [sample.seconds for sample in run]
    below = [0.0] * len(run)
    for place, kind in enumerate(kinds):
        above = [low + sample.nbytes.get(kind, 0) / unit for low, sample in zip(below, run, strict=True)]
        axes.fill_between(seconds, below, above, step="post", label=kind if first else f"_{kind}", **fill(place))
        below = above
    axes.plot(seconds, below, color=INK, linewidth=1, drawstyle="steps-post", label="all" if first else "_all")


def _mark_peak(axes: "Axes", run: Sequence[Sample], unit: int, *, name: str) -> None:
    peak = max(run, key=lambda sample: sample.total_bytes)
    at = (peak.seconds, peak.total_bytes / unit)
    axes.plot(*at, "o", color=INK, markersize=5, clip_on=False)
    align: Literal["left", "right"] = "right" if peak.seconds > 0.7 * axes.get_xlim()[1] else "left"
    write(axes, f"{name}{size(peak.total_bytes)}", at, (0, 10), coordinates="data", color=INK, align=align)


def _label_kinds(axes: "Axes", last: Sample, kinds: Sequence[str], unit: int) -> None:
    held = [last.nbytes.get(kind, 0) / unit for kind in kinds]
    middles = [top - height / 2 for top, height in zip(accumulate(held), held, strict=True)]
    label_right(axes, [Label(middle, f"{kind} layers") for middle, kind in zip(middles, kinds, strict=True)])


def _title(runs: Sequence[Sequence[Sample]], peak: int) -> str:
    runs_in_words = "" if len(runs) == 1 else f" in {len(runs):,} runs"
    return f"{size(peak)} of keys, values and states at most{runs_in_words}"


def _subtitle(runs: Sequence[Sequence[Sample]]) -> str:
    ends = [f"{_tokens(run[-1])}{size(run[-1].total_bytes)}" for run in runs[:3]]
    return f"At the end of each run: {'; '.join(ends)}{' ...' if len(runs) > 3 else ''}"


def _tokens(sample: Sample) -> str:
    return "" if sample.tokens is None else f"{sample.tokens:,} tokens, "
