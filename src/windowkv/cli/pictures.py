"""Pictures that a command draws besides what it prints.

Knows that matplotlib may be missing. Knows nothing of what is drawn.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from windowkv.cli.terminal import say
from windowkv.errors import OptionError


def drawn(draw: Callable[..., Path], *args: Any, **kwargs: Any) -> Path | None:
    """Where a picture is; without matplotlib None, and a line on how to get one."""
    try:
        return draw(*args, **kwargs)
    except OptionError as no_matplotlib:
        say(str(no_matplotlib))
        return None
