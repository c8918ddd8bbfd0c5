"""Results on stdout; progress, notes and errors on stderr, so that a pipe gets results alone.

Knows streams and terminals. Knows nothing of what is written to them.
"""

import json
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

Show = Callable[[str, int, int], None]  # stage, steps done, steps in all; 0 in all when nobody knows


def print_table(table: Table) -> None:
    """A table on stdout."""
    Console(highlight=False).print(table)


def print_json(report: Mapping[str, Any]) -> None:
    """One JSON object on stdout."""
    typer.echo(json.dumps(report, indent=2))


def one_line(text: str, limit: int = 500) -> str:
    """The same without line breaks, and cut where it goes on for long.

    >>> one_line("a\\n  b "), one_line("abcdef", limit=4)
    ('a b', 'abc…')
    """
    joined = " ".join(text.split())
    return joined if len(joined) <= limit else f"{joined[: limit - 1]}…"


def say(message: str) -> None:
    """A line on stderr."""
    typer.echo(message, err=True)


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """A line on stderr while the block runs, where that is a terminal; the process may end in it at any time."""
    if Console(stderr=True).is_terminal:
        typer.echo(f"{what} ...", err=True, nl=False)
    try:
        yield
    finally:
        if Console(stderr=True).is_terminal:
            typer.echo(f"\r{' ' * (len(what) + 4)}\r", err=True, nl=False)


@contextmanager
def progress() -> Iterator[Show]:
    """A bar on stderr while the block runs, gone however it ends; a line per stage where stderr is no terminal."""
    console = Console(stderr=True)
    with _heard_interrupts() as check:
        if not console.is_terminal:
            yield _checked(_line_per_stage(), check)
            return
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("")

            def show(stage: str, done: int, steps: int) -> None:
                bar.update(task, description=stage, completed=done, total=steps or None)

            yield _checked(show, check)


def _checked(show: Show, check: Callable[[], None]) -> Show:
    def checked(stage: str, done: int, steps: int) -> None:
        check()
        show(stage, done, steps)

    return checked


@contextmanager
def _heard_interrupts() -> Iterator[Callable[[], None]]:
    """Raise KeyboardInterrupt as usual, and again from `check` when nobody heard it.

    Python drops an exception that is raised while a finalizer runs, and with it the wish to stop.
    """
    heard = False

    def interrupt(*_: object) -> None:
        nonlocal heard
        heard = True
        raise KeyboardInterrupt

    def check() -> None:
        if heard:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # a shell that starts a command in the background wants it left alone
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


def _line_per_stage() -> Show:
    said: set[str] = set()

    def show(stage: str, *_: int) -> None:
        if stage not in said:
            said.add(stage)
            say(f"{stage} ...")

    return show
