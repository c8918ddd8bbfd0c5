"""The commands and their options.

Knows what each command does, in which order. Leaves torch and transformers to the command that needs them.
"""

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from fractions import Fraction
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windowkv.cli import matrix, reports
from windowkv.cli.sources import (
    DEMO_MODEL,
    encode,
    import_slowly,
    load,
    python_documentation,
    read_file,
    read_stdin,
)
from windowkv.cli.terminal import Show, print_json, print_table, progress, say
from windowkv.errors import OptionError, TinyModelError, WindowKVError
from windowkv.plot import FORMATS, Usage, draw_comparison, draw_ratios

if TYPE_CHECKING:
    from windowkv.benchmark import Result
    from windowkv.comparison import Comparison
    from windowkv.doctor import CacheKind

_WITH_MODEL = ("windowkv.comparison", "windowkv.model_source", "transformers.modeling_utils")
_STORE_BYTES = 1 << 30  # that a store holds in memory beside its files
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
store_app = typer.Typer(no_args_is_help=True, help="Folders of stored beginnings.")
app.add_typer(store_app, name="store")
cache_app = typer.Typer(no_args_is_help=True, help="Saved caches.")
app.add_typer(cache_app, name="cache")


class DType(StrEnum):
    """Number formats, by torch's names."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class KVDType(StrEnum):
    """What keys and values are quantised to, by windowkv's names."""

    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"


class Quantize(StrEnum):
    """Which layers are quantised."""

    FULL = "full"
    ALL = "all"


def _picture_path(path: Path) -> Path:
    if path.suffix not in FORMATS:
        raise typer.BadParameter(f"{path} does not end in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}")
    return path


def _new_file(path: Path | None) -> Path | None:
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}")
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a folder")
    return path


def _byte_count(text: str) -> int:
    parts = re.fullmatch(r"(\d+(?:\.\d+)?) ?(\w*)", text)
    if not parts or parts[2] not in _UNITS:
        raise typer.BadParameter(f"{text!r} is no number of bytes; 1500000, 1.5MiB and 2GiB are")
    return int(Fraction(parts[1]) * _UNITS[parts[2]])


_MODEL_HELP = f"{DEMO_MODEL}, a local folder, or a hub id."
ModelOption = Annotated[str, typer.Option(help=_MODEL_HELP)]
TextFile = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="Text to continue, instead of Python's documentation.")
]
PromptFile = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="File with the text to continue.")]
Picture = Annotated[Path, typer.Option(callback=_picture_path, help="Where the picture goes; of bench, the data too.")]
Budget = Annotated[
    int | None, typer.Option(parser=_byte_count, metavar="BYTES", help="Tell how many tokens fit in this, say 2GiB.")
]
Rollback = Annotated[int, typer.Option(min=0, help="Tokens that the cache can always take back.")]
KVFormat = Annotated[KVDType | None, typer.Option(help="Keep all but the newest tokens of the cache in so many bits.")]
QuantizedLayers = Annotated[
    Quantize, typer.Option(help="Which layers --kv-dtype is for: those that keep every token, or all.")
]
StoreDirectory = Annotated[str, typer.Argument(help="The directory of a PrefixStore: a folder, or an fsspec URL.")]
CacheFile = Annotated[Path, typer.Argument(help="A file that --save-cache or cache.save wrote.")]
Precision = Annotated[DType, typer.Option(help="Number format of the weights and the cache.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@app.callback(invoke_without_command=True)
def _root(show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Memory-bounded KV caches for language models with sliding-window attention."""
    if show_version:
        typer.echo(f"windowkv {version('windowkv')}")
        raise typer.Exit


@app.command()
def demo(
    text: TextFile = None,
    model: ModelOption = DEMO_MODEL,
    tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt.")] = 4096,
    new_tokens: Annotated[int, typer.Option(min=2, help="Length of the continuation.")] = 64,
    dtype: Precision = DType.FLOAT32,
    output: Picture = Path("windowkv-demo.png"),
    as_json: AsJson = False,
) -> None:
    """Continue one text with transformers' cache and with windowkv's, and show what each held and took."""
    source = python_documentation() if text is None else read_file(text)
    import_slowly(*_WITH_MODEL)
    with progress() as show:
        show(f"loading {model}", 0, 0)
        network, tokenizer = load(model, dtype)
        from windowkv.comparison import compare

        prompt = encode(tokenizer, source)[:, :tokens]
        with _enough_positions(network, prompt.shape[1] + new_tokens):
            comparison = compare(network, prompt, new_tokens=new_tokens, progress=show)
        show("drawing", 0, 0)
        picture = _draw(comparison, network, output)
    if comparison.prompt_tokens < tokens:
        say(f"the text is shorter than {tokens:,} tokens: all {comparison.prompt_tokens:,} of them were used")
    if as_json:
        report = reports.comparison_report(comparison)
        print_json({"model": model, "dtype": dtype} | report | {"picture": picture and str(picture)})
    else:
        title = f"{model}, {dtype}, a prompt of {comparison.prompt_tokens:,} tokens"
        print_table(reports.comparison_table(comparison, title=title))
        typer.echo(f"picture: {picture or 'none'}")
    if model == DEMO_MODEL:
        from windowkv.demo_model import TERMS

        say(TERMS)


@app.command()
def generate(
    model: ModelOption,
    prompt: Annotated[str | None, typer.Option(help="Text to continue; without one, stdin is read.")] = None,
    prompt_file: PromptFile = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens to generate.")] = 200,
    rollback: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens that the cache can always take back: 64, or all new ones where it is saved."),
    ] = None,
    dtype: Precision = DType.FLOAT32,
    load_cache: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="A saved cache: what the text shares with it is not computed."),
    ] = None,
    save_cache: Annotated[
        Path | None, typer.Option(callback=_new_file, help="Where the cache goes, prompt and continuation.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(metavar="DIR", help="Keep beginnings of texts there, and take them from there.")
    ] = None,
    kv_dtype: KVFormat = None,
    quantize: QuantizedLayers = Quantize.FULL,
) -> None:
    """Continue a text, as the model's own generation settings say, in a cache that stays within its bound."""
    source = _prompt(prompt, prompt_file)
    import_slowly(*_WITH_MODEL)
    from transformers import TextStreamer

    from windowkv.cache import ROLLBACK, DynamicSlidingWindowCache
    from windowkv.continuation import cache_name, reusable
    from windowkv.integration import enable
    from windowkv.persist import load as load_file
    from windowkv.prefix.store import PrefixStore

    kept = PrefixStore(_STORE_BYTES, store) if store else None
    with progress() as show:
        show(f"loading {model}", 0, 0)
        network, tokenizer = load(model, dtype)
        ids = encode(tokenizer, source)
        # A saved cache is to serve another continuation of the same prompt too.
        room = rollback if rollback is not None else max(ROLLBACK, max_new_tokens if save_cache else 0)
        loaded = None
        if load_cache:
            expected = kv_dtype and kv_dtype.value
            loaded = load_file(load_cache, network.config, dtype=network.dtype, rollback=room, kv_dtype=expected)
    reused = reusable(loaded, ids) if loaded is not None else 0
    with _enough_positions(network, ids.shape[1] + max_new_tokens):
        options: dict[str, Any] = {"kv_dtype": kv_dtype and kv_dtype.value, "quantize": quantize.value}
        output = enable(network, rollback=room, prefix_store=kept, **options).generate(
            ids,
            attention_mask=ids.new_ones(ids.shape),
            max_new_tokens=max_new_tokens,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            return_dict_in_generate=True,
            **({} if loaded is None else {cache_name(network): loaded}),
        )
    say(reports.generation_sentence(network, output, prompt_tokens=ids.shape[1]))
    if kept is not None:
        say(f"{kept.stats.tokens_reused:,} of the prompt's {ids.shape[1]:,} tokens were taken from {store}")
    if load_cache:
        say(f"{reused:,} of the prompt's {ids.shape[1]:,} tokens were taken from {load_cache}")
    if save_cache:
        cache = next((value for value in output.values() if isinstance(value, DynamicSlidingWindowCache)), None)
        if cache is None:
            raise OptionError("--save-cache: this model keeps no cache that windowkv could save")
        cache.save(save_cache)
        say(f"saved: {save_cache}, {reports.size(save_cache.stat().st_size)}")


@cache_app.command("show")
def show_cache(
    file: CacheFile,
    verify: Annotated[bool, typer.Option("--verify", help="Read all of it, and check every byte.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tell what a saved cache holds, without loading it."""
    import_slowly("windowkv.persist")
    from windowkv.persist import describe

    info = describe(file, verify=verify)
    if as_json:
        print_json({"file": str(file)} | reports.cache_file_report(info))
    else:
        print_table(reports.cache_file_table(info, title=str(file)))


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help=_MODEL_HELP)],
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


@app.command()
def doctor(
    model: Annotated[str | None, typer.Argument(help=f"{_MODEL_HELP} Only the config is read.")] = None,
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


@app.command()
def bench(
    scenario: Annotated[
        list[str] | None, typer.Option(help="One of those that --list names; all of them without.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each contender, of which the median counts.")] = 3,
    output: Annotated[Path, typer.Option(callback=_picture_path, help="Where the picture goes; JSON besides.")] = Path(
        "windowkv-bench.png"
    ),
    show_list: Annotated[bool, typer.Option("--list", help="Name the scenarios, and run none.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure time and memory against transformers, in one process, runs taking turns; takes a while."""
    import_slowly("windowkv.benchmark", *_WITH_MODEL)
    from windowkv.benchmark import SCENARIOS, run_scenario

    if show_list:
        print_table(reports.scenarios_table(SCENARIOS))
        return
    if unknown := set(scenario or ()) - set(SCENARIOS):
        raise typer.BadParameter(f"no scenario {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")
    results = {}
    with progress() as show:
        for name in scenario or SCENARIOS:
            show(f"{name}: loading", 0, 0)
            results[name] = run_scenario(SCENARIOS[name], rounds=rounds, progress=partial(_show_run, show, name))
    report = [reports.benchmark_report(name, result) for name, result in results.items()]
    output.with_suffix(".json").write_text(json.dumps(report, indent=2))
    if as_json:
        print_json({"scenarios": report})
    else:
        print_table(reports.benchmark_table(results))
        typer.echo(f"picture: {_draw_ratios(results, output) or 'none'}, data: {output.with_suffix('.json')}")


@store_app.command("ls")
def list_store(directory: StoreDirectory, as_json: AsJson = False) -> None:
    """List what is stored, by model and namespace."""
    import_slowly("windowkv.prefix.disk")
    from windowkv.prefix.disk import summaries

    found = summaries(directory)
    if as_json:
        print_json({"directory": directory, "scopes": [reports.scope_report(each) for each in found]})
    else:
        print_table(reports.scopes_table(found, title=directory))


@store_app.command("stats")
def count_store(directory: StoreDirectory, as_json: AsJson = False) -> None:
    """Tell what all of it comes to."""
    import_slowly("windowkv.prefix.disk")
    from windowkv.prefix.disk import summaries

    found = summaries(directory)
    if as_json:
        print_json({"directory": directory} | reports.store_report(found))
    else:
        print_table(reports.store_table(found, title=directory))


@store_app.command("verify")
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


@store_app.command("prune")
def prune_store(
    directory: StoreDirectory,
    max_bytes: Annotated[int, typer.Option(parser=_byte_count, metavar="BYTES", help="What may stay, say 2GiB.")],
) -> None:
    """Remove the least recently used files, in each model and namespace, until no more is left."""
    import_slowly("windowkv.prefix.disk")
    from windowkv.prefix.disk import DiskTier, scopes

    removed = sum(DiskTier(directory, scope, max_bytes).prune() for scope in scopes(directory))
    typer.echo(f"{removed:,} files removed")


@store_app.command("clear")
def clear_store(directory: StoreDirectory) -> None:
    """Remove every stored file."""
    import_slowly("windowkv.prefix.disk")
    from windowkv.prefix.disk import DiskTier, scopes

    removed = sum(DiskTier(directory, scope, 0).prune() for scope in scopes(directory))
    typer.echo(f"{removed:,} files removed")


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


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise typer.BadParameter("--prompt and --prompt-file are two prompts; pass one")
    if prompt is not None:
        return prompt
    if prompt_file is not None:
        return read_file(prompt_file)
    if sys.stdin.isatty():
        raise typer.BadParameter("no prompt: pass --prompt or --prompt-file, or pipe a text in")
    return read_stdin()


@contextmanager
def _enough_positions(network: Any, tokens: int) -> Iterator[None]:
    """Explain what a model with a table of positions says of a text that is longer than its table."""
    try:
        yield
    except IndexError as error:
        limit = getattr(network.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if limit is None or tokens <= limit:
            raise
        raise OptionError(
            f"{tokens:,} tokens: this model has positions for {limit:,} (max_position_embeddings)"
        ) from error


def _show_run(show: Show, scenario: str, contender: str, done: int, runs: int) -> None:
    show(f"{scenario}: {contender}", done, runs)


def _draw_ratios(results: "Mapping[str, Result]", output: Path) -> Path | None:
    bars = {
        f"{label}, against {contender}": {name: result.ratio(contender, attribute) for name, result in results.items()}
        for label, attribute in reports.BENCHMARK_MEASURES
        for contender in ("transformers", "transformers in chunks")
    }
    return _drawn(draw_ratios, output, bars)


def _drawn(draw: Callable[..., Path], *args: Any, **kwargs: Any) -> Path | None:
    """Where a picture is; without matplotlib None, and a line on how to get one."""
    try:
        return draw(*args, **kwargs)
    except OptionError as no_matplotlib:
        say(str(no_matplotlib))
        return None


def _draw(comparison: "Comparison", network: Any, output: Path) -> Path | None:
    from windowkv.comparison import curves, windows

    seen, _ = comparison.windowkv.points[-1]
    old, new = curves(network.config, dtype=network.dtype, up_to=seen)
    return _drawn(
        draw_comparison,
        output,
        baseline=Usage("transformers", old.after_prompt, old.decoding, comparison.baseline.points),
        windowkv=Usage("windowkv", new.after_prompt, new.decoding, comparison.windowkv.points),
        windows=windows(network.config),
    )
