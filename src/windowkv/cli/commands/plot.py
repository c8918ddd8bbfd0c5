"""`windowkv plot`: pictures of plans, of a recorded run, and of what was measured before."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from windowkv.cli import reports
from windowkv.cli.options import (
    CONFIG_HELP,
    MODEL_HELP,
    AsJson,
    DType,
    KVFormat,
    Picture,
    Precision,
    Quantize,
    QuantizedLayers,
    Rollback,
    TextFile,
    examples,
)
from windowkv.cli.sources import (
    WITH_MODEL,
    encode,
    enough_positions,
    import_slowly,
    load,
    python_documentation,
    read_file,
)
from windowkv.cli.terminal import print_json, progress, say
from windowkv.errors import OptionError
from windowkv.recording import read_recording

if TYPE_CHECKING:
    from windowkv.prefix.store import Stats

T = TypeVar("T")

ModelName = Annotated[str, typer.Argument(help=CONFIG_HELP)]
NumberFormat = Annotated[DType | None, typer.Option(help="Number format, instead of the config's own.")]
Data = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A file of JSON.")]

app = typer.Typer(
    help="Pictures: PNG, SVG or PDF, by the name of --output.",
    epilog=examples("windowkv plot memory MODEL --tokens 32768"),
)


@app.command(
    "memory",
    epilog=examples("windowkv plot memory MODEL --tokens 32768", "windowkv plot memory gemma-3-27b --kv-dtype int8"),
)
def plot_memory(
    model: ModelName,
    tokens: Annotated[int, typer.Option(min=2, help="The longest text.")] = 8192,
    dtype: NumberFormat = None,
    rollback: Rollback = 64,
    kv_dtype: KVFormat = None,
    quantize: QuantizedLayers = Quantize.FULL,
    output: Picture = Path("windowkv-memory.png"),
    as_json: AsJson = False,
) -> None:
    """Draw what transformers' cache and windowkv's hold against tokens, without loading any weights."""
    import_slowly("windowkv.plot.usage")
    from windowkv.plot.usage import memory

    with progress() as show:
        show(f"measuring the caches of {model}", 0, 0)
        options = _plan_options(dtype, rollback, kv_dtype, quantize)
        _save(memory(model, tokens=tokens, **options), output, as_json=as_json)


@app.command("plans", epilog=examples("windowkv plot plans mistral-7b-v0.1 gemma-3-27b --output plans.svg"))
def plot_plans(
    models: Annotated[list[str], typer.Argument(help=f"Each {CONFIG_HELP}")],
    tokens: Annotated[int, typer.Option(min=1, help="The longest text; halves of it are planned too.")] = 131_072,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    dtype: NumberFormat = None,
    rollback: Rollback = 64,
    kv_dtype: KVFormat = None,
    quantize: QuantizedLayers = Quantize.FULL,
    output: Picture = Path("windowkv-plans.png"),
    as_json: AsJson = False,
) -> None:
    """Draw what the caches of models will hold over the length of a text, as planned."""
    import_slowly("windowkv.plot.planned")
    from windowkv.plot.planned import plans

    with progress() as show:
        show("reading configs", 0, 0)
        options = _plan_options(dtype, rollback, kv_dtype, quantize)
        named = {Path(model).name or model: model for model in models}
        _save(
            plans(named if len(named) == len(models) else models, tokens=tokens, batch_size=batch_size, **options),
            output,
            as_json=as_json,
        )


@app.command(
    "run", epilog=examples("windowkv plot run MODEL --tokens 8192", "windowkv plot run MODEL --text BOOK --plain")
)
def plot_run(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    text: TextFile = None,
    tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt.")] = 4096,
    new_tokens: Annotated[int, typer.Option(min=1, help="Length of the continuation.")] = 64,
    dtype: Precision = DType.FLOAT32,
    rollback: Rollback = 64,
    kv_dtype: KVFormat = None,
    quantize: QuantizedLayers = Quantize.FULL,
    plain: Annotated[bool, typer.Option("--plain", help="With the cache of transformers instead.")] = False,
    output: Picture = Path("windowkv-run.png"),
    as_json: AsJson = False,
) -> None:
    """Continue a text, and draw what the cache held meanwhile, by kind of layer; the samples are written as JSON."""
    if plain and kv_dtype is not None:
        raise typer.BadParameter("--plain is the cache of transformers, and --kv-dtype is for windowkv's")
    data = output.with_suffix(".json")
    if data.exists():
        read_recording(data)  # says that it is none: nothing else is overwritten
    source = python_documentation() if text is None else read_file(text)
    import_slowly("windowkv.recorder", *WITH_MODEL)
    from windowkv.integration import enable
    from windowkv.recorder import MemoryRecorder

    with progress() as show:
        show(f"loading {model}", 0, 0)
        network, tokenizer = load(model, dtype)
        ids = encode(tokenizer, source)[:, :tokens]
        if not plain:
            enable(network, rollback=rollback, kv_dtype=kv_dtype and kv_dtype.value, quantize=quantize.value)
        show(f"running {ids.shape[1]:,} tokens of prompt, {new_tokens:,} new", 0, 0)
        with enough_positions(network, ids.shape[1] + new_tokens), MemoryRecorder(network) as recorder:
            lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
            network.generate(ids, attention_mask=ids.new_ones(ids.shape), do_sample=False, **lengths)
    if ids.shape[1] < tokens:
        say(f"the text is shorter than {tokens:,} tokens: all {ids.shape[1]:,} of them were used")
    recorder.write(data)
    _save(recorder.plot(), output, data=data, as_json=as_json)


@app.command("recording", epilog=examples("windowkv plot recording windowkv-run.json --output run.svg"))
def plot_recording(file: Data, output: Picture = Path("windowkv-recording.png"), as_json: AsJson = False) -> None:
    """Draw what a MemoryRecorder or `windowkv plot run` wrote."""
    from windowkv.plot.recorded import recording

    _save(recording(read_recording(file)), output, as_json=as_json)


@app.command("bench", epilog=examples("windowkv plot bench windowkv-bench.json"))
def plot_bench(file: Data, output: Picture = Path("windowkv-bench.png"), as_json: AsJson = False) -> None:
    """Draw what `windowkv bench` wrote."""
    from windowkv.plot.measures import ratios

    _save(ratios(_read(file, reports.benchmark_panels, "windowkv bench writes")), output, as_json=as_json)


@app.command("parts", epilog=examples("windowkv plot parts parts.json --title Prefill"))
def plot_parts(
    file: Data,
    amount: Annotated[str, typer.Option(help="What is counted, with its unit.")] = "time (s)",
    title: Annotated[str, typer.Option(help="What is to be seen.")] = "Time by part",
    output: Picture = Path("windowkv-parts.png"),
    as_json: AsJson = False,
) -> None:
    """Draw stacked columns of {"column": {"part": amount, ...}, ...}, such as benchmarks/prefill_split.py writes."""
    import_slowly("windowkv.plot.stacks")
    from windowkv.plot.stacks import parts

    _save(parts(_read(file, _columns, "holds columns of parts"), amount=amount, title=title), output, as_json=as_json)


@app.command("reuse", epilog=examples("windowkv plot reuse stats.json"))
def plot_reuse(file: Data, output: Picture = Path("windowkv-reuse.png"), as_json: AsJson = False) -> None:
    """Draw how many tokens a prefix store saved, request by request.

    FILE is a list of objects: store.stats before the first request, and after each one.
    """
    import_slowly("windowkv.plot.stacks")
    from windowkv.plot.stacks import reuse

    _save(reuse(_read(file, _stats, "is made of store.stats")), output, as_json=as_json)


def _plan_options(dtype: DType | None, rollback: int, kv_dtype: Any, quantize: Quantize) -> dict[str, Any]:
    import torch

    number_format = None if dtype is None else getattr(torch, dtype)
    packed = {"kv_dtype": kv_dtype and kv_dtype.value, "quantize": quantize.value}
    return {"dtype": number_format, "rollback": rollback} | packed


def _columns(data: Any) -> dict[str, dict[str, float]]:
    return {column: {part: float(amount) for part, amount in parts.items()} for column, parts in data.items()}


def _stats(data: Any) -> "list[Stats]":
    from windowkv.prefix.store import Stats

    return [Stats(**each) for each in data]


def _read(file: Path, parse: Callable[[Any], T], what: str) -> T:
    """What a file of JSON holds. Raises OptionError for a file that is of another make."""
    try:
        return parse(json.loads(file.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(f"{file} is not what {what}: {error!r}") from error


def _save(figure: Any, output: Path, *, data: Path | None = None, as_json: bool) -> None:
    figure.savefig(output)
    if as_json:
        print_json({"picture": str(output), "data": data and str(data)})
    else:
        typer.echo(f"picture: {output}" + (f", data: {data}" if data else ""))
