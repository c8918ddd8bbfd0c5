"""`windowkv bench`: time and memory against transformers."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from windowkv.cli import reports
from windowkv.cli.options import AsJson, picture_path
from windowkv.cli.pictures import drawn
from windowkv.cli.sources import WITH_MODEL, import_slowly
from windowkv.cli.terminal import Show, print_json, print_table, progress
from windowkv.errors import OptionError
from windowkv.plot.measures import ratios


def bench(
    scenario: Annotated[
        list[str] | None, typer.Option(help="One of those that --list names; all of them without.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each contender, of which the median counts.")] = 3,
    output: Annotated[Path, typer.Option(callback=picture_path, help="Where the picture goes; JSON besides.")] = Path(
        "windowkv-bench.png"
    ),
    show_list: Annotated[bool, typer.Option("--list", help="Name the scenarios, and run none.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure time and memory against transformers, in one process, runs taking turns; takes a while."""
    import_slowly("windowkv.benchmark", *WITH_MODEL)
    from windowkv.benchmark import SCENARIOS, run_scenario

    if show_list:
        if as_json:
            print_json(reports.scenarios_report(SCENARIOS))
        else:
            print_table(reports.scenarios_table(SCENARIOS))
        return
    if unknown := set(scenario or ()) - set(SCENARIOS):
        raise typer.BadParameter(f"no scenario {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")
    data = output.with_suffix(".json")
    if data.exists() and not _is_report(data):
        raise OptionError(f"{data} is no report of windowkv bench, and would be overwritten: pass another --output")
    results = {}
    with progress() as show:
        for name in scenario or SCENARIOS:
            show(f"{name}: loading", 0, 0)
            results[name] = run_scenario(SCENARIOS[name], rounds=rounds, progress=partial(_show_run, show, name))
    report = [reports.benchmark_report(name, result) for name, result in results.items()]
    data.write_text(json.dumps(report, indent=2))
    if as_json:
        print_json({"scenarios": report})
    else:
        print_table(reports.benchmark_table(results))
        picture = drawn(output, ratios, reports.benchmark_panels(report))
        typer.echo(f"picture: {picture or 'none'}, data: {data}")


def _show_run(show: Show, scenario: str, contender: str, done: int, runs: int) -> None:
    show(f"{scenario}: {contender}", done, runs)


def _is_report(path: Path) -> bool:
    try:
        return bool(reports.benchmark_panels(json.loads(path.read_text())))
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
