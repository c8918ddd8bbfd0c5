"""What users do with a cache, each as one function that gives the same tokens whatever the cache, or without one.

Knows operations, as a user would write them. Knows nothing of which caches there are, or of what went wrong.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from torch import Tensor

from windowkv.tiny_sizes import WINDOW

_IDS = (3, 100)  # first and last of those that texts are made of: no special ones, and every tiny vocabulary has them


class Subject(Protocol):
    """A model with one kind of cache, or without any: caches are then None, and what is done to them does nothing."""

    def new_cache(self, tokens: int) -> Any:
        """An empty cache with room for this many tokens."""

    def generate(self, ids: Tensor, new_tokens: int, cache: Any = None, **options: Any) -> Tensor:
        """Greedy continuation `[rows, new_tokens]` of ids `[rows, n]`, into this cache or into one of its own."""

    def ask(self, cache: Any, operation: str, *args: Any) -> Any:
        """Call a method of a cache; raises MissingOperationError where it has none."""

    def load(self, path: Path) -> Any:
        """What `save` wrote there."""


Operation = Callable[[Subject], Tensor]


class MissingOperationError(Exception):
    """A cache that does not have what an operation needs."""


def text(rows: int, length: int, seed: int = 0) -> Tensor:
    """Random ids `[rows, length]`, the same for the same arguments."""
    return torch.randint(*_IDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def _instantiate(subject: Subject) -> Tensor:
    subject.new_cache(8 * WINDOW)
    return torch.empty(1, 0, dtype=torch.long)


def _short(subject: Subject) -> Tensor:
    return subject.generate(text(1, 3), WINDOW // 2)


def _at_the_window(subject: Subject) -> Tensor:
    return torch.cat([subject.generate(text(1, WINDOW + more), 3) for more in (-1, 0, 1)], dim=1)


def _past_the_window(subject: Subject) -> Tensor:
    return subject.generate(text(1, 3 * WINDOW + 1), WINDOW + 2)


def _padded_batch(subject: Subject) -> Tensor:
    ids, lengths = text(3, 3 * WINDOW), torch.tensor([3 * WINDOW, 5, WINDOW + 2])
    mask = (torch.arange(ids.shape[1]) >= ids.shape[1] - lengths[:, None]).long()
    return subject.generate(ids * mask, WINDOW - 1, attention_mask=mask)


def _two_turns(subject: Subject) -> Tensor:
    cache, ids = subject.new_cache(8 * WINDOW), text(1, WINDOW + 3)
    first = subject.generate(ids, WINDOW - 1, cache)
    return torch.cat((first, subject.generate(torch.cat((ids, first, text(1, 5, 1)), dim=1), 6, cache)), dim=1)


def _beams(subject: Subject) -> Tensor:
    return subject.generate(text(2, WINDOW + 4), 6, num_beams=3)


def _crop(subject: Subject) -> Tensor:
    cache, ids = subject.new_cache(8 * WINDOW), text(1, 2 * WINDOW + 4)
    first = subject.generate(ids, 4, cache)
    subject.ask(cache, "crop", -5)
    kept = ids[:, : ids.shape[1] - 2]  # of the 4 new tokens the cache has seen 3
    return torch.cat((first, subject.generate(torch.cat((kept, text(1, 3, 1)), dim=1), 6, cache)), dim=1)


def _assisted(subject: Subject) -> Tensor:
    ids = text(1, 2 * WINDOW)
    return subject.generate(torch.cat((ids, ids[:, :WINDOW]), dim=1), WINDOW + 2, prompt_lookup_num_tokens=3)


def _fork(subject: Subject) -> Tensor:
    cache, ids = subject.new_cache(8 * WINDOW), text(1, 2 * WINDOW + 4)
    first = subject.generate(ids, 3, cache)
    ways = [torch.cat((ids, first, text(1, 3, seed)), dim=1) for seed in (1, 2)]
    caches = (cache, subject.ask(cache, "fork"))
    return torch.cat([first, *(subject.generate(way, 4, each) for way, each in zip(ways, caches, strict=True))], dim=1)


def _save_and_load(subject: Subject) -> Tensor:
    cache, ids = subject.new_cache(8 * WINDOW), text(1, 2 * WINDOW + 4)
    first = subject.generate(ids, 3, cache)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "cache"
        subject.ask(cache, "save", path)
        loaded = subject.load(path)
        second = subject.generate(torch.cat((ids, first, text(1, 3, 1)), dim=1), 4, loaded)
        del loaded  # it maps the file
    return torch.cat((first, second), dim=1)


def _reset_and_reuse(subject: Subject) -> Tensor:
    cache = subject.new_cache(8 * WINDOW)
    first = subject.generate(text(1, 2 * WINDOW + 4), 3, cache)
    subject.ask(cache, "reset")
    return torch.cat((first, subject.generate(text(1, WINDOW + 3, 1), 6, cache)), dim=1)


OPERATIONS: Mapping[str, Operation] = {
    "instantiate": _instantiate,
    "generate short": _short,
    "generate at the window": _at_the_window,
    "generate past the window": _past_the_window,
    "padded batch": _padded_batch,
    "two turns": _two_turns,
    "beams": _beams,
    "crop": _crop,
    "assisted": _assisted,
    "fork": _fork,
    "save and load": _save_and_load,
    "reset and reuse": _reset_and_reuse,
}
