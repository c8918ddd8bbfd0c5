"""Requests at random through one store, in all forms at once, each against cold runs.

Every hit must go on as some cache does that was fed the same ids in the pieces in which one was fed that is stored: bit
for bit where that one ended there, and else but for the rounding of products of other shapes, which may be one step of
a code. No part of the test suite: `python tests/fuzz_quantised_store.py 120` runs for so many seconds.
"""

import random
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from tiny import MODELS, build, fed, tokens
from windowkv import DynamicSlidingWindowCache, PrefixStore
from windowkv.quantisation import Quantisation

NAMES = ["gemma3", "gemma3n", "mistral-full", "llama4-chunk8", "wide"]
FORMS = [Quantisation()] + [
    Quantisation(kv_dtype, how) for kv_dtype in ("int8", "int4", "fp8") for how in ("full", "all")
]
LONGEST, MIB = 700, 1 << 20
# Of logits of about 5, where a code of the past is one step off.
ROUNDING = {torch.float32: 0.1, torch.bfloat16: 1.0}
Pieces = tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """The pieces in which a text was fed."""

    pieces: Pieces = ()
    exact: bool = True  # whether none of them was cut from a longer one

    def cut(self, point: int) -> "Recipe":
        """The pieces up to a token."""
        pieces: list[int] = []
        for piece in self.pieces:
            pieces.append(min(piece, point - sum(pieces)))
        left = tuple(piece for piece in pieces if piece)
        return Recipe(left, self.exact and left == self.pieces[: len(left)])


def model_of(name: str) -> Any:
    if name == "wide":
        return build(hf.MistralForCausalLM, hf.MistralConfig, sliding_window=150)
    return MODELS[name]()


def cold(model: Any, ids: Tensor, pieces: Pieces, form: Quantisation) -> DynamicSlidingWindowCache:
    cache = DynamicSlidingWindowCache(model.config, **asdict(form))
    if pieces:
        fed(model, cache, ids[:, : sum(pieces)], *pieces)
    return cache


class Session:
    """One model, one store, perhaps a folder, and what was fed how."""

    def __init__(self, seed: int, folder: str) -> None:
        self.random, self.seen = random.Random(seed), Counter[str]()
        self.name = self.random.choice(NAMES)
        self.dtype = self.random.choice(list(ROUNDING))
        self.model = model_of(self.name).to(self.dtype)
        self.budget = self.random.choice([60_000, 300_000, 2 * MIB, 64 * MIB])
        self.folder = folder if self.random.random() < 0.6 else None
        self.disk = self.random.choice([None, 400_000])
        self.recipes: dict[tuple[Quantisation, tuple[int, ...]], set[Recipe]] = {}  # of the texts that were inserted
        self.restart()

    def restart(self) -> None:
        if hasattr(self, "store"):
            self.store.flush()
        self.store = PrefixStore(self.budget, self.folder, max_disk_bytes=self.disk)
        self.store.bind(self.model)

    def text(self) -> Tensor:
        parts = [tokens(1, self.random.choice([3, 40, 96, 130, 256, 300]), seed=self.random.randrange(3))]
        while self.random.random() < 0.5:
            parts.append(tokens(1, self.random.randint(1, 200), seed=self.random.randrange(4)))
        text = torch.cat(parts, dim=1)[:, :LONGEST]
        return text[:, : self.random.randint(2, text.shape[1])] if self.random.random() < 0.3 else text

    def request(self) -> None:
        form, ids = self.random.choice(FORMS), self.text()
        cache = self.store.lookup(ids, **asdict(form)) if self.random.random() < 0.8 else None
        recipe = Recipe()
        length = ids.shape[1]
        rest = self.pieces(length - (cache.get_seq_length() if cache else 0))
        if cache is None:
            cache = DynamicSlidingWindowCache(self.model.config, **asdict(form))
            fed(self.model, cache, ids, *rest)
        else:
            recipe = self.checked(cache, ids, form, rest)
        recipe = Recipe(recipe.pieces + rest, recipe.exact)
        if self.random.random() < 0.9:
            self.recipes.setdefault((form, tuple(ids[0].tolist())), set()).add(recipe)
            self.store.insert(ids, cache)
        assert self.store.stats.nbytes <= self.budget
        if self.random.random() < 0.03:
            self.restart()

    def pieces(self, count: int) -> Pieces:
        pieces = []
        while count and len(pieces) < 12:
            pieces.append(min(count, self.random.choice([1, 1, 7, 50, 200, count])))
            count -= pieces[-1]
        return (*pieces, count) if count else tuple(pieces)

    def checked(self, cache: Any, ids: Tensor, form: Quantisation, rest: Pieces) -> Recipe:
        """Of a hit, how what it holds was fed."""
        point, nearest = cache.get_seq_length(), float("inf")
        ours = fed(self.model, cache, ids[:, point:], *rest)
        assert cache.quantisation == form
        begins = tuple(ids[0, :point].tolist())
        known = {
            recipe.cut(point)
            for (how, text), recipes in self.recipes.items()
            for recipe in recipes
            if how == form and text[:point] == begins
        }
        for recipe in sorted(known, key=lambda each: not each.exact):
            other = cold(self.model, ids, recipe.pieces, form)
            theirs = fed(self.model, other, ids[:, point:], *rest)
            nearest = min(nearest, float((ours - theirs).abs().max()))
            if torch.equal(ours, theirs) or (
                nearest < ROUNDING[self.dtype] and (form.kv_dtype is None or not recipe.exact)
            ):
                assert cache.nbytes <= other.nbytes
                self.seen["exactly" if recipe.exact else "but for rounding"] += 1
                self.seen["code steps"] += nearest > 1e-4
                return recipe
        raise AssertionError(f"{self.name} {form} {point}/{ids.shape[1]} {rest}: no cold run is nearer than {nearest}")


def main(seconds: float, seed: int) -> None:
    torch.set_num_threads(1)
    until, seen = monotonic() + seconds, Counter[str]()
    while monotonic() < until:
        with tempfile.TemporaryDirectory() as folder:
            session = Session(seed, folder)
            for _ in range(60):
                if monotonic() > until:
                    break
                try:
                    session.request()
                except BaseException:
                    print("seed", seed)
                    raise
            session.store.flush()
            stats = session.store.stats
            seen.update({name: getattr(stats, name) for name in ("hits", "misses", "evictions", "fetched", "refused")})
            seen.update(session.seen)
        seed += 1
    print(dict(seen), "up to seed", seed)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
