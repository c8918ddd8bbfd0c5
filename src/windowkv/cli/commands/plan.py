"""`windowkv plan`: the bytes of a cache beforehand."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from windowkv.cli import reports
from windowkv.cli.options import (
    AsJson,
    ByteBudget,
    DType,
    KVFormat,
    Quantize,
    QuantizedLayers,
    Rollback,
)
from windowkv.cli.sources import DEMO_MODEL, import_slowly
from windowkv.cli.terminal import print_json, print_table, progress, say
from windowkv.errors import ModelSourceError, OptionError

_MODEL_HELP = f"{DEMO_MODEL}, a local folder, a config.json, a hub id, or a name that --list tells."


def plan(
    model: Annotated[str | None, typer.Argument(help=_MODEL_HELP)] = None,
    tokens: Annotated[int | None, typer.Option(min=0, help="Tokens in each row.")] = None,
    fit: ByteBudget = None,
    with_weights: Annotated[bool, typer.Option("--with-weights", help="Of --fit: the weights are in it too.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    dtype: Annotated[DType | None, typer.Option(help="Number format, instead of the config's own.")] = None,
    rollback: Rollback = 64,
    kv_dtype: KVFormat = None,
    quantize: QuantizedLayers = Quantize.FULL,
    static: Annotated[bool, typer.Option("--static", help="Plan a static cache.")] = False,
    max_cache_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens that a static cache is made for, instead of --tokens.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks: all bytes are those of one.")] = 1,
    list_models: Annotated[bool, typer.Option("--list", help="Tell the models whose shapes are built in.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tell what a cache will hold, to the byte, without loading any weights."""
    if list_models:
        _list(as_json)
        return
    if model is None:
        raise typer.BadParameter("name a model, or pass --list")
    if tokens is None and fit is None:
        raise typer.BadParameter("pass --tokens, --fit, or both")
    for name, given, needed, there in (
        ("--with-weights", with_weights, "--fit", fit is not None),
        ("--max-cache-len", max_cache_len is not None, "--static and --tokens", static and tokens is not None),
    ):
        if given and not there:
            raise typer.BadParameter(f"{name} needs {needed}")
    import_slowly("windowkv.planner", "windowkv.model_source")
    import torch

    from windowkv import planner
    from windowkv.model_source import load_config

    number_format = None if dtype is None else getattr(torch, dtype)
    with progress() as show:
        show(f"reading the config of {model}", 0, 0)
        config = load_config(model)
    weights = _weight_bytes(model, config, number_format, ranks, needed=with_weights)
    options: dict[str, Any] = {"dtype": number_format, "rollback": rollback, "ranks": ranks}
    options |= {"kv_dtype": kv_dtype and kv_dtype.value, "quantize": quantize.value}
    options |= {"cache": "static" if static else "dynamic"}
    planned = answer = None
    if tokens is not None:
        whole = options | {"batch_size": batch_size, "max_cache_len": max_cache_len}
        planned = planner.plan(config, tokens=tokens, **whole)
    if fit is not None:
        counted = weights if with_weights else None
        answer = _fit(config, fit, counted, tokens, batch_size, max_cache_len, options)
    if as_json:
        asked = {"model": model, "rollback": rollback, "kv_dtype": kv_dtype, "quantize": quantize, "ranks": ranks}
        asked |= {"cache": options["cache"], "weight_bytes": weights}
        print_json(asked | (reports.plan_report(planned) if planned else {}) | (answer._asdict() if answer else {}))
        return
    if planned is not None:
        of_one = "" if ranks == 1 else f", one of {ranks:,} ranks"
        title = f"{model}, {tokens:,} tokens, batch of {batch_size:,}{of_one}"
        print_table(reports.plan_table(planned, title=title, weights=weights))
    if answer is not None:
        typer.echo(reports.fit_sentences(answer))


def _weight_bytes(model: str, config: Any, dtype: Any, ranks: int, *, needed: bool) -> int | None:
    """What each rank holds of the weights when they are parted evenly; None where nobody can say, and need not."""
    from windowkv import planner

    try:
        weights = planner.weight_bytes(model if Path(model).exists() else config, dtype=dtype)
    except ModelSourceError as unreadable:
        if needed:
            raise
        say(f"note: {unreadable}")
        return None
    if weights is None and needed:
        raise OptionError(f"--with-weights: nobody can say what those of {model} weigh without loading them")
    return None if weights is None else -(-weights // ranks)


def _fit(
    config: Any,
    budget: int,
    weights: int | None,
    tokens: int | None,
    batch_size: int,
    max_cache_len: int | None,
    options: Mapping[str, Any],
) -> reports.Fit:
    """What fits into a number of bytes, beside weights that are to be in it too."""
    from windowkv import planner

    room, rows = max(0, budget - (weights or 0)), None
    if tokens is not None:
        rows = planner.max_batch_size(config, room, tokens=tokens, max_cache_len=max_cache_len, **options)
    return reports.Fit(
        budget_bytes=budget,
        counted_weight_bytes=weights,
        batch_size=batch_size,
        max_tokens=planner.max_tokens(config, room, batch_size=batch_size, **options),
        tokens=tokens,
        max_batch_size=rows,
        positions=getattr(config.get_text_config(decoder=True), "max_position_embeddings", None),
        uncounted=planner.layout(config).foreign,
    )


def _list(as_json: bool) -> None:
    import_slowly("windowkv.known_models", "windowkv.layout")
    from windowkv.known_models import known_models
    from windowkv.layout import read_layout

    found = {name: (model, read_layout(model.load_config())) for name, model in known_models().items()}
    if as_json:
        print_json(reports.known_models_report(found))
    else:
        print_table(reports.known_models_table(found))
