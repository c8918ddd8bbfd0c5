"""A store of beginnings: caches by the text that they have seen, within a number of bytes.

Knows what is kept, what is handed out, and what goes first. Knows nothing of generate.
"""

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windowkv import cache_file
from windowkv.cache import DynamicSlidingWindowCache
from windowkv.errors import InputError, OptionError
from windowkv.history import TokenHistory
from windowkv.prefix.disk import DiskTier
from windowkv.prefix.files import read_point, write_point
from windowkv.prefix.fingerprint import fingerprint, weights_version
from windowkv.prefix.parts import (
    Block,
    Checkpoint,
    assemble,
    block_nbytes,
    split_block,
    stack,
    take_block,
    take_checkpoint,
)
from windowkv.prefix.tree import Ids, Node, Tree, prune
from windowkv.quantisation import Quantisation

_Node = Node[Block, Checkpoint]


@dataclass(frozen=True)
class Stats:
    """What a store did so far, and what it holds."""

    hits: int = 0
    misses: int = 0
    tokens_reused: int = 0
    tokens_computed: int = 0  # of the texts that were looked up
    refused: int = 0  # entries that would not fit even alone
    evictions: int = 0
    fetched: int = 0  # entries that came from files
    entries: int = 0
    nbytes: int = 0
    disk_nbytes: int = 0


class PrefixStore:
    """Caches of beginnings that prompts share, least recently used first to go.

    Full layers are kept once for all texts that begin alike, in blocks. The other layers are kept at resume points:
    where a stored text ends, and where others were seen to leave it. A point up to `rollback` tokens before one serves
    as well.

    Args:
        max_bytes: most bytes that are ever held in memory, counted by storages.
        directory: where beginnings are kept in files besides: a path, or an fsspec URL. Several processes may share it.
        namespace: whose prefixes these are: stores of different namespaces never share anything under one directory.
        max_disk_bytes: most bytes of this model's and namespace's files; None for no limit.

    Raises:
        OptionError: a number of bytes is no integer >= 0.
    """

    def __init__(
        self,
        max_bytes: int,
        directory: str | os.PathLike[str] | None = None,
        namespace: str = "",
        max_disk_bytes: int | None = None,
    ) -> None:
        """Hold nothing yet."""
        for name, value in (("max_bytes", max_bytes), ("max_disk_bytes", max_disk_bytes)):
            optional = name == "max_disk_bytes" and value is None
            if not optional and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise OptionError(f"{name}={value!r}: a number of bytes, an integer >= 0")
        self.max_bytes, self.directory = max_bytes, directory
        self.namespace, self.max_disk_bytes = namespace, max_disk_bytes
        self._disk: DiskTier | None = None
        self._lock = threading.RLock()
        self._model: weakref.ref[Any] | None = None
        self._version: tuple[Any, ...] | None = None
        self.quantisation = Quantisation()
        self._fingerprint = ""
        self._trees: dict[str, Tree[Block, Checkpoint]] = {}  # by the fingerprint of the weights that were on
        self._stats = Stats()
        self._clock = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "PrefixStore":
        """A store with the same options that holds nothing: the copy of a model is another model."""
        return type(self)(self.max_bytes, self.directory, self.namespace, self.max_disk_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        """A store with the same options that holds nothing, as in a copy."""
        return type(self), (self.max_bytes, self.directory, self.namespace, self.max_disk_bytes)

    @property
    def stats(self) -> Stats:
        """What it did so far, and what it holds."""
        with self._lock:
            on_disk = sum(entry.nbytes for entry in self._disk.entries()) if self._disk else 0
            entries = sum(node.checkpoint is not None for node in self._nodes())
            return replace(self._stats, entries=entries, disk_nbytes=on_disk)

    def bind(self, model: Any, *, kv_dtype: str | None = None, quantize: str = "full") -> None:
        """Serve this model, by caches that are quantised so, as DynamicSlidingWindowCache has it.

        What was stored with other options stays, and is found when they are back. Raises OptionError when the store
        serves another model, which is still there, or there are no such options.
        """
        quantisation = Quantisation(kv_dtype, quantize)
        with self._lock:
            bound = self._model and self._model()
            if bound is not None and bound is not model:
                raise OptionError(f"this store serves another {type(bound).__name__}: a store serves one model")
            self._model = weakref.ref(model)
            if quantisation != self.quantisation:
                self.quantisation, self._version = quantisation, None

    def clear(self) -> None:
        """Hold nothing in memory; files stay."""
        with self._lock:
            self._trees = {}
            self._stats = replace(self._stats, nbytes=0)

    def lookup(self, tokens: Sequence[int] | Tensor) -> DynamicSlidingWindowCache | None:
        """A cache that has seen the longest beginning of a text that can be resumed; None where there is none.

        At least one token is left to be run. The cache is the caller's own: it shares what the store holds until it is
        written. tokens: ids, `[n]` or `[1, n]`. Raises InputError for anything else, OptionError without a model.
        """
        return self.lookup_rows([tokens])

    def lookup_rows(self, texts: Sequence[Sequence[int] | Tensor]) -> DynamicSlidingWindowCache | None:
        """As `lookup`, for the texts of a batch: a row for each, resumed at the furthest point that serves all.

        What several rows hold is put together, so that it is a copy.
        """
        rows = [as_ids(text) for text in texts]
        with self._lock:
            model = self._served()
            for ids in rows:
                self._fetch(model, ids)
            found = self._best_of_all(rows)
            reused = sum(point for _, point in found)
            self._stats = replace(
                self._stats,
                hits=self._stats.hits + bool(found),
                misses=self._stats.misses + (not found),
                tokens_reused=self._stats.tokens_reused + reused,
                tokens_computed=self._stats.tokens_computed + sum(map(len, rows)) - reused,
            )
            caches = [self._handed_out(model, ids, *place) for ids, place in zip(rows, found, strict=False)]
        return stack(caches) if caches else None

    def branch_point(self, tokens: Sequence[int] | Tensor, after: int) -> int | None:
        """Where a text leaves those that are stored, if that is later than `after`: worth a resume point of its own."""
        ids = as_ids(tokens)
        with self._lock:
            agreed = min(self._tree.match(ids)[1], len(ids) - 1)
            return agreed if agreed > after else None

    def insert(self, tokens: Sequence[int] | Tensor, cache: DynamicSlidingWindowCache, *, row: int = 0) -> bool:
        """Keep what a cache holds, of one row, as that of the text that it has seen; tells whether it is kept.

        tokens: the ids of at least what the cache has seen. What is kept is a copy. Raises InputError for a cache that
        has seen more than the ids tell, or others; OptionError without a model.
        """
        seen = cache.get_seq_length()
        ids = as_ids(tokens)[:seen]
        _check_text(ids, cache, row)
        if cache.quantisation != self.quantisation:
            raise InputError(
                f"this cache is {cache.quantisation}, and the store keeps {self.quantisation} ones: "
                "store.bind(model, kv_dtype=..., quantize=...) says which"
            )
        with self._lock:
            self._served()
            if not seen or self._touched(ids):
                return bool(seen)
            checkpoint = take_checkpoint(cache, row)
            if self._disk is not None:
                write_point(self._disk, ids, cache, row, checkpoint)
            return self._add(ids, cache, row, checkpoint)

    @property
    def _tree(self) -> Tree[Block, Checkpoint]:
        return self._trees.setdefault(self._fingerprint, Tree())

    def _nodes(self) -> Iterator[_Node]:
        return (node for tree in self._trees.values() for node in tree.nodes())

    def _add(self, ids: Ids, cache: DynamicSlidingWindowCache, row: int, checkpoint: Checkpoint) -> bool:
        node, agreed = self._tree.match(ids)
        per_token = block_nbytes(take_block(cache, row, 0, 1))
        if per_token * len(ids) + checkpoint.nbytes > self.max_bytes:
            self._stats = replace(self._stats, refused=self._stats.refused + 1)
            return False
        if agreed != node.end:
            self._split(node, agreed)
        # The path first, so that nothing on it is evicted; then room for what it is to hold; then that.
        path = self._tree.add(ids)
        path[-1].checkpoint, checkpoint.used = checkpoint, self._tick()
        self._evict(self.max_bytes - per_token * (len(ids) - agreed) - checkpoint.nbytes, keep=path[-1])
        self._count(checkpoint.nbytes)
        for each in path:
            if each.block is None:
                each.block = take_block(cache, row, each.start, each.end)
                self._count(block_nbytes(each.block))
        return True

    def _fetch(self, model: Any, ids: Ids) -> None:
        """Bring in what the files have of a text, when that is more than is held."""
        if self._disk is None or len(ids) < 2:
            return
        held = self._best(ids, len(ids) - 1)
        for point in self._disk.points(ids):
            reach, most = min(point.end, len(ids) - 1), held[1] if held else 0
            # What is quantised is as it was when the text was computed only where it need not go back.
            nearer = self.quantisation.kv_dtype is not None and held is not None and point.end < held[0].end
            if reach < most or (reach == most and not nearer):
                return
            if (read := read_point(self._disk, point, model.config, self.quantisation)) is None:
                continue
            text, cache = read
            if self._add(text, cache, 0, take_checkpoint(cache, 0)):
                self._stats = replace(self._stats, fetched=self._stats.fetched + 1)
                held = self._best(ids, len(ids) - 1)

    def _touched(self, ids: Ids) -> bool:
        """Whether a text is held already; it counts as used then."""
        node, agreed = self._tree.match(ids)
        if agreed != len(ids) or node.end != agreed or node.checkpoint is None:
            return False
        node.checkpoint.used = self._tick()
        return True

    def _best_of_all(self, rows: list[Ids]) -> list[tuple[_Node, int]]:
        """For each text a checkpoint from which it can be resumed at one point for all; empty where there is none."""
        limit = min(map(len, rows)) - 1
        while True:
            found = [self._best(ids, limit) for ids in rows]
            places = [place for place in found if place is not None]
            if len(places) < len(rows):
                return []
            limit = min(point for _, point in places)
            if all(point == limit for _, point in places):
                return places

    def _best(self, ids: Ids, most: int) -> tuple[_Node, int] | None:
        """The checkpoint from which most of a text can be resumed, and how much that is; `most` at most."""
        node, agreed = self._tree.match(ids)
        limit = min(agreed, most)
        best: tuple[int, int, int, _Node] | None = None
        reach = limit + max((other.checkpoint.room for other in self._tree.nodes() if other.checkpoint), default=0)
        while node.parent is not None and node.start >= limit:
            node = node.parent
        for candidate in (*node.path()[:-1], *node.below(reach + 1)):
            if candidate.checkpoint is None:
                continue
            point = min(candidate.end, limit)
            if point > 0 and candidate.end - point <= candidate.checkpoint.room:
                # The nearest: what is quantised has more unpacked there, as it had when the text was computed.
                key = (point, -candidate.end, candidate.checkpoint.used, candidate)
                best = key if best is None or key[:3] > best[:3] else best
        return (best[3], best[0]) if best else None

    def _handed_out(self, model: Any, ids: Ids, node: _Node, point: int) -> DynamicSlidingWindowCache:
        checkpoint = node.checkpoint
        assert checkpoint is not None
        checkpoint.used = self._tick()
        blocks = [each.block for each in node.path() if each.start < point and each.block is not None]
        cache = assemble(model.config, checkpoint, node.end - point, blocks, point)
        cache.history = TokenHistory(torch.from_numpy(ids[:point].copy())[None])
        return cache

    def _split(self, node: _Node, at: int) -> None:
        block, cut = node.block, at - node.start
        upper = self._tree.split(node, at)
        if block is not None:
            upper.block, node.block = split_block(block, cut)

    def _evict(self, limit: int, *, keep: _Node) -> None:
        """Drop the least recently used checkpoints, and blocks that lead to none, until at most `limit` is held."""
        if self._stats.nbytes <= limit:
            return
        entries = [(node.checkpoint.used, i, node) for i, node in enumerate(self._nodes()) if node.checkpoint]
        for _, _, node in sorted(entries, key=lambda entry: entry[:2]):
            if self._stats.nbytes <= limit:
                return
            if node is keep or node.checkpoint is None:
                continue
            self._count(-node.checkpoint.nbytes)
            node.checkpoint = None
            self._stats = replace(self._stats, evictions=self._stats.evictions + 1)
            for gone in prune(node):
                self._count(-block_nbytes(gone.block))

    def _served(self) -> Any:
        """The model, whose fingerprint is brought up to date."""
        model = self._model and self._model()
        if model is None:
            raise OptionError("this store serves no model yet: store.bind(model), or enable(model, prefix_store=store)")
        version = weights_version(model)
        if version != self._version:
            self._version, self._fingerprint = version, fingerprint(model)
            if self.quantisation.kv_dtype is not None:
                self._fingerprint += f":{self.quantisation.kv_dtype}:{self.quantisation.quantize}"
            if self.directory is not None:
                scope = sha256(f"{cache_file.FORMAT}:{self._fingerprint}:{self.namespace}".encode()).hexdigest()[:32]
                self._disk = DiskTier(self.directory, scope, self.max_disk_bytes)
        return model

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _count(self, nbytes: int) -> None:
        self._stats = replace(self._stats, nbytes=self._stats.nbytes + nbytes)


def as_ids(tokens: Sequence[int] | Tensor) -> Ids:
    """Ids `[n]` of a list, or of an integer tensor `[n]` or `[1, n]`. Raises InputError for anything else."""
    try:
        tensor = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError) as why:
        raise InputError(f"tokens {tokens!r}: ids are a list of integers, or a tensor [n] or [1, n] of them") from why
    if tensor.ndim == 2 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim != 1 or (tensor.numel() and (tensor.is_floating_point() or tensor.dtype == torch.bool)):
        raise InputError(f"tokens {tensor.dtype} {list(tensor.shape)}: ids are integers, [n] or [1, n]")
    return tensor.cpu().numpy().astype(np.int32)


def _check_text(ids: Ids, cache: DynamicSlidingWindowCache, row: int) -> None:
    seen, history = cache.get_seq_length(), cache.history
    if len(ids) < seen:
        raise InputError(f"{len(ids)} ids for a cache that has seen {seen} tokens")
    if history is not None and history.rows > row:
        known = history.tokens[row : row + 1]
        if history.interrupted or TokenHistory(known).common_prefix(torch.from_numpy(ids)[None]) < len(history):
            raise InputError("this cache has seen other tokens than these ids")
