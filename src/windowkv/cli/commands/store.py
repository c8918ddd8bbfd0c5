"""`windowkv store`: the folder of a prefix store, from outside."""

from typing import TYPE_CHECKING, Annotated

import typer

from windowkv.cli import reports
from windowkv.cli.options import AsJson, byte_count, examples
from windowkv.cli.sources import import_slowly
from windowkv.cli.terminal import print_json, print_table, progress

if TYPE_CHECKING:
    from windowkv.prefix.disk import ScopeSummary

StoreDirectory = Annotated[str, typer.Argument(help="The directory of a PrefixStore: a folder, or an fsspec URL.")]

app = typer.Typer(help="Folders of stored beginnings.", epilog=examples("windowkv store ls DIR"))


@app.command("ls", epilog=examples("windowkv store ls DIR", "windowkv store ls s3://bucket/beginnings --json"))
def list_store(directory: StoreDirectory, as_json: AsJson = False) -> None:
    """List what is stored, by model and namespace."""
    found = _summaries(directory)
    if as_json:
        print_json({"directory": directory, "scopes": [reports.scope_report(each) for each in found]})
    else:
        print_table(reports.scopes_table(found, title=directory))


@app.command("stats", epilog=examples("windowkv store stats DIR"))
def count_store(directory: StoreDirectory, as_json: AsJson = False) -> None:
    """Tell what all of it comes to."""
    found = _summaries(directory)
    if as_json:
        print_json({"directory": directory} | reports.store_report(found))
    else:
        print_table(reports.store_table(found, title=directory))


@app.command("verify", epilog=examples("windowkv store verify DIR"))
def verify_store(directory: StoreDirectory, as_json: AsJson = False) -> None:
    """Read every file, and remove those that are damaged."""
    import_slowly("windowkv.prefix.disk")
    from windowkv.prefix.disk import DiskTier, scopes

    sound = damaged = 0
    with progress() as show:
        for scope in scopes(directory):
            tier = DiskTier(directory, scope)
            entries = tier.entries()
            for done, entry in enumerate(entries):
                show(f"reading {scope[:8]}", done, len(entries))
                whole = tier.read(entry.name, touch=False) is not None
                sound, damaged = sound + whole, damaged + (not whole)
    if as_json:
        print_json({"directory": directory, "whole_files": sound, "damaged_files": damaged})
    else:
        typer.echo(f"{sound:,} files are whole, {damaged:,} were damaged and are gone")


@app.command("prune", epilog=examples("windowkv store prune DIR --max-bytes 2GiB"))
def prune_store(
    directory: StoreDirectory,
    max_bytes: Annotated[int, typer.Option(parser=byte_count, metavar="BYTES", help="What may stay, say 2GiB.")],
    as_json: AsJson = False,
) -> None:
    """Remove the least recently used files, in each model and namespace, until no more is left."""
    _prune(directory, max_bytes, as_json=as_json)


@app.command("clear", epilog=examples("windowkv store clear DIR"))
def clear_store(directory: StoreDirectory, as_json: AsJson = False) -> None:
    """Remove every stored file."""
    _prune(directory, 0, as_json=as_json)


def _summaries(directory: str) -> "list[ScopeSummary]":
    import_slowly("windowkv.prefix.disk")
    from windowkv.prefix.disk import summaries

    with progress() as show:
        show(f"reading {directory}", 0, 0)
        return summaries(directory)


def _prune(directory: str, max_bytes: int, *, as_json: bool) -> None:
    import_slowly("windowkv.prefix.disk")
    from windowkv.prefix.disk import DiskTier, scopes

    removed = 0
    with progress() as show:
        found = scopes(directory)
        for done, scope in enumerate(found):
            show(f"removing from {directory}", done, len(found))
            removed += DiskTier(directory, scope, max_bytes).prune()
    if as_json:
        print_json({"directory": directory, "removed_files": removed})
    else:
        typer.echo(f"{removed:,} files removed")
