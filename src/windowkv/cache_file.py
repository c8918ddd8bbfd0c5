"""One file of tensors and a manifest: written whole or not at all, and read only when every byte is as it was written.

The format is safetensors. Its metadata carry the manifest as JSON, and a checksum over all bytes of the file, in which
the checksum itself counts as zeros. Knows files. Knows nothing of caches.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from xxhash import xxh3_64_hexdigest, xxh3_128

from windowkv.errors import CacheFileError

try:
    import fcntl
except ImportError:  # Windows: what a crash leaves behind stays there
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
_MANIFEST, _CHECKSUM = "windowkv", "checksum"
_ZEROS = b"0" * 32
_LENGTH = 8  # bytes that say how long safetensors' header is
_TEMPORARY = ".windowkv-tmp"
_ATTEMPTS = 10


@dataclass(frozen=True)
class Header:
    """What a file says of itself, before any tensor is read."""

    manifest: Mapping[str, Any]
    tensor_bytes: int
    checksum: str
    checksum_offset: int  # in bytes, from the start of the file


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> None:
    """Put a file at that path, in the place of one that may be there.

    A temporary file beside it is filled, synced and renamed, so that a crash at any instant leaves the old file or the
    new one. What earlier crashes left behind is removed. Raises CacheFileError when it cannot be done.
    """
    target = _target(path)
    metadata = {_MANIFEST: json.dumps({"format": FORMAT, **manifest}), _CHECKSUM: _ZEROS.decode()}
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        remove_abandoned(target.parent, _temporary_prefix(target))
        with _temporary(target) as temporary:
            save_file(contiguous, temporary, metadata=metadata)
            # The mode that the old file has, or what the umask leaves of a new one.
            model = target if target.exists() else temporary.parent
            temporary.chmod(model.stat().st_mode & 0o666)
            _seal(temporary)
            os.replace(temporary, target)
        _sync_folder(target.parent)
    except (OSError, SafetensorError) as why:
        raise CacheFileError(f"{target} cannot be written, and is as it was: {_reason(why)}") from why


def read(path: str | os.PathLike[str]) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    """The manifest and the tensors, which stay in the file until they are touched.

    Raises CacheFileError when the file is missing, is no such file, is of a newer format, or is damaged.
    """
    target = _given(path)
    for _ in range(_ATTEMPTS):
        try:
            with target.open("rb") as opened:
                at = _again(opened.fileno(), target)
                before = _identity(at)
                header = verified(target, at=at)
                with safe_open(at, framework="pt", device="cpu") as file:
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                if before == _identity(at):  # else another writer came between, and these may be of two files
                    return header.manifest, tensors
        except CacheFileError:
            raise
        except (OSError, ValueError, RuntimeError, SafetensorError) as why:  # torch's, where a file has just vanished
            raise CacheFileError(f"{str(target)!r} cannot be read: {_reason(why)}") from why
    raise CacheFileError(f"{target} is replaced faster than it can be read")


def read_header(path: str | os.PathLike[str]) -> Header:
    """What a file says of itself; nothing else of it is read, or verified. Raises CacheFileError as `read`."""
    with _mapped(_given(path)) as data:
        return _header(Path(path), data)


def verified(path: str | os.PathLike[str], *, at: Path | None = None) -> Header:
    """The header of a file of which every byte was found as it was written. Raises CacheFileError as `read`.

    at: where to open it, if not at its path.
    """
    with _mapped(_given(path), at) as data:
        header = _header(Path(path), data)
        if _checksum(data, header.checksum_offset) != header.checksum:
            raise CacheFileError(f"{path} is damaged: its bytes are not those that were written")
        return header


def _target(path: str | os.PathLike[str]) -> Path:
    """Where a file goes, links followed. Raises CacheFileError for a place that is taken by something else."""
    try:
        target = Path(os.path.realpath(_given(path)))
        taken = target.is_symlink() or (target.exists() and not target.is_file()) or str(path).endswith(os.sep)
    except (OSError, ValueError) as why:
        raise CacheFileError(f"{os.fspath(path)!r} cannot be written: {_reason(why)}") from why
    if taken:
        raise CacheFileError(f"{path} cannot be written: it is no file")
    return target


def _given(path: Any) -> Path:
    """A path, if it is one. Raises CacheFileError otherwise."""
    if not isinstance(path, (str, os.PathLike)):
        raise CacheFileError(f"{path!r} is no path: a string or a pathlib.Path")
    return Path(path)


def _reason(why: Exception) -> str:
    return getattr(why, "strerror", None) or str(why)


def _header(path: Path, data: mmap) -> Header:
    length = int.from_bytes(data[:_LENGTH], "little")
    head = data[_LENGTH : _LENGTH + length] if length <= len(data) - _LENGTH else b""
    try:
        entries = json.loads(head)
        metadata = entries.pop("__metadata__")
        manifest, checksum = json.loads(metadata[_MANIFEST]), metadata[_CHECKSUM]
        tensor_bytes = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        offset = head.index(f'"{_CHECKSUM}":"{checksum}"'.encode()) + len(_CHECKSUM) + len('"":"')
        version = manifest["format"]
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as why:
        raise CacheFileError(f"{path} is no cache of windowkv, or its header is damaged") from why
    if version != FORMAT:
        newer = isinstance(version, int) and version > FORMAT
        cure = "a newer windowkv reads it" if newer else "it has to be made again"
        raise CacheFileError(f"{path} is of format {version!r}, and this windowkv reads format {FORMAT}: {cure}")
    expected = _LENGTH + length + tensor_bytes
    if len(data) != expected:
        raise CacheFileError(f"{path} is damaged: it has {len(data):,} bytes, of {expected:,} that were written")
    return Header(manifest, tensor_bytes, checksum, _LENGTH + offset)


def _checksum(data: mmap, offset: int) -> str:
    with memoryview(data) as view:
        digest = xxh3_128(view[:offset])
        digest.update(_ZEROS)
        digest.update(view[offset + len(_ZEROS) :])
    return digest.hexdigest()


@contextmanager
def _mapped(path: Path, at: Path | None = None) -> Iterator[mmap]:
    try:
        with (at or path).open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            yield data
    except CacheFileError:
        raise
    except OSError as why:
        raise CacheFileError(f"{path} cannot be read: {_reason(why)}") from why
    except ValueError as why:  # of mmap, for no bytes, or of open, for a name that cannot be one
        raise CacheFileError(f"{str(path)!r} is no cache of windowkv: {why}") from why


def _again(descriptor: int, path: Path) -> Path:
    """A path that opens the very file which is open already, whatever is put in its place; on Linux only."""
    link = Path(f"/proc/self/fd/{descriptor}")
    return link if link.exists() else path


def _seal(path: Path) -> None:
    """Put in the checksum, and see everything to the disk."""
    with path.open("r+b") as file:
        with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            length = int.from_bytes(data[:_LENGTH], "little")
            place = f'"{_CHECKSUM}":"{_ZEROS.decode()}"'.encode()
            offset = data.find(place, 0, _LENGTH + length) + len(place) - len(_ZEROS) - 1
            checksum = _checksum(data, offset)
        file.seek(offset)
        file.write(checksum.encode())
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """A path for a file in a folder of its own beside the target, which is locked meanwhile, and removed in any case.

    A folder, because what writes the file may have temporary files of its own.
    """
    folder, descriptor = _locked_folder(target)
    try:
        yield folder / "file"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


def _locked_folder(target: Path) -> tuple[Path, int | None]:
    while True:
        folder = target.with_name(f"{_temporary_prefix(target)}{secrets.token_hex(8)}{_TEMPORARY}")
        folder.mkdir()
        try:
            descriptor = _locked(folder)
        except FileNotFoundError:
            continue  # another writer took it for abandoned before it was locked
        except OSError:
            return folder, None
        if descriptor is not None and folder.exists():
            return folder, descriptor
        if descriptor is not None:
            os.close(descriptor)


def _temporary_prefix(target: Path) -> str:
    return f".{xxh3_64_hexdigest(os.fsencode(target.name))}."


def remove_abandoned(folder: Path, prefix: str = "") -> None:
    """Remove what killed writers left in a folder: temporary folders that begin so and that no living writer holds."""
    for left in folder.glob(f"{prefix}*{_TEMPORARY}"):
        with suppress(OSError):
            descriptor = _locked(left)
            if descriptor is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(descriptor)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the lock of a folder; None where another has it. Raises OSError without locks."""
    if fcntl is None:
        raise OSError("no locks")
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as why:
        os.close(descriptor)
        if isinstance(why, BlockingIOError):
            return None
        raise
    return descriptor


def _identity(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
