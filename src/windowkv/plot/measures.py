"""Panels of bars: one measure of many things, and where it should be.

Knows numbers and names. Knows nothing of how they were measured.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from windowkv.errors import OptionError
from windowkv.plot.canvas import INK, NEW, QUIET, dress, figure_of, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 2


def ratios(panels: Mapping[str, Mapping[str, float | None]], *, ax: "Sequence[Axes] | Axes | None" = None) -> "Figure":
    """Draw a panel of bars for every measure, one bar for each name, against a line at 1; above 1 is filled.

    Args:
        panels: how many times less windowkv needs, by measure and by name; None where that is not known.
        ax: where to draw, an axes for each panel; a new figure unless given.

    Raises:
        OptionError: there is nothing to draw, there are not as many axes, or matplotlib is missing.
    """
    if not panels or not all(panels.values()):
        raise OptionError(f"panels={panels!r}: one or more, with a name or more in each")
    for axes, (title, lengths) in zip(_axes(panels, ax), panels.items(), strict=True):
        draw_bars(axes, lengths, title=title, form="{:.2f}x", hollow_below=1)
        axes.axvline(1, color=QUIET, linewidth=1)
    return figure_of(axes)


def draw_bars(
    axes: "Axes",
    lengths: Mapping[str, float | None],
    *,
    title: str,
    form: str,
    hollow_below: float = 0,
    limits: Sequence[float] | None = None,
) -> None:
    """Draw a bar for each name from the top down, with its length behind it; a mark at each one's limit, if given."""
    known = [length or 0.0 for length in lengths.values()]
    filled = ["white" if length < hollow_below else NEW for length in known]
    bars = axes.barh(range(len(known)), known, color=filled, edgecolor=NEW, height=0.65)
    texts = ["unknown" if length is None else form.format(length) for length in lengths.values()]
    around = {"boxstyle": "square,pad=0.12", "facecolor": "white", "edgecolor": "none"}
    axes.bar_label(bars, texts, padding=4, fontsize=8, color=INK, bbox=around, zorder=4)
    for place, limit in enumerate(limits or ()):
        axes.plot([limit, limit], [place - 0.42, place + 0.42], color=INK, linewidth=1.6, label="limit", zorder=3)
    dress(axes, grid=None)
    axes.set_title(title, fontsize=9, loc="left", color=INK)
    axes.set_yticks(range(len(known)), list(lengths))
    axes.set_xlim(min(0.0, *known) * 1.4, 1.25 * max(1.0 if hollow_below else 0.0, *known, *(limits or ())))
    axes.set_ylim(len(known) - 0.5, -0.5)
    axes.tick_params(labelsize=8)


def _axes(panels: Mapping[str, Mapping[str, float | None]], ax: "Sequence[Axes] | Axes | None") -> "list[Axes]":
    if ax is None:
        rows, most = -(-len(panels) // _COLUMNS), max(map(len, panels.values()))
        figure = new_figure(0.8 + (0.7 + 0.26 * most) * rows)
        figure.suptitle(
            "How many times less windowkv needs", x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK
        )
        return [figure.add_subplot(rows, _COLUMNS, place + 1) for place in range(len(panels))]
    given = list(ax) if hasattr(ax, "__iter__") else [ax]
    if len(given) != len(panels):
        raise OptionError(f"{len(given)} axes for {len(panels)} panels: pass one for each")
    return given
