"""How what `doctor` found is worded: tables, JSON, and a page of documentation.

Knows how cells are put together for a reader. Knows nothing of how they came about.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from windowkv.doctor import Cell, Examination

    Examined = Mapping[str, Examination | str]  # by model; a sentence where there was nothing to examine

_UNREMARKABLE = ("same", "absent")
_NAMED = 5  # operations in one row; more are counted
_WORDS = {"absent": "-", "transformers": "transformers' fault"}
_STYLES = {"same": "green", "failure": "bold red", "absent": "dim"}
# What differs from run to run, and from model to model for one and the same reason.
_VARYING = (
    (re.compile(r"token \d+ of row \d+ is \d+, \d+ without a cache"), "other tokens than without a cache"),
    (re.compile(r"/\S+/cache: "), ""),
    (re.compile(r"such as \w+"), "such as this one"),
    (re.compile(r"a \w+ of transformers keeps"), "a layer of transformers' own keeps"),
    (re.compile(r" of type <class '[^']+'>"), " of this type"),
    (re.compile(r"\(\d+\)"), "(n)"),
    (re.compile(r"index -?\d+ is out of bounds for dimension (\d) with size \d+"), r"out of bounds for dimension \1"),
)


def failures(examined: "Examined") -> int:
    """How many cells of windowkv's caches are failures."""
    return sum(len(each.failures) for _, each in _whole(examined))


def report(examined: "Examined") -> dict[str, Any]:
    """All cells for JSON."""
    return {
        "transformers": version("transformers"),
        "failures": failures(examined),
        "models": {
            name: {"not_examined": each}
            if isinstance(each, str)
            else {
                "class": each.model_class,
                "cells": {
                    operation: {cache: asdict(cell) for cache, cell in row.items()}
                    for operation, row in each.cells.items()
                },
            }
            for name, each in examined.items()
        },
    }


def model_table(examination: "Examination", *, title: str) -> Table:
    """All cells of one model: operations down, caches across, reasons below."""
    caches, notes = list(next(iter(examination.cells.values()))), dict[str, int]()
    table = _table(f"{title}: a tiny {examination.model_class}", "", *caches)
    for operation, row in examination.cells.items():
        table.add_row(operation, *(_short(row[cache], notes) for cache in caches))
    table.caption = Text("\n".join(f"({number}) {note}" for note, number in notes.items()))
    return table


def _short(cell: "Cell", notes: dict[str, int]) -> Text:
    """The outcome, with the number of its reason, which is noted."""
    number = f" ({notes.setdefault(str(cell), len(notes) + 1)})" if cell.detail else ""
    return Text(f"{_WORDS.get(cell.outcome, cell.outcome)}{number}", _STYLES.get(cell.outcome, "yellow"))


def architectures_table(examined: "Examined") -> Table:
    """How many operations of each architecture came to what, for each cache."""
    caches = _caches(examined)
    table = _table(f"architectures of transformers {version('transformers')} that can have a window", "", *caches)
    for name, each in examined.items():
        if isinstance(each, str):
            table.add_row(name, Text(f"not examined: {each}", "dim"))
            continue
        table.add_row(name, *(_counts(row[cache] for row in each.cells.values()) for cache in caches))
    return table


_PAGE = """# Compatibility

Written by `windowkv doctor --all --markdown` with transformers {version}: every architecture whose config can name
a window, as a tiny model with random weights and a window of 8. Each does all of this with each cache, and its greedy
tokens are compared with those of a forward without any cache. Where a whole model could not be built (a library is
missing, say), its text part was examined: the class tells.

{operations}

`SlidingWindowCache` is static, with room for all tokens and a draft. `int8` is a `DynamicSlidingWindowCache` with
`kv_dtype="int8"`: none of these texts is long enough for tokens to be packed, so nothing may differ; the tests bound
what packing does to the logits of a longer one.

"same" means that all of them agree, as far as the cache has such an operation; else those are named that do not, with
the number of the reason. `windowkv doctor MODEL` shows the same for one model, cell by cell.

{table}

## Reasons

{reasons}"""


def page(examined: "Examined") -> str:
    """The same as a page: an architecture in a row, and a numbered reason for whatever is not the same."""
    caches, notes = _caches(examined), dict[str, int]()
    whole = dict(_whole(examined))
    rows = [
        [f"`{name}`", f"`{each.model_class}`", *(_summary(each, cache, notes) for cache in caches)]
        for name, each in whole.items()
    ]
    rows = [
        ["architecture", "class", *caches],
        ["---"] * (len(caches) + 2),
        *rows,
        ["all", "", *_totals(whole, caches)],
    ]
    text = _PAGE.format(
        version=version("transformers"),
        operations="\n".join(f"- {operation}" for operation in next(iter(whole.values())).cells),
        table="\n".join(f"| {' | '.join(row)} |" for row in rows),
        reasons="\n".join(f"{number}. {note}" for note, number in notes.items()),
    )
    left_out = [f"- `{name}`: {each}" for name, each in examined.items() if isinstance(each, str)]
    return "\n".join([text, "", "## Not examined", "", *left_out]) if left_out else text


def _totals(whole: "Mapping[str, Examination]", caches: Sequence[str]) -> Iterator[str]:
    """How many cells of each cache came to what."""
    for cache in caches:
        yield _counts(row[cache] for each in whole.values() for row in each.cells.values())


def _counts(cells: "Iterable[Cell]") -> str:
    return ", ".join(f"{count:,} {outcome}" for outcome, count in Counter(str(c.outcome) for c in cells).items())


def _summary(examination: "Examination", cache: str, notes: dict[str, int]) -> str:
    """The operations that did not come out the same, each with the number of its reason, which is noted."""
    odd = [
        (operation, notes.setdefault(_reason(row[cache]), len(notes) + 1))
        for operation, row in examination.cells.items()
        if row[cache].outcome.value not in _UNREMARKABLE
    ]
    numbers = ", ".join(str(number) for number in dict.fromkeys(number for _, number in odd))
    if len(odd) > _NAMED:
        return f"{len(odd)} operations are not ({numbers})"
    return f"all but {', '.join(f'{operation} ({number})' for operation, number in odd)}" if odd else "same"


def _reason(cell: "Cell") -> str:
    words = str(cell)
    for varying, constant in _VARYING:
        words = varying.sub(constant, words)
    return words


def _whole(examined: "Examined") -> "Iterator[tuple[str, Examination]]":
    return ((name, each) for name, each in examined.items() if not isinstance(each, str))


def _caches(examined: "Examined") -> list[str]:
    return next((list(row) for _, each in _whole(examined) for row in each.cells.values()), [])


def _table(title: str, first: str, *others: str) -> Table:
    name = Column(first, no_wrap=True)  # the headers of caches may be cut first
    table = Table(name, title=Text(title), title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    for header in others:
        table.add_column(header, overflow="fold")
    return table
