"""`windowkv plan`: the bytes of a cache beforehand."""

from typing import Annotated, Any

import typer

from windowkv.cli import reports
from windowkv.cli.options import (
    MODEL_HELP,
    AsJson,
    Budget,
    DType,
    KVFormat,
    Quantize,
    QuantizedLayers,
    Rollback,
)
from windowkv.cli.sources import import_slowly
from windowkv.cli.terminal import print_json, print_table, progress


def plan(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    tokens: Annotated[int | None, typer.Option(min=0, help="Tokens in each row.")] = None,
    budget: Budget = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    dtype: Annotated[DType | None, typer.Option(help="Number format, instead of the config's own.")] = None,
    rollback: Rollback = 64,
    kv_dtype: KVFormat = None,
    quantize: QuantizedLayers = Quantize.FULL,
    as_json: AsJson = False,
) -> None:
    """Tell what a cache will hold, to the byte, without loading any weights."""
    if tokens is None and budget is None:
        raise typer.BadParameter("pass --tokens, --budget, or both")
    import_slowly("windowkv.planner", "windowkv.model_source")
    import torch

    from windowkv import planner
    from windowkv.model_source import load_config

    with progress() as show:
        show(f"reading the config of {model}", 0, 0)
        config = load_config(model)
    options: dict[str, Any] = {"batch_size": batch_size, "dtype": dtype and getattr(torch, dtype), "rollback": rollback}
    options |= {"kv_dtype": kv_dtype and kv_dtype.value, "quantize": quantize.value}
    planned = None if tokens is None else planner.plan(config, tokens=tokens, **options)
    most = None if budget is None else planner.max_tokens(config, budget, **options)
    if as_json:
        answer = {} if budget is None else {"budget_bytes": budget, "max_tokens": most}
        asked = {"model": model, "rollback": rollback, "kv_dtype": kv_dtype, "quantize": quantize}
        print_json(asked | (reports.plan_report(planned) if planned else {}) | answer)
        return
    if planned is not None:
        print_table(reports.plan_table(planned, title=f"{model}, {tokens:,} tokens, batch of {batch_size:,}"))
    if budget is not None:
        typer.echo(reports.budget_sentence(budget, most))
