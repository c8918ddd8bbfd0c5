"""A file is the old one or the new one, whole, whatever happens; and nothing that was changed is ever read."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from windowkv import CacheFileError, cache_file

TENSORS = {"a": torch.arange(300.0).reshape(3, 100), "b": torch.arange(7, dtype=torch.int32)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some.cache"


@pytest.fixture
def written(path: Path) -> Path:
    cache_file.write(path, TENSORS, {"story": "old"})
    return path


SEALED = '{"windowkv": "{}", "checksum": "0"}'


def hostile(header: str) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode()


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_what_is_written_is_read(written: Path) -> None:
    manifest, tensors = cache_file.read(written)
    assert manifest == {"format": cache_file.FORMAT, "story": "old"}
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())
    assert names(written.parent) == [written.name]


def test_it_is_a_safetensors_file_that_anything_reads(written: Path) -> None:
    assert torch.equal(load_file(written)["a"], TENSORS["a"])


def test_no_tensors_and_views_and_every_dtype(path: Path) -> None:
    cache_file.write(path, {}, {})
    assert cache_file.read(path)[1] == {}
    states = torch.randn(2, 3, 50, 4)
    views = {"part": states[:, :, 7:20], "bf16": states.bfloat16(), "half": states.half(), "flags": states > 0}
    cache_file.write(path, views, {})
    _, tensors = cache_file.read(path)
    assert all(torch.equal(tensors[name], view) for name, view in views.items())
    assert path.stat().st_size < sum(view.numel() * view.element_size() for view in views.values()) + 2000


@pytest.mark.parametrize("name", ["x", "with blanks and ünïcode", "n" * 250, "{braces}*?[a]"])
def test_names_of_files(tmp_path: Path, name: str) -> None:
    for story in ("old", "new"):
        cache_file.write(str(tmp_path / name), TENSORS, {"story": story})
        assert cache_file.read(tmp_path / name)[0]["story"] == story
    assert names(tmp_path) == [name]


def test_a_link_stays_a_link(written: Path) -> None:
    link = written.with_name("link")
    link.symlink_to(written)
    cache_file.write(link, TENSORS, {"story": "new"})
    assert link.is_symlink()
    assert cache_file.read(written)[0]["story"] == "new"


def test_what_is_no_file_is_never_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    places = [tmp_path / "pipe", tmp_path / "loop", tmp_path, f"{tmp_path}/new/", "a\0b"]
    for place in places:
        with pytest.raises(CacheFileError, match="cannot be written"):
            cache_file.write(place, TENSORS, {})
    assert names(tmp_path) == ["loop", "pipe"]
    assert not (tmp_path / "pipe").is_file()
    with pytest.raises(CacheFileError):
        cache_file.read("a\0b")


def test_a_file_keeps_its_mode_and_a_new_one_has_what_the_umask_leaves(tmp_path: Path, written: Path) -> None:
    written.chmod(0o600)
    cache_file.write(written, TENSORS, {})
    assert written.stat().st_mode & 0o777 == 0o600
    before = os.umask(0o027)
    try:
        cache_file.write(tmp_path / "new", TENSORS, {})
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640


def test_what_is_being_read_survives_being_replaced(written: Path) -> None:
    _, tensors = cache_file.read(written)
    cache_file.write(written, {"a": TENSORS["a"] * 0 - 1}, {})
    assert torch.equal(tensors["a"], TENSORS["a"])


def test_a_thousand_flipped_bits_and_cut_files_are_refused(written: Path) -> None:
    whole, randomly = written.read_bytes(), random.Random(0)
    # Every bit of the header counts as much as all of the tensors.
    header = 8 + int.from_bytes(whole[:8], "little")
    for case in range(1000):
        if case % 4 == 3:
            damaged = whole[: randomly.randrange(len(whole))]
        else:
            at = randomly.randrange(header if case % 2 else len(whole))
            damaged = whole[:at] + bytes([whole[at] ^ 1 << randomly.randrange(8)]) + whole[at + 1 :]
        written.write_bytes(damaged)
        with pytest.raises(CacheFileError):
            cache_file.read(written)
    written.write_bytes(whole + b"\0")
    with pytest.raises(CacheFileError, match="damaged"):
        cache_file.read(written)
    written.write_bytes(whole)
    assert cache_file.read(written)[0]["story"] == "old"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "empty"),
        (b"not a cache", "no cache of windowkv"),
        (b"\x80\x04\x95", "no cache of windowkv"),
        ((1 << 63).to_bytes(8, "little") + b"{}", "no cache of windowkv"),
        ((2).to_bytes(8, "little") + b"[]", "no cache of windowkv"),
        ((90_000).to_bytes(8, "little") + b"[" * 90_000, "no cache of windowkv"),
        (hostile('{"a": {"data_offsets": [0, "x"]}, "__metadata__": {}}'), "no cache of windowkv"),
        (hostile(f'{{"a": {{"data_offsets": []}}, "__metadata__": {SEALED}}}'), "no cache of windowkv"),
        (hostile(f'{{"a": {{"data_offsets": [0, 1e999]}}, "__metadata__": {SEALED}}}'), "no cache of windowkv"),
        (hostile(f'{{"a": 5, "__metadata__": {SEALED}}}'), "no cache of windowkv"),
    ],
)
def test_other_files_are_refused(path: Path, content: bytes, named: str) -> None:
    path.write_bytes(content)
    with pytest.raises(CacheFileError, match=named):
        cache_file.read(path)


def test_a_pickle_is_never_opened(path: Path) -> None:
    torch.save({"a": torch.zeros(3)}, path)
    with pytest.raises(CacheFileError, match="no cache of windowkv"):
        cache_file.read(path)


def test_safetensors_of_others_are_refused(path: Path) -> None:
    save_file(TENSORS, path)
    with pytest.raises(CacheFileError, match="no cache of windowkv"):
        cache_file.read(path)


@pytest.mark.parametrize(
    ("version", "named"), [(2, "a newer windowkv reads it"), (0, "made again"), ("one", "made again")]
)
def test_another_format_is_refused(path: Path, version: object, named: str) -> None:
    cache_file.write(path, TENSORS, {"format": version})
    with pytest.raises(CacheFileError, match=named):
        cache_file.read(path)


def test_a_missing_version_is_refused(path: Path) -> None:
    metadata = {"windowkv": json.dumps({"story": "old"}), "checksum": "0" * 32}
    save_file(TENSORS, path, metadata=metadata)
    with pytest.raises(CacheFileError, match="no cache of windowkv"):
        cache_file.read(path)


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(CacheFileError, match="nowhere"):
        cache_file.read(tmp_path / "nowhere")
    with pytest.raises(CacheFileError, match="cannot be read"):
        cache_file.read(tmp_path)
    with pytest.raises(CacheFileError, match="nowhere"):
        cache_file.write(tmp_path / "nowhere" / "file", TENSORS, {})
    with pytest.raises(CacheFileError, match="cannot be written"):
        cache_file.write(tmp_path, TENSORS, {})
    assert names(tmp_path) == []


def script(body: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script with a tensor-writing function at hand, in a process of its own."""
    head = """
import os, random, resource, signal, sys, time
import torch
torch.set_num_threads(1)
from windowkv import CacheFileError, cache_file

def tensors(number):
    return {"a": torch.full((64, 1024), float(number)), "b": torch.full((3,), number)}

def number(path):
    manifest, held = cache_file.read(path)
    found = {manifest["number"], *held["a"].flatten().tolist(), *held["b"].tolist()}
    assert len(found) == 1, found
    return found.pop()
"""
    command = [sys.executable, "-c", head + body, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_a_writer_killed_at_any_moment_leaves_one_whole_file(path: Path) -> None:
    done = script(
        """
path, randomly, last = sys.argv[1], random.Random(0), 0
cache_file.write(path, tensors(0), {"number": 0})
cut = 0
for kill in range(200):
    child = os.fork()
    if not child:
        for following in range(last + 1, last + 1000):
            cache_file.write(path, tensors(following), {"number": following})
        os._exit(1)
    time.sleep(randomly.random() * 0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    cut += len(os.listdir(os.path.dirname(path))) > 1
    now = number(path)
    assert now >= last, (now, last)
    last = now
    cache_file.write(path, tensors(last), {"number": last})
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]
print(cut, last)
""",
        path,
    )
    assert done.returncode == 0, done.stderr
    cut, last = map(int, done.stdout.split())
    assert cut > 10, "the kills came at moments that mattered"
    assert last > 10


def test_a_full_disk_leaves_the_old_file(path: Path) -> None:
    done = script(
        """
path = sys.argv[1]
cache_file.write(path, tensors(1), {"number": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    cache_file.write(path, tensors(2), {"number": 2})
except CacheFileError as error:
    print(error)
assert number(path) == 1
assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]
""",
        path,
    )
    assert done.returncode == 0, done.stderr
    assert "cannot be written, and is as it was" in done.stdout
    assert str(path) in done.stdout


def test_of_two_writers_at_once_one_wins_whole(path: Path) -> None:
    done = script(
        """
path, children = sys.argv[1], []
for writer in (1, 2, 3):
    children.append(os.fork())
    if not children[-1]:
        for _ in range(60):
            cache_file.write(path, tensors(writer), {"number": writer})
        os._exit(0)
seen = set()
while children:
    done, status = os.waitpid(-1, os.WNOHANG)
    if done:
        assert status == 0
        children.remove(done)
    if os.path.exists(path):
        seen.add(number(path))
assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]
print(sorted(seen))
""",
        path,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 2


def test_a_file_that_is_replaced_while_it_is_read_is_one_of_the_two(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified = cache_file.verified

    def replaced_meanwhile(*args: object, **kwargs: object) -> object:
        header = verified(*args, **kwargs)  # type: ignore[arg-type]
        if not replaced:
            replaced.append(True)
            cache_file.write(written, {"a": TENSORS["a"] + 1}, {"story": "new"})
        return header

    replaced: list[bool] = []
    monkeypatch.setattr(cache_file, "verified", replaced_meanwhile)
    manifest, tensors = cache_file.read(written)
    assert torch.equal(tensors["a"], TENSORS["a"] + (manifest["story"] == "new"))
