"""`windowkv store`: the folder of a prefix store, from outside."""

from typing import Annotated

import typer

from windowkv.cli import reports
from windowkv.cli.options import AsJson, byte_count
from windowkv.cli.sources import import_slowly
from windowkv.cli.terminal import print_json, print_table, progress

StoreDirectory = Annotated[str, typer.Argument(help="The directory of a PrefixStore: a folder, or an fsspec URL.")]

app = typer.Typer(no_args_is_help=True, help="Folders of stored beginnings.")


@app.command("ls")
def list_store(directory: StoreDirectory, as_json: AsJson = False) -> None:
    """List what is stored, by model and namespace."""
    import_slowly("windowkv.prefix.disk")
    from windowkv.prefix.disk import summaries

    found = summaries(directory)
    if as_json:
        print_json({"directory": directory, "scopes": [reports.scope_report(each) for each in found]})
    else:
        print_table(reports.scopes_table(found, title=directory))


@app.command("stats")
def count_store(directory: StoreDirectory, as_json: AsJson = False) -> None:
    """Tell what all of it comes to."""
    import_slowly("windowkv.prefix.disk")
    from windowkv.prefix.disk import summaries

    found = summaries(directory)
    if as_json:
        print_json({"directory": directory} | reports.store_report(found))
    else:
        print_table(reports.store_table(found, title=directory))


@app.command("verify")
def verify_store(directory: StoreDirectory) -> None:
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
    typer.echo(f"{sound:,} files are whole, {damaged:,} were damaged and are gone")


@app.command("prune")
def prune_store(
    directory: StoreDirectory,
    max_bytes: Annotated[int, typer.Option(parser=byte_count, metavar="BYTES", help="What may stay, say 2GiB.")],
) -> None:
    """Remove the least recently used files, in each model and namespace, until no more is left."""
    import_slowly("windowkv.prefix.disk")
    from windowkv.prefix.disk import DiskTier, scopes

    removed = sum(DiskTier(directory, scope, max_bytes).prune() for scope in scopes(directory))
    typer.echo(f"{removed:,} files removed")


@app.command("clear")
def clear_store(directory: StoreDirectory) -> None:
    """Remove every stored file."""
    import_slowly("windowkv.prefix.disk")
    from windowkv.prefix.disk import DiskTier, scopes

    removed = sum(DiskTier(directory, scope, 0).prune() for scope in scopes(directory))
    typer.echo(f"{removed:,} files removed")
