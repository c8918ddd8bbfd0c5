"""Pictures that a command draws besides what it prints.

Knows that matplotlib may be missing. Knows nothing of what is drawn.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from windowkv.cli.terminal import say
from windowkv.errors import OptionError


def drawn(output: Path, draw: Callable[..., Any], *args: Any, **kwargs: Any) -> Path | None:
    """Where the picture of a figure is; without matplotlib None, and a line on how to get one."""
    try:
        figure = draw(*args, **kwargs)
    except OptionError as no_matplotlib:
        say(str(no_matplotlib))
        return None
    figure.savefig(output)
    return output
