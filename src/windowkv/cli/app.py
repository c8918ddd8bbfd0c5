"""The `windowkv` command: its subcommands, and how it ends.

Knows which commands there are. Leaves torch and transformers to the command that needs them.
"""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from windowkv.cli.commands import cache, plot, store
from windowkv.cli.commands.bench import bench
from windowkv.cli.commands.demo import demo
from windowkv.cli.commands.doctor import doctor
from windowkv.cli.commands.generate import generate
from windowkv.cli.commands.plan import plan
from windowkv.cli.terminal import say
from windowkv.errors import WindowKVError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for command in (demo, generate, plan, doctor, bench):
    app.command()(command)
app.add_typer(plot.app, name="plot")
app.add_typer(store.app, name="store")
app.add_typer(cache.app, name="cache")


@app.callback(invoke_without_command=True)
def _root(show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Memory-bounded KV caches for language models with sliding-window attention."""
    if show_version:
        typer.echo(f"windowkv {version('windowkv')}")
        raise typer.Exit


def main() -> None:
    """Run the command; what goes wrong on purpose ends in one line on stderr and exit code 1."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a model may write what a terminal cannot
    try:
        app()
    except (WindowKVError, OSError) as error:
        say(f"error: {' '.join(str(error).split())}")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
