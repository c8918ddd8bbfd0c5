"""Stacked columns: what the parts of something come to, column by column.

Knows amounts and names. Knows nothing of how they were measured.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from textwrap import fill as wrap
from typing import TYPE_CHECKING

from windowkv.errors import OptionError
from windowkv.plot.canvas import INK, Label, figure_of, fill, label_right, name_axes, new_axes
from windowkv.prefix.store import Stats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def parts(
    columns: Mapping[str, Mapping[str, float]],
    *,
    amount: str = "time (s)",
    title: str = "Time by part",
    ax: "Axes | None" = None,
) -> "Figure":
    """Draw a column for each name, of the same parts each, the first at the bottom, with their sum above.

    Args:
        columns: how much each part is, by column: `{"windowkv": {"MLP": 0.4, "attention": 0.2}, ...}`.
        amount: what is counted, with its unit.
        title: what is to be seen.
        ax: where to draw; a new figure unless given.

    Raises:
        OptionError: there is no column or no part, columns have different parts, or matplotlib is missing.
    """
    names = list(next(iter(columns.values()), ()))
    unlike = [column for column, amounts in columns.items() if list(amounts) != names]
    if not names or unlike:
        raise OptionError(f"columns={columns!r}: one or more, with the same parts in the same order each")
    axes = new_axes(ax, title=title)
    places = range(len(columns))
    _stack(axes, places, {name: [column[name] for column in columns.values()] for name in names}, width=0.6)
    for place, column in zip(places, columns.values(), strict=True):
        top = sum(column.values())
        axes.annotate(
            f"{top:.2f}", (place, top), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=9.5, color=INK
        )
    axes.set_xticks(places, list(columns))
    axes.set_xlim(-0.5, len(columns) - 0.65)
    name_axes(axes, "", amount)
    _label_stack(axes, list(columns.values())[-1])
    return figure_of(axes)


def reuse(stats: Sequence[Stats], *, ax: "Axes | None" = None) -> "Figure":
    """Draw how many tokens of each request were taken from a prefix store, and how many were computed.

    Args:
        stats: what `store.stats` was before the first request, and after each one.
        ax: where to draw; a new figure unless given.

    Raises:
        OptionError: there is no request in it, or matplotlib is missing.
    """
    if len(stats) < 2:
        raise OptionError(f"stats={list(stats)!r}: store.stats before the first request, and after each one")
    reused = [after.tokens_reused - before.tokens_reused for before, after in pairwise(stats)]
    computed = [after.tokens_computed - before.tokens_computed for before, after in pairwise(stats)]
    whole = sum(reused) + sum(computed)
    title = f"{sum(reused):,} of the {whole:,} tokens of {len(reused):,} prompts were taken from the store"
    axes = new_axes(ax, title=title)
    names = {"taken from the store": reused, "computed": computed}
    _stack(axes, range(1, len(stats)), names, width=0.7)
    axes.set_xlim(0.4, len(stats) - 0.6)
    axes.locator_params(axis="x", integer=True)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    name_axes(axes, "requests, in order", "tokens of the prompt")
    _label_stack(axes, {name: amounts[-1] for name, amounts in names.items()})
    return figure_of(axes)


def _stack(axes: "Axes", places: Sequence[int], amounts: Mapping[str, Sequence[float]], *, width: float) -> None:
    bottoms = [0.0] * len(places)
    for which, (name, heights) in enumerate(amounts.items()):
        axes.bar(places, heights, width, bottom=bottoms, label=name, **fill(which))
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]


def _label_stack(axes: "Axes", last: Mapping[str, float]) -> None:
    """Name the parts beside the middles of those of the last column."""
    tops = list(accumulate(last.values()))
    label_right(
        axes, [Label(top - height / 2, wrap(name, 16)) for top, (name, height) in zip(tops, last.items(), strict=True)]
    )
