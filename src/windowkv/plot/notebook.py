"""A figure that a notebook shows where it is the last line of a cell.

Knows matplotlib, which is imported when this module is: import it where something is drawn.
"""

from io import BytesIO

from matplotlib.figure import Figure


class NotebookFigure(Figure):
    """A figure outside of pyplot, whose figures alone notebooks show by themselves."""

    def _repr_png_(self) -> bytes:
        """The picture that IPython asks for."""
        picture = BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()
