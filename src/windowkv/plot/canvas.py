"""What all pictures share: where they are drawn, inks that differ in shades of grey too, labels beside what they name.

Knows matplotlib, which is an extra. Knows nothing of what is drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from windowkv.errors import OptionError
from windowkv.units import unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OLD, NEW, INK, QUIET = "#b3441e", "#0b5cad", "#222222", "#6b6b6b"  # at least 4.5:1 on white
PALE = "#8fbfe8"
# One for each line of several; what tells them apart without colour is the marker.
LINES = ((NEW, "o"), (OLD, "s"), ("#1b6e3c", "^"), ("#6a3d9a", "D"), (INK, "v"), ("#8a5a00", "P"), ("#9b1b5a", "X"))
_FILLS = ((NEW, ""), ("#f0c3a8", "///"), ("#6b7680", "..."), ("#dde3e8", ""), (OLD, "xxx"), (PALE, "\\\\\\"))


@dataclass(frozen=True)
class Label:
    """A text beside an axes, at the height of what it names."""

    height: float  # in the units of the y axis
    text: str
    color: str = INK


def new_axes(ax: "Axes | None", *, title: str, subtitle: str = "", caption: str = "", height: float = 5) -> "Axes":
    """An axes in the common style: the given one, or that of a new figure, `height` inches high.

    A new figure has a subtitle and a caption besides. Raises OptionError where matplotlib is missing.
    """
    if ax is None:
        figure = new_figure(height)
        ax = figure.add_subplot()
        dress(ax)
        ax.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=26 if subtitle else 10)
        if subtitle:
            # It may be wider than the axes, which the layout must not make room for.
            write(ax, subtitle, (0, 1), (0, 14), size=9).set_in_layout(False)
        if caption:
            figure.supxlabel(caption, x=0.02, horizontalalignment="left", fontsize=8.5, color=QUIET)
    else:
        dress(ax)
        ax.set_title(title, loc="left", fontsize=9.5, color=INK)
    return ax


def new_figure(height: float = 5) -> "Figure":
    """A figure of nine inches by `height`. Raises OptionError where matplotlib is missing."""
    try:
        from windowkv.plot.notebook import NotebookFigure  # not pyplot: no window system, no global state
    except ImportError as missing:
        raise OptionError("a picture needs matplotlib: pip install 'windowkv[plot]'") from missing
    figure = NotebookFigure(figsize=(9, height), dpi=160)
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.09)  # inches
    return figure


def figure_of(axes: "Axes") -> "Figure":
    """The whole figure that an axes is in, also where that lies in a part of one."""
    return axes.figure.figure


def dress(axes: "Axes", *, grid: Literal["x", "y"] | None = "y") -> None:
    """Give an axes the common style."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET)
    if grid:
        axes.grid(axis=grid, color="#e6e6e6", linewidth=0.8)
    axes.tick_params(colors=QUIET, labelcolor=INK, labelsize=9)
    axes.set_axisbelow(True)


def name_axes(axes: "Axes", x: str, y: str) -> None:
    """Write what the axes of an axes count, with units."""
    axes.set_xlabel(x, color=INK, fontsize=10)
    axes.set_ylabel(y, color=INK, fontsize=10)


def byte_scale(nbytes: int, what: str) -> tuple[str, int]:
    """`(name of an axis, bytes of its unit)` where the most that is drawn is `nbytes`."""
    name, weight = unit(nbytes)
    return f"{what} ({name})", weight


def fill(place: int) -> dict[str, Any]:
    """How the area at a place of a stack is filled: neighbours are dark and pale, and hatched or not."""
    color, hatch = _FILLS[place % len(_FILLS)]
    dark = color in (NEW, OLD, "#6b7680")
    return {"facecolor": color, "hatch": hatch, "edgecolor": "white" if dark else QUIET, "linewidth": 0}


def write(
    axes: "Axes",
    text: str,
    at: tuple[float, float],
    offset: tuple[float, float] = (0, 0),
    *,
    coordinates: Any = "axes fraction",
    align: Literal["left", "right"] = "left",
    size: float = 9,
    color: str = QUIET,
) -> Any:
    """Write text, one of its ends in the middle of the line at a place and an offset in points from there."""
    return axes.annotate(
        text,
        at,
        xycoords=coordinates,
        xytext=offset,
        textcoords="offset points",
        horizontalalignment=align,
        verticalalignment="center",
        fontsize=size,
        color=color,
        annotation_clip=False,
    )


def label_right(axes: "Axes", labels: Sequence[Label], *, size: float = 9.5) -> None:
    """Write labels at the right edge, as near to their heights as they find room, once the limits are set."""
    labels = sorted(labels, key=lambda label: label.height)
    fraction = axes.transScale + axes.transLimits
    heights = [float(fraction.transform((axes.get_xlim()[0], label.height))[1]) for label in labels]
    lines = max((label.text.count("\n") + 1 for label in labels), default=1)
    points = axes.get_position().height * figure_of(axes).get_figheight() * 72
    moved = spread(heights, gap=(lines + 0.4) * 1.2 * size / points)
    for label, height, place in zip(labels, heights, moved, strict=True):
        axes.annotate(
            label.text,
            (1, height),
            xycoords="axes fraction",
            xytext=(1.03, place),
            textcoords="axes fraction",
            verticalalignment="center",
            fontsize=size,
            fontweight="bold",
            color=label.color,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": label.color, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
            | {"relpos": (0, 0.5)},
        )


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
