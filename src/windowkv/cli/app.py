"""The `windowkv` command: its subcommands, and how it ends.

Knows which commands there are. Leaves torch and transformers to the command that needs them.
"""

import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, NoReturn, cast

import typer

from windowkv.cli.commands import cache, plot, store
from windowkv.cli.commands.bench import bench
from windowkv.cli.commands.demo import demo
from windowkv.cli.commands.doctor import doctor
from windowkv.cli.commands.generate import generate
from windowkv.cli.commands.plan import plan
from windowkv.cli.options import examples
from windowkv.cli.terminal import one_line, say
from windowkv.errors import WindowKVError

_DEBUG = "--debug"
# typer takes it from click in one release, and brings it along in another.
_UsageError = cast(type[typer.BadParameter], typer.BadParameter.__mro__[1])

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
for name, command, *lines in (
    ("demo", demo, "windowkv demo", "windowkv demo --text BOOK --tokens 8192 --json"),
    ("compare", demo, "windowkv compare --model MODEL --text BOOK --output book.svg"),
    (
        "generate",
        generate,
        "windowkv generate --model MODEL --prompt Hello",
        "git log | windowkv generate --model MODEL",
    ),
    ("plan", plan, "windowkv plan MODEL --tokens 32768 --dtype bfloat16", "windowkv plan MODEL --fit 24GiB --json"),
    ("doctor", doctor, "windowkv doctor MODEL", "windowkv doctor MODEL --cache enable --cache int8"),
    ("bench", bench, "windowkv bench --list", "windowkv bench --scenario prefill --rounds 5"),
):
    app.command(name, epilog=examples(*lines))(command)
app.add_typer(plot.app, name="plot")
app.add_typer(store.app, name="store")
app.add_typer(cache.app, name="cache")


@app.callback(invoke_without_command=True, epilog=examples("windowkv demo", "windowkv plan --help"))
def _root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option(_DEBUG, help="Show where an error came from; anywhere on the line.")] = False,
) -> None:
    """Memory-bounded KV caches for language models with sliding-window attention."""
    if show_version:
        typer.echo(f"windowkv {version('windowkv')}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


def main() -> None:
    """Run the command. What goes wrong ends in one line on stderr: exit code 2 for wrong usage, else 1."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # either may have been closed
        stream.reconfigure(errors="replace")  # a model may write what a terminal cannot
    arguments, debug = _without_debug(sys.argv[1:])
    try:
        sys.exit(app(arguments, standalone_mode=False))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        _end(error, debug=debug)


def _without_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """The arguments without `--debug`, which may stand anywhere before a `--`, and whether it was there.

    >>> _without_debug(["plan", "--debug", "m", "--", "--debug"])
    (['plan', 'm', '--', '--debug'], True)
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [argument for argument in arguments[:end] if argument != _DEBUG]
    return [*kept, *arguments[end:]], len(kept) < end


def _end(error: Exception, *, debug: bool) -> NoReturn:
    if isinstance(error, _UsageError):
        context = error.ctx
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        say(f"error: {one_line(error.format_message()).rstrip('.')}{hint}")
        sys.exit(error.exit_code)
    if isinstance(error, typer.Abort):
        sys.exit(130)
    if debug:
        raise error
    if isinstance(error, WindowKVError | OSError):
        say(f"error: {one_line(str(error))}")
    else:
        say(f"error: {type(error).__name__}: {one_line(str(error))} ({_DEBUG} shows where it came from)")
    sys.exit(1)
