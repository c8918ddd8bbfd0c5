"""A store of beginnings: caches by the text that they have seen, within a number of bytes.

Knows what is kept, what is handed out, and what goes first. Knows nothing of generate.
"""

import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any

from transformers import PreTrainedModel

from windowkv import cache_file
from windowkv.cache import ROLLBACK, DynamicSlidingWindowCache, checked_rollback
from windowkv.errors import OptionError
from windowkv.history import TokenHistory
from windowkv.prefix.admission import check_cache, check_text
from windowkv.prefix.disk import DiskTier
from windowkv.prefix.files import read_point, write_point
from windowkv.prefix.fingerprint import circumstances, fingerprint, weights_version
from windowkv.prefix.parts import (
    Block,
    Checkpoint,
    assemble,
    block_nbytes,
    is_same,
    split_block,
    stack,
    take_block,
    take_checkpoint,
)
from windowkv.prefix.texts import Text, Tokens, as_ids
from windowkv.prefix.tree import Ids, Node, Tree, common_prefix, prune
from windowkv.prefix.writer import BackgroundWriter
from windowkv.quantisation import Form, Quantisation, check_unsaid

logger = logging.getLogger(__name__)

_Node = Node[Block, Checkpoint]
_Place = tuple[_Node, int]  # a checkpoint, and the token at which a text is resumed from it
_STORES: "weakref.WeakSet[PrefixStore]" = weakref.WeakSet()  # of this process


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
    as well; one token before where caches are quantised, which are stored as they are packed, apart from others.

    Args:
        max_bytes: most bytes that are ever held in memory, counted by storages.
        directory: where beginnings are kept in files besides: a path, or an fsspec URL. Several processes may share it.
            Files are written while the model goes on; `flush` waits for them.
        namespace: whose prefixes these are: stores of different namespaces never share anything under one directory.
        max_disk_bytes: most bytes of this model's and namespace's files; None for no limit.

    Raises:
        OptionError: a number of bytes is no integer >= 0, or the namespace no string.
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
        if directory is not None and not isinstance(directory, (str, os.PathLike)):
            raise OptionError(f"directory={directory!r}: a path, or an fsspec URL")
        if not isinstance(namespace, str):
            raise OptionError(f"namespace={namespace!r}: a string, which tells whose prefixes these are")
        self.max_bytes, self.directory = max_bytes, directory
        self.namespace, self.max_disk_bytes = namespace, max_disk_bytes
        self._disks: dict[str, DiskTier | None] = {}  # of this scope, by form
        self._writer = BackgroundWriter()
        self._lock = threading.RLock()
        self._model: weakref.ref[Any] | None = None
        self._version: tuple[Any, ...] | None = None
        self._fingerprint = ""
        self._scope = ("", "", "")  # fingerprint, what autocast makes of it, devices
        self._form = Quantisation().form(0)  # of what is handed out unless it is told otherwise
        self._trees: dict[tuple[tuple[str, ...], str], Tree[Block, Checkpoint]] = {}  # by scope, and by form
        self._recent: OrderedDict[_Node, Checkpoint] = OrderedDict()  # the least recently used first
        self._reach = 0  # most tokens that any checkpoint can go back
        self._stats = Stats()
        _STORES.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PrefixStore":
        """A store with the same options that holds nothing: the copy of a model is another model."""
        return type(self)(self.max_bytes, self.directory, self.namespace, self.max_disk_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        """A store with the same options that holds nothing, as in a copy."""
        return type(self), (self.max_bytes, self.directory, self.namespace, self.max_disk_bytes)

    @property
    def stats(self) -> Stats:
        """What it did so far, and what it holds."""
        self.flush()
        with self._lock:
            disk = next((each for each in self._disks.values() if each), None)  # all forms share a folder
            on_disk = sum(entry.nbytes for entry in disk.entries()) if disk else 0
            return replace(self._stats, entries=len(self._recent), disk_nbytes=on_disk)

    def bind(
        self, model: Any, *, kv_dtype: str | None = "bound", quantize: str = "full", rollback: int = ROLLBACK
    ) -> None:
        """Serve this model, all of whose weights are read.

        Args:
            model: a model of transformers.
            kv_dtype: how the caches are quantised that `lookup` hands out unless it is told otherwise, None for not at
                all; without it, as before, and not at all at first.
            quantize: in which layers, where kv_dtype says how.
            rollback: of these caches: more than 64 leave as many as computed.

        Raises:
            OptionError: it serves another model, which is still there, or there are no such options.
        """
        if not isinstance(model, PreTrainedModel):
            raise OptionError(f"a {type(model).__name__}: a store serves a model of transformers")
        form = self._named(kv_dtype, quantize, checked_rollback(rollback))
        with self._lock:
            bound = self._model and self._model()
            if bound is not None and bound is not model:
                raise OptionError(f"this store serves another {type(bound).__name__}: a store serves one model")
            before, self._model, self._version = self._model, weakref.ref(model), None
            try:
                self._served()
                self._disk_of(form, strict=before is None)
            except OptionError:
                self._model = before
                raise
            self._form = form

    def follow(self, model: Any, form: Form) -> None:
        """Serve the model that generates, which may be a copy of the one that was enabled."""
        if self._model is None or self._model() is not model:
            self.bind(model, **asdict(form.quantisation), rollback=form.residual)

    def clear(self) -> None:
        """Hold nothing in memory; files stay."""
        self.flush()
        with self._lock:
            self._trees, self._recent = {}, OrderedDict()
            self._stats = replace(self._stats, nbytes=0)

    def flush(self) -> None:
        """Return when all that was inserted is in its files."""
        self._writer.wait()

    def lookup(
        self, tokens: Tokens, *, rollback: int | None = None, kv_dtype: str | None = "bound", quantize: str = "full"
    ) -> DynamicSlidingWindowCache | None:
        """A cache that has seen the longest beginning of a text that can be resumed; None where there is none.

        At least one token is left to be run. The cache is the caller's own: it shares what the store holds until it is
        written. How far it can be cropped at first is what was stored allows; then it keeps `rollback` tokens.

        Args:
            tokens: ids, `[n]` or `[1, n]`.
            rollback: of the cache that is handed out, in tokens; without it, as the stored one's. More than 64 in a
                quantised cache leave as many as computed, so that it is found by as many alone.
            kv_dtype: how the cache is quantised, None for not at all; without it, as `enable` or `bind` said.
            quantize: in which layers, where kv_dtype says how.

        Raises:
            InputError: these are no ids.
            OptionError: the store serves no model, or there are no such options.
        """
        form = self._named(kv_dtype, quantize, self._form.residual)
        if rollback is not None:
            form = form.quantisation.form(checked_rollback(rollback))
        return self.lookup_rows([Text(as_ids(tokens))], form, rollback=rollback)

    def lookup_rows(
        self, texts: Sequence[Text], form: Form, *, rollback: int | None = None
    ) -> DynamicSlidingWindowCache | None:
        """As `lookup`, for the texts of a batch, which end together: a row for each, resumed where all can be.

        What several rows hold is put together, so that it is a copy.
        """
        with self._lock:
            model = self._served()
            read = [self._fetch(model, form, text.ids) for text in texts]
            point, found = self._best_of_all(self._tree_of(form), texts)
            alone = read[0] if len(texts) == 1 else None
            reused = sum(place[1] for place in found if place) if alone is None else alone.get_seq_length()
            self._stats = replace(
                self._stats,
                hits=self._stats.hits + bool(reused),
                misses=self._stats.misses + (not reused),
                tokens_reused=self._stats.tokens_reused + reused,
                tokens_computed=self._stats.tokens_computed + sum(len(text.ids) for text in texts) - reused,
            )
            if alone is not None or not point:
                return alone
            caches = [
                place and self._handed_out(model, text.ids, *place, rollback)
                for text, place in zip(texts, found, strict=True)
            ]
        return stack(caches, point, [text.row(point) for text in texts])

    def branch_point(self, text: Text, form: Form, after: int) -> int | None:
        """Where a text leaves those that are stored, if that is later than `after`: worth a resume point of its own."""
        with self._lock:
            _, furthest = self._tree_of(form).matches(text.ids)[0]
            agreed = text.padding + min(furthest, len(text.ids) - 1)
            return agreed if agreed > max(after, text.padding) else None

    def insert(self, tokens: Tokens, cache: DynamicSlidingWindowCache, *, row: int = 0, padding: int = 0) -> bool:
        """Keep what a cache holds, of one row, as that of the text that it has seen; tells whether it is kept.

        Nothing is kept of a cache to which a model added layers of its own. One that is quantised is kept as it is, for
        lookups of such caches alone.

        Args:
            tokens: the ids of at least what the row has seen, without padding, `[n]` or `[1, n]`.
            cache: of the model that the store serves. What is kept is a copy.
            row: which text of a batch it is.
            padding: how many padding tokens the cache has seen before that text.

        Raises:
            InputError: the cache has seen more than the ids tell, or others, has no such row, is another model's, or a
                change of it broke off.
            OptionError: the store serves no model.
        """
        ids = as_ids(tokens)
        with self._lock:
            model = self._served()
            check_cache(cache, model)
            check_text(ids, cache, row, padding)
            seen = cache.get_seq_length() - padding
            ids = ids[:seen]
            if cache.extended:
                return False
            form = cache.quantisation.form(cache.rollback)
            if seen <= 0 or self._touched(self._tree_of(form), ids):
                return bool(seen > 0)
            checkpoint = take_checkpoint(cache, row, padding)
            node = self._add(self._tree_of(form), ids, cache, checkpoint, row, padding)
            if node is None:
                self._stats = replace(self._stats, refused=self._stats.refused + 1)
            if (disk := self._disk_of(form)) is not None:
                # What the store holds never changes, so that it can be written while the cache goes on.
                kept = cache if node is None else self._handed_out(model, ids, node, len(ids), None)
                places = (row, padding) if node is None else (0, 0)
                write = partial(write_point, disk, ids, kept, checkpoint, *places)
                self._writer.submit(write)
                if node is None:
                    self._writer.wait()
            return node is not None

    def _after_fork(self) -> None:
        """Go on in a forked process, where the threads are gone that may have held the locks."""
        idle = self._lock.acquire(blocking=False)
        self._lock, self._writer = threading.RLock(), BackgroundWriter()
        if not idle:  # another thread was in the middle of something
            self._trees, self._recent = {}, OrderedDict()
            self._stats = replace(self._stats, nbytes=0)

    def _named(self, kv_dtype: str | None, quantize: str, rollback: int) -> Form:
        """The form that options name."""
        if kv_dtype != "bound":
            return Quantisation(kv_dtype, quantize).form(rollback)
        check_unsaid(quantize)
        return self._form

    def _tree_of(self, form: Form) -> Tree[Block, Checkpoint]:
        return self._trees.setdefault((self._scope, str(form)), Tree())

    def _nodes(self) -> Iterator[_Node]:
        return (node for tree in self._trees.values() for node in tree.nodes())

    def _add(
        self,
        tree: Tree[Block, Checkpoint],
        ids: Ids,
        cache: DynamicSlidingWindowCache,
        checkpoint: Checkpoint,
        row: int = 0,
        padding: int = 0,
    ) -> _Node | None:
        """The node of a text's end, with what a cache holds of it; None where that is more than may be held at all."""

        def same(node: _Node, end: int) -> bool:
            return node.block is None or is_same(node.block, cache, row, node.start + padding, end + padding)

        node, agreed = tree.match(ids, same)
        per_token = block_nbytes(take_block(cache, row, padding, padding + 1))
        if per_token * len(ids) + checkpoint.nbytes > self.max_bytes:
            return None
        if agreed != node.end:
            node = self._split(tree, node, agreed)
        # The path first, so that nothing on it is evicted; then room for what it is to hold; then that.
        path = tree.add(node, ids)
        if (replaced := path[-1].checkpoint) is not None:
            self._count(-replaced.nbytes)
        path[-1].checkpoint = self._recent[path[-1]] = checkpoint
        self._reach = max(self._reach, checkpoint.room)
        self._evict(self.max_bytes - per_token * (len(ids) - agreed) - checkpoint.nbytes, keep=path[-1])
        self._count(checkpoint.nbytes)
        for each in path:
            if each.block is None:
                each.block = take_block(cache, row, each.start + padding, each.end + padding)
                self._count(block_nbytes(each.block))
        return path[-1]

    def _fetch(self, model: Any, form: Form, ids: Ids) -> DynamicSlidingWindowCache | None:
        """Bring in what the files have of a text, when their names tell that it is more than is held.

        What is too large to be held is the answer itself.
        """
        disk, tree = self._disk_of(form), self._tree_of(form)
        if disk is None or len(ids) < 2:
            return None
        for point, reach in disk.points(ids):
            held = self._best(tree, ids, len(ids) - 1)
            if reach <= (held[1] if held else 0):
                return None
            if (read := read_point(disk, point, model.config, form.quantisation, model.device)) is None:
                continue
            text, cache = read
            self._stats = replace(self._stats, fetched=self._stats.fetched + 1)
            checkpoint = take_checkpoint(cache, 0)
            if self._add(tree, text, cache, checkpoint) is None:
                agreed = min(common_prefix(text, ids), len(ids) - 1)
                if len(text) - agreed > checkpoint.room:
                    return None
                if (back := len(text) - agreed) > 0:
                    cache = assemble(model.config, checkpoint, back, [take_block(cache, 0, 0, agreed)], agreed)
                cache.history = TokenHistory(Text(ids).row(agreed))
                return cache
        return None

    def _touched(self, tree: Tree[Block, Checkpoint], ids: Ids) -> bool:
        """Whether a text is held already; it counts as used then."""
        held = [node for node, agreed in tree.matches(ids) if agreed == len(ids) == node.end and node.checkpoint]
        for node in held:
            self._recent.move_to_end(node)
        return bool(held)

    def _best_of_all(self, tree: Tree[Block, Checkpoint], texts: Sequence[Text]) -> tuple[int, list[_Place | None]]:
        """The furthest position at which all rows of a batch can be resumed, and from where each; 0 where none is.

        A row that is padding up to there needs nothing.
        """
        point = min(text.end for text in texts) - 1
        while point > 0:
            found = [self._best(tree, text.ids, point - text.padding) for text in texts]
            reached = (
                min(point, text.padding) if place is None else text.padding + place[1]
                for text, place in zip(texts, found, strict=True)
            )
            lowest = min(reached)
            if lowest == point:
                return (point, found) if any(found) else (0, [])
            point = lowest
        return 0, []

    def _best(self, tree: Tree[Block, Checkpoint], ids: Ids, most: int) -> _Place | None:
        """The checkpoint from which most of a text can be resumed, and how much that is; `most` at most."""
        places = (self._place(node, min(agreed, most)) for node, agreed in tree.matches(ids))
        return max((place for place in places if place is not None), key=lambda place: place[1], default=None)

    def _place(self, node: _Node, limit: int) -> _Place | None:
        """As `_best`, for a text that agrees with a node up to `limit` tokens from the root."""
        if limit <= 0:
            return None
        before = next((each for each in reversed(node.path()) if each.checkpoint and each.end <= limit), None)
        if before is not None and before.end == limit:
            return before, limit
        while node.parent is not None and node.start >= limit:
            node = node.parent
        for after in node.below(limit + self._reach + 1):
            if after.checkpoint and 0 < after.end - limit <= after.checkpoint.room:
                return after, limit
        return None if before is None else (before, before.end)

    def _handed_out(
        self, model: Any, ids: Ids, node: _Node, point: int, rollback: int | None
    ) -> DynamicSlidingWindowCache:
        checkpoint = node.checkpoint
        assert checkpoint is not None
        self._recent.move_to_end(node)
        blocks = [each.block for each in node.path() if each.start < point and each.block is not None]
        cache = assemble(model.config, checkpoint, node.end - point, blocks, point, rollback)
        cache.history = TokenHistory(Text(ids).row(point))
        return cache

    def _split(self, tree: Tree[Block, Checkpoint], node: _Node, at: int) -> _Node:
        block, cut = node.block, at - node.start
        upper = tree.split(node, at)
        if block is not None:
            upper.block, node.block = split_block(block, cut)
        return upper

    def _evict(self, limit: int, *, keep: _Node) -> None:
        """Drop the least recently used checkpoints, and blocks that lead to none, until at most `limit` is held."""
        while self._stats.nbytes > limit:
            node = next((each for each in self._recent if each is not keep), None)
            if node is None:
                return
            self._writer.wait()  # what is being written stays alive until then
            self._count(-self._recent.pop(node).nbytes)
            node.checkpoint = None
            self._stats = replace(self._stats, evictions=self._stats.evictions + 1)
            for gone in prune(node):
                self._count(-block_nbytes(gone.block))
            self._trees = {at: tree for at, tree in self._trees.items() if tree.root.children}

    def _served(self) -> Any:
        """The model, whose fingerprint is brought up to date."""
        model = self._model and self._model()
        if model is None:
            raise OptionError("this store serves no model yet: store.bind(model), or enable(model, prefix_store=store)")
        version = weights_version(model)
        if version != self._version:
            self._version, self._fingerprint = version, fingerprint(model)
        devices, cast = circumstances(model)
        if (scope := (self._fingerprint, cast, devices)) != self._scope:
            self._scope, self._disks = scope, {}
        return model

    def _disk_of(self, form: Form, *, strict: bool = False) -> DiskTier | None:
        """Where files of a form are, if there are any. Those that cannot be reached are left alone, unless `strict`."""
        if str(form) not in self._disks:
            try:
                self._disks[str(form)] = self._tier(form)
            except OptionError as why:
                if strict:
                    raise
                logger.warning("the files of a store are left alone: %s", why)
                self._disks[str(form)] = None
        return self._disks[str(form)]

    def _tier(self, form: Form) -> DiskTier | None:
        weights, cast, devices = self._scope
        if self.directory is None:
            return None
        if "," in devices:
            logger.warning("a model on %s is served from memory alone: files do not tell which layer is where", devices)
            return None
        digest = sha256(f"{cache_file.FORMAT}:{weights}:{cast}:{self.namespace}".encode()).hexdigest()
        return DiskTier(self.directory, digest[:32], self.max_disk_bytes, str(form))

    def _count(self, nbytes: int) -> None:
        self._stats = replace(self._stats, nbytes=self._stats.nbytes + nbytes)


def _forked() -> None:
    for store in _STORES:
        store._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
