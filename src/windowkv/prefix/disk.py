"""Beginnings in files: a folder, or an fsspec URL, that several processes share and that outlives them.

Two kinds of files, both named by what is in them and never changed: blocks of the full layers, and points, which hold
the other layers, the ids, and the full layers' tokens after the last whole block. Knows files and their names. Knows
nothing of caches.
"""

import logging
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

import fsspec
import numpy as np
from torch import Tensor

from windowkv import cache_file
from windowkv.errors import CacheFileError, OptionError
from windowkv.prefix.tree import Ids

Content = tuple[Mapping[str, Any], dict[str, Tensor]]  # manifest, and tensors by name
logger = logging.getLogger(__name__)

_SCOPE = re.compile("[0-9a-f]{32}")
_KEY = "[0-9a-f]{40}"
# Of a point and of a block. What is named otherwise is not a store's.
_NAME = re.compile(
    rf"p-(?P<end>[0-9]+)-(?P<base>[0-9]+)-(?P<base_key>{_KEY})-(?P<end_key>{_KEY})|b-{_KEY}(-[0-9a-f]+)?"
)
_SUFFIX = ".kv"
_LOST = 30.0  # seconds for which no files are looked for when they could not be reached
_FRESH = 1.0  # seconds for which a list of files is good enough: what others add meanwhile is computed anew


@dataclass(frozen=True)
class Point:
    """A file's name, taken apart."""

    name: str
    end: int  # tokens of its text
    base: int  # tokens that a text must share at least to be resumed from it
    base_key: str  # of those tokens
    end_key: str  # of all of them


@dataclass(frozen=True)
class Entry:
    """A file in the folder."""

    name: str
    nbytes: int
    used: float  # seconds since the epoch: when it was last used, or made where that cannot be noted


@dataclass(frozen=True)
class ScopeSummary:
    """What is stored for one model and namespace."""

    scope: str
    points: int
    longest: int  # tokens
    blocks: int
    nbytes: int
    used: float  # seconds since the epoch: the latest of its files


class DiskTier:
    """The files of one model and one namespace under a directory.

    Args:
        directory: a path, or an fsspec URL such as s3://bucket/prefixes.
        scope: what separates these files from all others there: model and namespace, as a digest.
        max_bytes: most bytes of all files under the directory's scope; None for no limit.
        form: how what is in them is quantised, if it is: of another form nothing is found.
    """

    def __init__(
        self, directory: str | os.PathLike[str], scope: str, max_bytes: int | None = None, form: str = ""
    ) -> None:
        """See the class; makes the folder. Raises OptionError when that cannot be done."""
        self.scope, self.max_bytes, self.form = scope, max_bytes, form
        try:
            self._files, root = fsspec.core.url_to_fs(os.fspath(directory))
            self._folder = f"{root.rstrip('/')}/{scope}"
            self._files.makedirs(self._folder, exist_ok=True)
        except (OSError, ValueError, ImportError) as why:
            raise OptionError(f"directory={directory!r} cannot be used: {why}") from why
        self._local = "file" in np.atleast_1d(self._files.protocol)
        self._names: list[str] = []
        self._listed = self._lost_until = -inf  # in seconds of the monotonic clock

    def keys(self, ids: Ids, lengths: Sequence[int]) -> dict[int, str]:
        """A key for each of some beginnings of a text: SHA-256 over the scope, the form and the ids."""
        digest, at, keys = sha256(f"{self.scope}{self.form}".encode()), 0, {}
        for length in sorted(set(lengths)):
            digest.update(ids[at:length].astype("<i4").tobytes())
            at, keys[length] = length, digest.copy().hexdigest()[:40]
        return keys

    def entries(self) -> list[Entry]:
        """All files, in no order; none where they cannot be reached."""
        found: list[Any] = []
        with self._reaching():
            found = self._files.ls(self._folder, detail=True, refresh=True)
        ours = [info for info in found if info["name"].endswith(_SUFFIX) and _NAME.fullmatch(_name(info["name"]))]
        return [_entry(info) for info in ours]

    def points(self, ids: Ids) -> list[tuple[Point, int]]:
        """Those from which a text can be resumed, and at which token at least, the furthest first.

        Names tell that much: of a point that the text does not reach, or leaves, its base is sure.
        """
        named = [point for name in self._point_names() if (point := _point(name)) and point.base < len(ids)]
        ends = [point.end for point in named if point.end <= len(ids)]
        keys = self.keys(ids, [*(point.base for point in named), *ends])
        found = [point for point in named if keys[point.base] == point.base_key]
        reach = [min(p.end, len(ids) - 1) if keys.get(p.end) == p.end_key else p.base for p in found]
        return sorted(zip(found, reach, strict=True), key=lambda each: (-each[1], -each[0].end))

    def has_point(self, key: str) -> bool:
        """Whether there is a point at the end of the text of that key."""
        return any(name.endswith(key) for name in self._point_names())

    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""
        return bool(self._files.exists(self._path(name)))

    def read(self, *names: str, touch: bool = True) -> list[Content] | None:
        """The manifest and tensors of each file; None when one is damaged, which is gone then, or vanished.

        They count as used unless they are not to be touched.
        """
        found: list[Content] = []
        with self._reaching(), self._at_hand(names) as paths:
            for name, path in zip(names, paths, strict=True):
                try:
                    found.append(cache_file.read(path))
                except CacheFileError:
                    self.remove(name)
                    return None
                if self._local and touch:
                    with suppress(OSError):  # another process removed it just now
                        os.utime(path)
        return found if len(found) == len(names) else None

    def write(self, name: str, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> None:
        """Add a file; one of that name has the same content. Raises CacheFileError or OSError when it cannot be."""
        self._files.makedirs(self._folder, exist_ok=True)  # it may have been cleared away
        if self._local:
            cache_file.write(self._path(name), tensors, manifest)
        else:
            with tempfile.TemporaryDirectory() as folder:
                cache_file.write(Path(folder) / "file", tensors, manifest)
                self._files.put_file(str(Path(folder) / "file"), self._path(name))
        self._listed = -inf

    def remove(self, name: str) -> None:
        """Remove a file that may be gone already."""
        with self._reaching():
            self._files.rm_file(self._path(name))
        self._listed = -inf

    def prune(self, newest: Collection[str] = ()) -> int:
        """Remove the least recently used files until no more than `max_bytes` are left; tells how many.

        newest: names that were used last, since the clock of some filesystems is too coarse to tell.
        """
        if self.max_bytes is None:
            return 0
        if self._local:
            cache_file.remove_abandoned(Path(self._folder))
        entries = sorted(self.entries(), key=lambda entry: (entry.name in newest, entry.used))
        over = sum(entry.nbytes for entry in entries) - self.max_bytes
        removed = 0
        while over > 0 and removed < len(entries):
            self.remove(entries[removed].name)
            over -= entries[removed].nbytes
            removed += 1
        return removed

    @contextmanager
    def _at_hand(self, names: Sequence[str]) -> Iterator[list[Path]]:
        """Files on this machine; of another, copies that are there for a while, and are fetched together."""
        if self._local:
            yield [Path(self._path(name)) for name in names]
            return
        with tempfile.TemporaryDirectory() as folder:
            copies = [Path(folder) / str(i) for i in range(len(names))]
            self._files.get([self._path(name) for name in names], [str(copy) for copy in copies])
            yield copies

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Take files that cannot be reached for files that are not there, and look for none for a while."""
        try:
            yield
        except FileNotFoundError:
            pass
        except Exception as why:  # every filesystem has errors of its own
            self._lost_until = monotonic() + _LOST
            logger.warning("the files of a store cannot be reached: %s", why)

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}{_SUFFIX}"

    def _point_names(self) -> list[str]:
        """The names of all points, as they were a moment ago."""
        now = monotonic()
        if now < self._lost_until:
            return []
        if now - self._listed > _FRESH:
            self._names = []
            with self._reaching():
                found = self._files.glob(f"{self._folder}/p-*{_SUFFIX}", **({} if self._local else {"refresh": True}))
                self._names = [_name(path) for path in found]
            self._listed = monotonic()
        return self._names


def scopes(directory: str | os.PathLike[str]) -> list[str]:
    """The scopes that have files under a directory. Raises OptionError when there is no such directory."""
    try:
        files, root = fsspec.core.url_to_fs(os.fspath(directory))
        found = files.ls(root, detail=True)
    except (OSError, ValueError, ImportError) as why:
        raise OptionError(f"{directory} is no directory of a store: {why}") from why
    names = (info["name"].rstrip("/").rsplit("/", 1)[-1] for info in found if info["type"] == "directory")
    return sorted(filter(_SCOPE.fullmatch, names))  # other folders are nobody's business


def summaries(directory: str | os.PathLike[str]) -> list[ScopeSummary]:
    """What is stored under a directory. Raises OptionError when there is no such directory."""
    found = []
    for scope in scopes(directory):
        entries = DiskTier(directory, scope).entries()
        points = [point for entry in entries if (point := _point(entry.name))]
        longest = max((point.end for point in points), default=0)
        nbytes = sum(entry.nbytes for entry in entries)
        used = max((entry.used for entry in entries), default=0.0)
        found.append(ScopeSummary(scope, len(points), longest, len(entries) - len(points), nbytes, used))
    return found


def point_name(keys: Mapping[int, str], end: int, base: int) -> str:
    """The name of the point at the end of a text."""
    return f"p-{end}-{base}-{keys[base]}-{keys[end]}"


def block_name(keys: Mapping[int, str], end: int, mark: str = "") -> str:
    """The name of the block that ends a beginning of a text, with a mark where there are several for the same ids."""
    return f"b-{keys[end]}-{mark}" if mark else f"b-{keys[end]}"


def _point(name: str) -> Point | None:
    if (named := _NAME.fullmatch(name)) is None or named["end"] is None:
        return None
    return Point(name, int(named["end"]), int(named["base"]), named["base_key"], named["end_key"])


def _entry(info: Mapping[str, Any]) -> Entry:
    moment = info.get("mtime", info.get("LastModified", info.get("created", 0)))
    used = moment.timestamp() if hasattr(moment, "timestamp") else float(moment or 0)
    return Entry(_name(info["name"]), int(info["size"]), used)


def _name(path: str) -> str:
    return path.rsplit("/", 1)[-1].removesuffix(_SUFFIX)
