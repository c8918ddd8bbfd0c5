"""`windowkv cache`: what lies in the file of a saved cache."""

from pathlib import Path
from typing import Annotated

import typer

from windowkv.cli import reports
from windowkv.cli.options import AsJson, examples
from windowkv.cli.sources import import_slowly
from windowkv.cli.terminal import print_json, print_table, progress

CacheFile = Annotated[Path, typer.Argument(help="A file that --save-cache or cache.save wrote.")]

app = typer.Typer(help="Saved caches.", epilog=examples("windowkv cache show book.cache"))


@app.command(
    "show", epilog=examples("windowkv cache show book.cache", "windowkv cache show book.cache --verify --json")
)
def show_cache(
    file: CacheFile,
    verify: Annotated[bool, typer.Option("--verify", help="Read all of it, and check every byte.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tell what a saved cache holds, without loading it."""
    import_slowly("windowkv.persist")
    from windowkv.persist import describe

    with progress() as show:
        show(f"reading {file}", 0, 0)
        info = describe(file, verify=verify)
    if as_json:
        print_json({"file": str(file)} | reports.cache_file_report(info))
    else:
        print_table(reports.cache_file_table(info, title=str(file)))
