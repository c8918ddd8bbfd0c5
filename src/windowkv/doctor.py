"""Which cache does what with a model: every operation with every cache, against the same without any cache.

Knows which caches there are and whose fault a difference is. Changes no model for good, and prints nothing.
"""

import copy
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, StaticCache

from windowkv.cache import DynamicSlidingWindowCache
from windowkv.continuation import cache_name
from windowkv.errors import WindowKVError
from windowkv.integration import disable, enable
from windowkv.operations import OPERATIONS, MissingOperationError, Operation
from windowkv.persist import load
from windowkv.static_cache import SlidingWindowCache
from windowkv.tiny_sizes import WINDOW

Progress = Callable[[str, int, int], None]  # operation, how many are done, how many there are

_DRAFT = WINDOW  # what is drafted beyond the last token that is asked for needs room too, at most
_TRANSFORMERS = Path(transformers.__file__).parent


class Outcome(StrEnum):
    """What came of one operation with one cache."""

    SAME = "same"  # tokens as without any cache
    REFUSED = "refused"  # an error that was raised on purpose
    THEIRS = "transformers"  # goes wrong with transformers' own cache in the same way
    ABSENT = "absent"  # the cache has no such operation
    FAILURE = "failure"


@dataclass(frozen=True)
class Cell:
    """What came of one operation with one cache, and why."""

    outcome: Outcome
    detail: str = ""

    def __str__(self) -> str:
        """In words.

        >>> print(Cell(Outcome.REFUSED, "too far"), Cell(Outcome.SAME), sep="; ")
        refused, because too far; same
        """
        words = {
            Outcome.SAME: "same",
            Outcome.REFUSED: "refused, because",
            Outcome.THEIRS: "transformers' own fault:",
            Outcome.ABSENT: "does not apply:",
            Outcome.FAILURE: "failure:",
        }
        return f"{words[self.outcome]} {self.detail}".strip()


def _dynamic(model: Any, tokens: int) -> Any:
    return DynamicCache(config=model.config)


@dataclass(frozen=True)
class CacheKind:
    """One kind of cache. A new one is one more entry in `CACHES`."""

    name: str
    new: Callable[[Any, int], Any]  # a model and a number of tokens -> an empty cache with room for them
    ours: bool = True
    options: Mapping[str, Any] | None = None  # of `enable`, for a cache that generate makes by itself
    agrees: Callable[[Tensor, Tensor], bool] = torch.equal  # with the tokens without a cache; for one that rounds, less
    theirs: Sequence[Callable[[Any, int], Any]] = (_dynamic,)  # caches of transformers with the faults that it may have


CACHES: Sequence[CacheKind] = (
    CacheKind("DynamicCache", _dynamic, ours=False),
    CacheKind("StaticCache", lambda model, tokens: StaticCache(config=model.config, max_cache_len=tokens), ours=False),
    CacheKind("enable", lambda model, tokens: DynamicSlidingWindowCache(model.config), options={}),
    CacheKind("DynamicSlidingWindowCache", lambda model, tokens: DynamicSlidingWindowCache(model.config)),
    CacheKind(
        "SlidingWindowCache",
        lambda model, tokens: SlidingWindowCache(model.config, tokens + _DRAFT),
        theirs=(_dynamic, lambda model, tokens: StaticCache(config=model.config, max_cache_len=tokens + _DRAFT)),
    ),
    # Nothing rounds here: no text is long enough to be packed.
    CacheKind("int8", lambda model, tokens: DynamicSlidingWindowCache(model.config, kv_dtype="int8")),
)


@dataclass(frozen=True)
class Examination:
    """All cells of one model."""

    model_class: str
    cells: Mapping[str, Mapping[str, Cell]]  # operation -> cache -> cell
    ours: frozenset[str]  # the caches that are windowkv's

    def all(self) -> Iterator[tuple[str, str, Cell]]:
        """`(operation, cache, cell)` of each."""
        for operation, row in self.cells.items():
            for cache, cell in row.items():
                yield operation, cache, cell

    @property
    def failures(self) -> list[tuple[str, str, Cell]]:
        """Where one of windowkv's caches fails: what fails with transformers' own is not for windowkv to mend."""
        return [each for each in self.all() if each[1] in self.ours and each[2].outcome is Outcome.FAILURE]


def examine(
    model: Any,
    *,
    caches: Sequence[CacheKind] = CACHES,
    operations: Mapping[str, Operation] = OPERATIONS,
    progress: Progress | None = None,
) -> Examination:
    """Try every operation with every cache on a model, which is as before afterwards, and not enabled.

    `progress` is told of every operation.
    """
    cells = {}
    for done, (name, operation) in enumerate(operations.items()):
        if progress is not None:
            progress(name, done, len(operations))
        reference = _attempt(operation, _Uncached(model))
        cells[name] = {kind.name: _cell(operation, model, kind, reference) for kind in caches}
    return Examination(type(model).__name__, cells, frozenset(kind.name for kind in caches if kind.ours))


class _Uncached:
    """The reference: the whole sequence computed anew for every token."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def new_cache(self, tokens: int) -> None:
        """No cache."""

    def generate(self, ids: Tensor, new_tokens: int, cache: Any = None, **options: Any) -> Tensor:
        """Continue greedily."""
        options = {key: value for key, value in options.items() if key != "prompt_lookup_num_tokens"}
        return _generated(self.model, ids, new_tokens, use_cache=False, **options)

    def ask(self, cache: None, operation: str, *args: Any) -> None:
        """Nothing to change."""

    def load(self, path: Path) -> None:
        """No cache."""


class _Cached:
    """The same with a cache of one kind."""

    def __init__(self, model: Any, kind: CacheKind) -> None:
        self.model, self.kind = model, kind

    def new_cache(self, tokens: int) -> Any:
        """An empty one."""
        return self.kind.new(self.model, tokens)

    def generate(self, ids: Tensor, new_tokens: int, cache: Any = None, **options: Any) -> Tensor:
        """Continue greedily, into the cache that is given, else into a new one."""
        if cache is None and self.kind.options is None:
            cache = self.new_cache(ids.shape[1] + new_tokens)
        handed = {} if cache is None else {cache_name(self.model): cache}
        return _generated(self.model, ids, new_tokens, **handed, **options)

    def ask(self, cache: Any, operation: str, *args: Any) -> Any:
        """Call a method of a cache."""
        if not hasattr(cache, operation):
            raise MissingOperationError(f"a {type(cache).__name__} has no {operation}")
        return getattr(cache, operation)(*args)

    def load(self, path: Path) -> Any:
        """What was saved there."""
        return load(path, self.model.config)


class _Theirs(_Cached):
    """What transformers makes of an operation: its own cache, copied where an operation needs more than that has."""

    def __init__(self, model: Any, kind: CacheKind, new: Callable[[Any, int], Any]) -> None:
        super().__init__(model, kind)
        self.new, self.saved = new, None

    def new_cache(self, tokens: int) -> Any:
        """An empty one."""
        return self.new(self.model, tokens)

    def ask(self, cache: Any, operation: str, *args: Any) -> Any:
        """Call a method of a cache, or do the same by a copy."""
        if operation == "save":
            self.saved = copy.deepcopy(cache)
            return None
        return copy.deepcopy(cache) if operation == "fork" else super().ask(cache, operation, *args)

    def load(self, path: Path) -> Any:
        """What was saved."""
        return self.saved


def _generated(model: Any, ids: Tensor, new_tokens: int, **options: Any) -> Tensor:
    asked = {"attention_mask": torch.ones_like(ids), "do_sample": False, "disable_compile": True}
    out = model.generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, **asked | options)
    return torch.as_tensor(out)[:, ids.shape[1] :]


_Attempt = Tensor | Exception


def _attempt(operation: Operation, subject: Any) -> _Attempt:
    try:
        return operation(subject)
    except Exception as error:  # whatever goes wrong is the result
        return error


def _attempted(operation: Operation, model: Any, kind: CacheKind) -> _Attempt:
    try:
        with _enabled(model, kind):
            return _attempt(operation, _Cached(model, kind))
    except WindowKVError as refusal:
        return refusal


@contextmanager
def _enabled(model: Any, kind: CacheKind) -> Iterator[None]:
    if kind.options is None:
        yield
        return
    enable(model, **kind.options)
    try:
        yield
    finally:
        disable(model)


def _cell(operation: Operation, model: Any, kind: CacheKind, reference: _Attempt) -> Cell:
    result = _attempted(operation, model, kind)
    if isinstance(result, MissingOperationError):
        return Cell(Outcome.ABSENT, str(result))
    if isinstance(result, WindowKVError):
        return Cell(Outcome.REFUSED, _first_line(result))
    if isinstance(result, Tensor) and isinstance(reference, Tensor) and kind.agrees(result, reference):
        return Cell(Outcome.SAME)
    theirs = kind.ours and any(_alike(result, _attempt(operation, _Theirs(model, kind, new))) for new in kind.theirs)
    if isinstance(result, Exception):
        if _is_refusal(result) and (theirs or not kind.ours):
            return Cell(Outcome.REFUSED, _first_line(result))
        told = f"{type(result).__name__}: {_first_line(result)}"
    elif isinstance(reference, Exception):
        told = f"without a cache transformers raises {type(reference).__name__}: {_first_line(reference)}"
    else:
        told = _difference(result, reference)
    if theirs:
        return Cell(Outcome.THEIRS, f"{told}; so with its own cache")
    return Cell(Outcome.FAILURE, told)


def _alike(result: _Attempt, baseline: _Attempt) -> bool:
    if isinstance(result, Exception) and isinstance(baseline, Exception):
        return type(result) is type(baseline) and _where(result)[:2] == _where(baseline)[:2]
    return isinstance(result, Tensor) and isinstance(baseline, Tensor) and torch.equal(result, baseline)


def _difference(result: Tensor, reference: Tensor) -> str:
    if result.shape != reference.shape:
        return f"{list(result.shape)} tokens, {list(reference.shape)} without a cache"
    row, place = (int(index) for index in (result != reference).nonzero()[0])
    return f"token {place} of row {row} is {int(result[row, place])}, {int(reference[row, place])} without a cache"


def _is_refusal(error: Exception) -> bool:
    """Whether transformers raised it itself, rather than ran into it."""
    file, _, code = _where(error)
    return Path(file).is_relative_to(_TRANSFORMERS) and code.startswith("raise")


def _where(error: Exception) -> tuple[str, int, str]:
    """File, line and code where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return frame.filename, frame.lineno or 0, frame.line or ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
