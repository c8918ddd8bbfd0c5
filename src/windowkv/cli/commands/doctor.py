"""`windowkv doctor`: what works with a model."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windowkv.cli import matrix
from windowkv.cli.options import MODEL_HELP, AsJson
from windowkv.cli.sources import import_slowly
from windowkv.cli.terminal import Show, print_json, print_table, progress
from windowkv.errors import TinyModelError

if TYPE_CHECKING:
    from windowkv.doctor import CacheKind


def doctor(
    model: Annotated[str | None, typer.Argument(help=f"{MODEL_HELP} Only the config is read.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every architecture of the installed transformers that can have a window.")
    ] = False,
    cache: Annotated[list[str] | None, typer.Option(help="One of the caches; all of them without.")] = None,
    as_json: AsJson = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print a page of documentation on stdout.")] = False,
) -> None:
    """Try every cache with a model: a tiny twin with random weights does all that a cache is used for.

    Tokens are compared with those without any cache. Exit code 1 when one of windowkv's caches fails.
    """
    if every == (model is not None):
        raise typer.BadParameter("pass a model, or --all")
    if as_json and as_markdown:
        raise typer.BadParameter("--json and --markdown are two forms; pass one")
    import_slowly("windowkv.doctor", "windowkv.architectures", "windowkv.model_source")
    import torch

    from windowkv.architectures import windowed_configs
    from windowkv.doctor import CACHES
    from windowkv.model_source import load_config

    kinds = [kind for kind in CACHES if not cache or kind.name in cache]
    if unknown := set(cache or ()) - {kind.name for kind in kinds}:
        names = ", ".join(kind.name for kind in CACHES)
        raise typer.BadParameter(f"no cache {', '.join(sorted(unknown))}; there are {names}")
    torch.set_num_threads(1)  # the twins are tiny: threads only get in each other's way
    with progress() as show, _without_warnings():
        if model is not None:
            show(f"reading the config of {model}", 0, 0)
            examined = {model: _examined(load_config(model), kinds, show)}
        else:
            configs = dict(windowed_configs())
            examined = {}
            for done, (name, config) in enumerate(configs.items()):
                show(f"examining {len(configs):,} architectures", done, len(configs))
                try:
                    examined[name] = _examined(config, kinds, windows=True)
                except TinyModelError as error:
                    examined[name] = str(error)
    if as_json:
        print_json(matrix.report(examined))
    elif as_markdown:
        typer.echo(matrix.page(examined))
    elif model is not None:
        print_table(matrix.model_table(examined[model], title=model))
    else:
        print_table(matrix.architectures_table(examined))
    if matrix.failures(examined):
        raise typer.Exit(1)


def _examined(config: Any, kinds: "Sequence[CacheKind]", show: Show | None = None, *, windows: bool = False) -> Any:
    from windowkv.doctor import examine
    from windowkv.tiny_model import tiny_model

    return examine(tiny_model(config, windows=windows), caches=kinds, progress=show)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """What windowkv warns of while it examines is in the result."""
    logger = logging.getLogger("windowkv")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
