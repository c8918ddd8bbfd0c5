"""How results are worded: comparisons, plans and generations as tables, JSON and sentences.

Knows which numbers are worth telling, and their units. Computes none of them.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from windowkv.units import size

if TYPE_CHECKING:
    from windowkv.benchmark import Result, Scenario
    from windowkv.comparison import Comparison
    from windowkv.known_models import KnownModel
    from windowkv.layout import CacheLayout
    from windowkv.memory import Plan
    from windowkv.persist import CacheFileInfo
    from windowkv.prefix.disk import ScopeSummary


class _Measure(NamedTuple):
    label: str
    key: str  # in JSON, after the name of the run
    attribute: str  # of comparison.Run
    write: Callable[[Any], str]


class Fit(NamedTuple):
    """What fits into a number of bytes."""

    budget_bytes: int
    counted_weight_bytes: int | None  # that must fit too; None where keys and values have it for themselves
    batch_size: int
    max_tokens: int | None  # in each row; None where any number fits
    tokens: int | None  # that were asked for
    max_batch_size: int | None  # of so many tokens; None where any number fits, or nobody asked
    positions: int | None  # as far as the model's config goes
    uncounted: tuple[int, ...]  # layers of kinds that transformers stores, whose bytes are in no number


class Generation(NamedTuple):
    """What a finished `generate` was fed and its cache holds."""

    prompt_tokens: int
    new_tokens: int
    kv_bytes: int | None  # None without a cache
    baseline_bytes: int | None  # had no token been dropped; None where nothing grows with the tokens


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def _ratio(before: float | None, after: float | None) -> str:
    return f"{before / after:.2f}x" if before is not None and after else "-"


_MEASURES = (
    _Measure("KV bytes right after the prompt", "kv_bytes", "prompt_bytes", size),
    _Measure("KV bytes while decoding, at most", "decoding_kv_bytes", "decoding_bytes", size),
    _Measure("peak memory of the process", "peak_bytes", "peak_bytes", size),
    _Measure("time to first token", "first_token_seconds", "first_token_seconds", _duration),
    _Measure("time per token, median", "token_seconds", "token_seconds", _duration),
)


BENCHMARK_MEASURES = (
    ("time to first token", "first_token_seconds"),
    ("time per token", "token_seconds"),
    ("KV bytes after the prompt", "kv_bytes"),
    ("rise of memory", "rise_bytes"),
)


def comparison_report(comparison: "Comparison") -> dict[str, Any]:
    """A comparison for JSON: bytes and seconds, each for `baseline_` and `windowkv_`."""
    runs = {"baseline": comparison.baseline, "windowkv": comparison.windowkv}
    return {
        "tokens_equal": comparison.tokens_equal,
        "prompt_tokens": comparison.prompt_tokens,
        "new_tokens": len(comparison.windowkv.tokens),
        "bound_bytes": comparison.bound_bytes,
        "uncounted_layers": comparison.uncounted,
        **{f"{name}_{each.key}": getattr(run, each.attribute) for each in _MEASURES for name, run in runs.items()},
    }


def comparison_table(comparison: "Comparison", *, title: str) -> Table:
    """A comparison for a reader."""
    table = _table(title, "", "transformers", "windowkv", "ratio")
    old, new = comparison.baseline, comparison.windowkv
    equal = "equal" if comparison.tokens_equal else "DIFFERENT"
    table.add_row("new tokens", str(len(old.tokens)), str(len(new.tokens)), equal)
    for label, _, attribute, write in _MEASURES:
        before, after = getattr(old, attribute), getattr(new, attribute)
        table.add_row(label, write(before), write(after), _ratio(before, after))
    table.add_row("exact bound, as planned", "", size(comparison.bound_bytes), "")
    table.caption = _uncounted(comparison.uncounted)
    return table


def scenarios_table(scenarios: "Mapping[str, Scenario]") -> Table:
    """What can be measured."""
    table = _table("scenarios", "name", "dtype", "batch", "prompt", "turns")
    table.add_column("model")
    for name, each in scenarios.items():
        counts = (f"{count:,}" for count in (each.batch_size, each.prompt_tokens, each.turns))
        table.add_row(name, str(each.dtype).removeprefix("torch."), *counts, each.title)
    return table


def scenarios_report(scenarios: "Mapping[str, Scenario]") -> dict[str, Any]:
    """What can be measured, for JSON."""
    return {"scenarios": [{"scenario": name, **_setting(each)} for name, each in scenarios.items()]}


def _setting(scenario: "Scenario") -> dict[str, Any]:
    return {
        "model": scenario.title,
        "dtype": str(scenario.dtype).removeprefix("torch."),
        "prompt_tokens": scenario.prompt_tokens,
        "batch_size": scenario.batch_size,
        "new_tokens": scenario.new_tokens,
        "turns": scenario.turns,
    }


def benchmark_report(name: str, result: "Result") -> dict[str, Any]:
    """All that was measured of a scenario, for JSON: bytes and seconds, round by round."""
    return {
        "scenario": name,
        **_setting(result.scenario),
        "tokens_equal": result.tokens_equal,
        "ratios": {
            contender: {attribute: result.ratio(contender, attribute) for _, attribute in BENCHMARK_MEASURES}
            for contender in _opponents(result)
        },
        "rounds": {
            contender: [{key: value for key, value in asdict(sample).items() if key != "tokens"} for sample in samples]
            for contender, samples in result.samples.items()
        },
    }


def benchmark_table(results: "Mapping[str, Result]") -> Table:
    """Ratios of medians for a reader: a scenario takes two rows, one for each way to run transformers."""
    table = _table(
        "how many times less windowkv needs", "scenario", "against", *(label for label, _ in BENCHMARK_MEASURES)
    )
    table.add_column("tokens", justify="right")
    for name, result in results.items():
        for contender in _opponents(result):
            ratios = (result.ratio(contender, attribute) for _, attribute in BENCHMARK_MEASURES)
            cells = ["-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios]
            table.add_row(name, contender, *cells, "equal" if result.tokens_equal else "differ")
    table.caption = "ratios of medians, runs taking turns; in bfloat16 tokens depend on how a prompt is cut"
    return table


def benchmark_panels(reports: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """What `benchmark_report` said of scenarios, by what is measured against whom, and by scenario."""
    opponents = dict.fromkeys(contender for report in reports for contender in report["ratios"])
    return {
        f"{label}, against {contender}": {
            report["scenario"]: report["ratios"][contender][attribute] for report in reports
        }
        for label, attribute in BENCHMARK_MEASURES
        for contender in opponents
    }


def _opponents(result: "Result") -> list[str]:
    return [contender for contender in result.samples if contender != "windowkv"]


def plan_report(plan: "Plan") -> dict[str, Any]:
    """A plan for JSON, layer by layer."""
    return asdict(plan) | {"total_bytes": plan.total_bytes, "bound_bytes": plan.bound_bytes}


def plan_table(plan: "Plan", *, title: str, weights: int | None) -> Table:
    """A plan for a reader, equal layers together; with what the weights weigh, None where nobody knows."""
    table = _table(title, "layers", "tokens held", "bytes")
    for layer, count in Counter(plan.layers).items():
        table.add_row(_alike(count, layer.kind, layer.window), f"{layer.capacity:,}", size(count * layer.nbytes))
    table.add_section()
    table.add_row("all", "", size(plan.total_bytes))
    table.add_row("if no token were ever dropped", "", size(plan.baseline_bytes))
    table.add_row("ratio", "", _ratio(plan.baseline_bytes, plan.total_bytes))
    table.add_section()
    table.add_row("at most, while all of it is read in one go", "", size(plan.peak_prefill_bytes))
    table.add_row("so with transformers' DynamicCache", "", size(plan.transformers_peak_bytes))
    table.add_section()
    table.add_row("weights", "", size(weights))
    table.caption = _uncounted(plan.uncounted)
    return table


def _alike(count: int, kind: str, window: int | None) -> str:
    return f"{count} {kind}" if window is None else f"{count} {kind}, window {window:,}"


def fit_sentences(fit: Fit) -> str:
    """How many tokens fit, and how many rows of the tokens that were asked for."""
    weights = fit.counted_weight_bytes
    if weights is not None and weights >= fit.budget_bytes:
        return f"nothing fits: the weights alone take {size(weights)} of {size(fit.budget_bytes)}"
    what = "of keys and values alone" if weights is None else f"together with {size(weights)} of weights"
    room = f"{size(fit.budget_bytes)} {what}"
    rows = "" if fit.batch_size == 1 else f" in each of {fit.batch_size:,} rows"
    beyond = fit.positions is not None and (fit.max_tokens is None or fit.max_tokens > fit.positions)
    limit = f"; the model's config ends at {fit.positions:,}" if beyond else ""
    sentences = [f"{_how_many(fit.max_tokens, 'tokens', rows)} in {room}{limit}"]
    if fit.tokens is not None:
        sentences.append(f"{_how_many(fit.max_batch_size, 'rows', f' of {fit.tokens:,} tokens')} in {room}")
    elif (note := _uncounted(fit.uncounted)) is not None:  # a table of a plan has it too
        sentences.append(note)
    return "\n".join(sentences)


def _how_many(most: int | None, things: str, of_what: str) -> str:
    """A number of things that fit, None for any number.

    >>> _how_many(1200, "tokens", ""), _how_many(None, "rows", " of 5 tokens")
    ('1,200 tokens fit', 'any number of rows of 5 tokens fits')
    """
    return f"any number of {things}{of_what} fits" if most is None else f"{most:,} {things}{of_what} fit"


def known_models_table(found: "Mapping[str, tuple[KnownModel, CacheLayout]]") -> Table:
    """The models whose shapes are built in."""
    table = Table("name", "layers", box=box.SIMPLE_HEAD)
    table.add_column("positions", justify="right")
    for name, (model, layout) in found.items():
        alike = Counter((spec.kind, spec.window) for spec in layout.layers)
        layers = "; ".join(_alike(count, kind, window) for (kind, window), count in alike.items())
        table.add_row(name, layers, f"{model.config['max_position_embeddings']:,}")
    return table


def known_models_report(found: "Mapping[str, tuple[KnownModel, CacheLayout]]") -> dict[str, Any]:
    """The same for JSON, layer by layer."""
    return {
        name: {"hub": model.hub, "source": model.source, "layers": [asdict(spec) for spec in layout.layers]}
        for name, (model, layout) in found.items()
    }


def generation(network: Any, output: Any, *, prompt_tokens: int) -> Generation:
    """The numbers of a finished `generate`."""
    from transformers import Cache

    from windowkv.cache import storage_nbytes
    from windowkv.planner import plan

    new = output["sequences"].shape[1] - prompt_tokens
    cache = next((value for value in output.values() if isinstance(value, Cache)), None)
    if cache is None or all(cache.is_linear):
        return Generation(prompt_tokens, new, None if cache is None else storage_nbytes(cache), None)
    whole = plan(network.config, tokens=cache.get_seq_length(), dtype=network.dtype).baseline_bytes
    return Generation(prompt_tokens, new, storage_nbytes(cache), whole)


def generation_sentence(told: Generation) -> str:
    """What the cache of a finished `generate` holds, and what it would hold had it never dropped a token."""
    counts = f"{told.prompt_tokens:,} tokens of prompt, {told.new_tokens:,} new"
    if told.kv_bytes is None:
        return f"{counts}; this model keeps no cache"
    if told.baseline_bytes is None:
        return f"{counts}; {size(told.kv_bytes)} of states held, which do not grow"
    held, whole = size(told.kv_bytes), size(told.baseline_bytes)
    ratio = _ratio(told.baseline_bytes, told.kv_bytes)
    return f"{counts}; {held} of keys and values held, {whole} if none were dropped ({ratio})"


def cache_file_report(info: "CacheFileInfo") -> dict[str, Any]:
    """What a file holds, for JSON."""
    return asdict(info)


def cache_file_table(info: "CacheFileInfo", *, title: str) -> Table:
    """What a file holds, for a reader."""
    table = _table(title, "", "")
    table.columns[1].overflow = "fold"
    windows = f", windows {', '.join(f'{window:,}' for window in info.windows)}" if info.windows else ""
    table.add_row("tokens seen", "not counted" if info.tokens is None else f"{info.tokens:,}")
    table.add_row("layers", ", ".join(f"{count} {kind}" for kind, count in info.kinds.items()) + windows)
    table.add_row("keys and values", f"{size(info.tensor_bytes)}, {' and '.join(info.dtypes) or 'none'}")
    if info.kv_dtype is not None:
        table.add_row("quantised", f"{info.kv_dtype}, {info.quantize} layers")
    table.add_row("can take back", f"{info.rollback:,} tokens")
    table.add_row("digest of the ids", info.ids_sha256 or "ids not known")
    table.add_row("written by", f"windowkv {info.version}, format {info.format}")
    return table


def scope_report(scope: "ScopeSummary") -> dict[str, Any]:
    """What is stored for one model and namespace, for JSON."""
    return asdict(scope)


def scopes_table(scopes: "Sequence[ScopeSummary]", *, title: str) -> Table:
    """What is stored for each model and namespace, for a reader."""
    table = _table(title, "model and namespace", "texts", "longest", "blocks", "bytes", "last used")
    for each in scopes:
        counts = (f"{count:,}" for count in (each.points, each.longest, each.blocks))
        table.add_row(each.scope[:16], *counts, size(each.nbytes), _moment(each.used))
    return table


def store_report(scopes: "Sequence[ScopeSummary]") -> dict[str, Any]:
    """What all of a store's files come to, for JSON."""
    return {
        "scopes": len(scopes),
        "points": sum(each.points for each in scopes),
        "longest": max((each.longest for each in scopes), default=0),
        "blocks": sum(each.blocks for each in scopes),
        "nbytes": sum(each.nbytes for each in scopes),
        "used": max((each.used for each in scopes), default=0.0),
    }


def store_table(scopes: "Sequence[ScopeSummary]", *, title: str) -> Table:
    """What all of a store's files come to, for a reader."""
    report, table = store_report(scopes), _table(title, "", "")
    table.add_row("models and namespaces", f"{report['scopes']:,}")
    table.add_row("texts", f"{report['points']:,}, the longest of {report['longest']:,} tokens")
    table.add_row("blocks that texts share", f"{report['blocks']:,}")
    table.add_row("bytes", size(report["nbytes"]))
    table.add_row("last used", _moment(report["used"]))
    return table


def _moment(seconds: float) -> str:
    """Local time, to the minute.

    >>> _moment(0)
    'never'
    """
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M") if seconds else "never"


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(first, title=Text(title), title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    for header in others:
        table.add_column(header, justify="right")
    return table


def _uncounted(layers: Sequence[int]) -> str | None:
    return f"not planned: layers {', '.join(map(str, layers))}, which transformers keeps" if layers else None
