"""Beginnings in files: shared by processes, useful after a restart, and never a wrong token when they are damaged."""

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import numpy as np
import pytest
import torch
from moto.server import ThreadedMotoServer
from torch import Tensor

import windowkv
from test_prefix_store import FORMS, cold, held_bytes, packing, same_bits
from tiny import ARCHITECTURES, MODELS, STATEFUL, fed, generated, shared_model, tokens, uncached
from windowkv import DynamicSlidingWindowCache, OptionError, PrefixStore, cache_file
from windowkv.prefix.disk import DiskTier, scopes
from windowkv.quantisation import Quantisation

MIB = 1 << 20


_STORES: list[PrefixStore] = []


def store_of(directory: Any, namespace: str = "", **options: Any) -> PrefixStore:
    while _STORES:
        _STORES.pop().flush()  # as a process does that ends
    _STORES.append(PrefixStore(64 * MIB, directory, namespace, **options))
    return _STORES[-1]


def filled(model: Any, ids: Tensor, **options: Any) -> DynamicSlidingWindowCache:
    cache = DynamicSlidingWindowCache(model.config, **options)
    fed(model, cache, ids, ids.shape[1])
    return cache


def restarted(name: str, directory: Any, namespace: str = "", **options: Any) -> tuple[Any, PrefixStore]:
    """A model and a store as a new process has them: equal weights, nothing in memory."""
    store = store_of(directory, namespace, **options)
    model = windowkv.enable((MODELS | STATEFUL)[name](), prefix_store=store)
    return model, store


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*.kv"))


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """A bucket on a server that speaks S3."""
    server = ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    fsspec.config.conf["s3"] = {"key": "any", "secret": "any", "endpoint_url": f"http://{host}:{port}"}
    fsspec.filesystem("s3").mkdir("bucket")
    yield "s3://bucket"
    fsspec.config.conf.pop("s3")
    server.stop()


@pytest.fixture(params=["folder", "memory", "s3"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "folder":
        return tmp_path / "store"
    root = request.getfixturevalue("s3") if request.param == "s3" else "memory:/"
    return f"{root}/{uuid4().hex}/store"


@pytest.mark.parametrize("length", [3, 255, 256, 257, 600])
@pytest.mark.parametrize("name", [*ARCHITECTURES, *STATEFUL])
def test_a_beginning_is_found_after_a_restart(name: str, length: int, tmp_path: Path) -> None:
    model, store = restarted(name, tmp_path)
    ids, more = tokens(1, length), tokens(1, 10, seed=1)
    store.insert(ids, filled(model, ids))
    model, store = restarted(name, tmp_path)
    cache = store.lookup(torch.cat((ids, more), dim=1))
    assert cache is not None
    assert (cache.get_seq_length(), store.stats.fetched) == (length, 1)
    torch.testing.assert_close(fed(model, cache, more), fed(model, filled(model, ids), more), atol=1e-4, rtol=0)


def test_generate_reuses_what_another_process_left(directory: Any) -> None:
    system = tokens(1, 300)
    for request in range(4):
        model, store = restarted("gemma3", directory)
        text = torch.cat((system, tokens(1, 20, seed=request)), dim=1)
        assert torch.equal(generated(model, text, 6), uncached(shared_model("gemma3"), text, 6))
        assert store.stats.tokens_reused == (300 if request else 0)
        assert store.stats.disk_nbytes > 0


@pytest.mark.parametrize("kind", ["p-", "b-"])
@pytest.mark.parametrize("damage", ["cut", "vanish"])
def test_files_of_an_object_store_are_bounded_and_may_be_damaged(s3: str, kind: str, damage: str) -> None:
    directory = f"{s3}/{uuid4().hex}"
    model, store = restarted("gemma3", directory)
    ids, bucket = tokens(1, 600), fsspec.filesystem("s3")
    store.insert(ids, filled(model, ids))
    one = store.stats.disk_nbytes
    assert one == sum(bucket.du(path) for path in bucket.find(directory, refresh=True))
    victim = next(path for path in bucket.find(directory, refresh=True) if path.rsplit("/", 1)[1].startswith(kind))
    if damage == "cut":
        bucket.pipe_file(victim, bucket.cat_file(victim)[:-1])
    else:
        bucket.rm_file(victim)
    _, store = restarted("gemma3", directory)
    assert store.lookup(torch.cat((ids, ids), dim=1)) is None
    assert not [path for path in bucket.find(directory, refresh=True) if "/p-" in path]
    model, store = restarted("gemma3", directory, max_disk_bytes=one + one // 2)
    for seed in range(3):
        other = tokens(1, 600, seed=seed)
        store.insert(other, filled(model, other))
        assert store.stats.disk_nbytes <= one + one // 2
    _, store = restarted("gemma3", directory)
    assert store.lookup(torch.cat((other, other), dim=1)) is not None


def test_a_branch_within_rollback_is_found_after_a_restart(tmp_path: Path) -> None:
    model, store = restarted("mistral", tmp_path)
    ids = tokens(1, 300)
    store.insert(ids, filled(model, ids))
    model, store = restarted("mistral", tmp_path)
    text = torch.cat((ids[:, :250], tokens(1, 9, seed=4)), dim=1)
    cache = store.lookup(text)
    assert cache is not None
    assert cache.get_seq_length() == 250
    assert store.lookup(torch.cat((ids[:, :200], tokens(1, 9, seed=4)), dim=1)) is None


def test_full_layers_are_in_files_once_for_all_texts_that_begin_alike(tmp_path: Path) -> None:
    model, store = restarted("mistral-full", tmp_path)
    system = tokens(1, 1024)
    for seed in range(3):
        text = torch.cat((system, tokens(1, 20, seed=seed)), dim=1)
        store.insert(text, filled(model, text))
    store.flush()
    assert len([path for path in files(tmp_path) if path.name.startswith("b-")]) == 4


@pytest.mark.parametrize("other", ["namespace", "model", "weights"])
def test_nothing_is_ever_shared_across(other: str, tmp_path: Path) -> None:
    model, store = restarted("mistral", tmp_path)
    ids = tokens(1, 300)
    store.insert(ids, filled(model, ids))
    changed, store = restarted("mistral" if other != "model" else "phi3", tmp_path, "b" if other == "namespace" else "")
    if other == "weights":
        with torch.no_grad():
            changed.model.norm.weight.mul_(1.1)
    assert store.lookup(torch.cat((ids, ids), dim=1)) is None
    assert len(scopes(tmp_path)) == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "vanish", "foreign"])
@pytest.mark.parametrize("kind", ["p-", "b-"])
def test_a_damaged_file_is_a_miss_and_goes(kind: str, damage: str, tmp_path: Path) -> None:
    model, store = restarted("gemma3", tmp_path)
    ids = tokens(1, 600)
    store.insert(ids, filled(model, ids))
    store.flush()
    victim = next(path for path in files(tmp_path) if path.name.startswith(kind))
    content = victim.read_bytes()
    if damage == "vanish":
        victim.unlink()
    else:
        spoilt = {
            "flip": content[:-9] + b"\x55" + content[-8:],
            "cut": content[:-1],
            "empty": b"",
            "foreign": b"x" * 99,
        }
        victim.write_bytes(spoilt[damage])
    model, store = restarted("gemma3", tmp_path)
    text = torch.cat((ids, tokens(1, 5, seed=1)), dim=1)
    assert store.lookup(text) is None
    assert not [path for path in files(tmp_path) if path.name.startswith("p-")]
    assert torch.equal(generated(model, text, 5), uncached(shared_model("gemma3"), text, 5))
    _, store = restarted("gemma3", tmp_path)
    assert store.lookup(torch.cat((text, text), dim=1)) is not None


def test_files_stay_within_their_bytes_and_the_least_recently_used_go(tmp_path: Path) -> None:
    model, store = restarted("mistral", tmp_path)
    texts = [tokens(1, 100, seed=seed) for seed in range(4)]
    caches = [filled(model, text) for text in texts]
    store.insert(texts[0], caches[0])
    one = store.stats.disk_nbytes
    model, store = restarted("mistral", tmp_path, max_disk_bytes=2 * one + one // 2)
    for i, (text, cache) in enumerate(zip(texts, caches, strict=True)):
        store.insert(text, cache)
        for path in files(tmp_path):
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 10))  # time passes
        assert store.stats.disk_nbytes <= 2 * one + one // 2
        if i:
            _, reader = restarted("mistral", tmp_path)
            assert reader.lookup(torch.cat((texts[0], text), dim=1)) is not None
    _, reader = restarted("mistral", tmp_path)
    assert [reader.lookup(torch.cat((text, text), dim=1)) is not None for text in texts] == [True, False, False, True]


def test_a_folder_that_is_lost_harms_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, store = restarted("gemma3", tmp_path)
    (scope,) = scopes(tmp_path)
    (tmp_path / scope).rmdir()
    (tmp_path / scope).write_text("in the way")
    ids = tokens(1, 300)
    for _ in range(2):
        assert torch.equal(generated(model, ids, 5), uncached(shared_model("gemma3"), ids, 5))
    assert store.stats.hits == 1
    assert "was not written to its file" in caplog.text
    with pytest.raises(OptionError, match="File exists"):
        restarted("gemma3", tmp_path)


def test_a_lookup_reads_no_file_that_cannot_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, store = restarted("gemma3", tmp_path)
    system, opened, read = tokens(1, 100), [], cache_file.read
    monkeypatch.setattr(cache_file, "read", lambda path: opened.append(path) or read(path))
    for request in range(12):
        text = torch.cat((system, tokens(1, 20, seed=10 + request)), dim=1)
        assert torch.equal(generated(model, text, 3), uncached(shared_model("gemma3"), text, 3))
    assert opened == []
    assert store.stats.nbytes == held_bytes(store)
    _, other = restarted("gemma3", tmp_path)
    for request in range(3):
        assert other.lookup(torch.cat((system, tokens(1, 20, seed=50 + request)), dim=1)) is not None
    assert len({path for path in opened if "p-" in str(path)}) == 1
    assert other.stats.nbytes == held_bytes(other)


def test_what_is_too_large_for_memory_is_handed_out_from_its_files(tmp_path: Path) -> None:
    model, store = restarted("gemma3", tmp_path)
    ids, more = tokens(1, 300), tokens(1, 9, seed=1)
    store.insert(ids, filled(model, ids))
    store.flush()
    small = PrefixStore(1000, tmp_path)
    small.bind(model)
    cache = small.lookup(torch.cat((ids, more), dim=1))
    assert cache is not None
    torch.testing.assert_close(fed(model, cache, more), fed(model, filled(model, ids), more), atol=1e-4, rtol=0)
    shorter = small.lookup(ids[:, :290])
    assert shorter is not None
    assert shorter.get_seq_length() == 289
    assert (small.stats.hits, small.stats.refused, small.stats.nbytes) == (2, 0, 0)


def test_one_text_with_more_room_replaces_one_with_less_byte_for_byte(tmp_path: Path) -> None:
    model, store = restarted("mistral", tmp_path)
    ids = tokens(1, 40)
    store.insert(ids, filled(model, ids, rollback=20))
    store.flush()
    store.clear()
    store.insert(ids, filled(model, ids, rollback=2))
    assert store.lookup(torch.cat((ids[:, :25], tokens(1, 9, seed=4)), dim=1)) is not None
    assert store.stats.nbytes == held_bytes(store)


def test_files_that_cannot_be_reached_are_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, store = restarted("gemma3", tmp_path)
    ids, calls = tokens(1, 40), []

    def broken(*args: Any, **options: Any) -> Any:
        calls.append(args)
        raise ConnectionError("no route")

    for name in ("ls", "glob", "exists", "makedirs"):
        monkeypatch.setattr(store._disk_of(store._form)._files, name, broken)
    for _ in range(3):
        assert torch.equal(generated(model, ids, 5), uncached(shared_model("gemma3"), ids, 5))
    assert (store.stats.hits, store.stats.disk_nbytes) == (2, 0)


def test_a_folder_that_was_cleared_away_is_made_again(tmp_path: Path) -> None:
    model, store = restarted("gemma3", tmp_path)
    (scope,) = scopes(tmp_path)
    (tmp_path / scope).rmdir()
    ids = tokens(1, 40)
    store.insert(ids, filled(model, ids))
    store.flush()
    assert len(files(tmp_path)) == 1


def test_what_killed_writers_leave_goes(tmp_path: Path) -> None:
    model, store = restarted("gemma3", tmp_path, max_disk_bytes=1 << 20)
    (scope,) = scopes(tmp_path)
    left = tmp_path / scope / ".0123456789abcdef.0123.windowkv-tmp"
    left.mkdir()
    (left / "file").write_bytes(b"x" * 1000)
    ids = tokens(1, 40)
    store.insert(ids, filled(model, ids))
    store.flush()
    assert not left.exists()


def test_files_of_others_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    model, store = restarted("gemma3", tmp_path)
    (scope,) = scopes(tmp_path)
    names = ["p-²-1-a-b.kv", "p-1-1.kv", "p-x-1-a-b.kv", "notes.txt", "b-.kv"]
    for name in names:
        (tmp_path / scope / name).touch()
    ids = tokens(1, 40)
    for _ in range(2):
        assert torch.equal(generated(model, ids, 5), uncached(shared_model("gemma3"), ids, 5))
    assert store.stats.hits == 1
    assert all((tmp_path / scope / name).exists() for name in names)


def test_files_are_written_while_the_model_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, store = restarted("gemma3", tmp_path)
    ids, go_on = tokens(1, 300), threading.Event()
    write = cache_file.write
    monkeypatch.setattr(cache_file, "write", lambda *args: go_on.wait(60) and write(*args))
    store.insert(ids, filled(model, ids))
    cache = store.lookup(torch.cat((ids, ids), dim=1))
    assert cache is not None
    assert files(tmp_path) == []
    go_on.set()
    store.flush()
    assert len(files(tmp_path)) == 2


def test_keys_are_chains_over_scope_and_ids(tmp_path: Path) -> None:
    ids = np.arange(10, dtype=np.int32)
    one, other = DiskTier(tmp_path, "one"), DiskTier(tmp_path, "other")
    assert one.keys(ids, [3, 7])[3] == one.keys(ids[:5], [3])[3]
    assert one.keys(ids, [3, 7])[7] == one.keys(ids, [7])[7]
    assert one.keys(ids, [3])[3] != one.keys(ids + 1, [3])[3]
    assert one.keys(ids, [3])[3] != other.keys(ids, [3])[3]


@pytest.mark.parametrize("bad", ["nosuch://place", "/proc/nowhere/at/all"])
def test_a_directory_that_cannot_be_used_is_named(bad: str) -> None:
    store, model = store_of(bad), MODELS["mistral"]()
    assert store.stats.disk_nbytes == 0
    with pytest.raises(OptionError, match="cannot be used"):
        windowkv.enable(model, prefix_store=store)
    assert "_prefill" not in vars(model)
    with pytest.raises(OptionError, match="serves no model"):
        store.lookup([1, 2, 3])
    with pytest.raises(OptionError, match="max_disk_bytes"):
        PrefixStore(1, max_disk_bytes=-1)


# --- quantised caches


@pytest.mark.parametrize("length", [3, 96, 256, 700])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_quantised_beginning_is_found_after_a_restart_bit_for_bit(
    form: Quantisation, length: int, tmp_path: Path
) -> None:
    model, store = packing("wide", form, directory=tmp_path)
    ids, more = tokens(1, length), tokens(1, 40, seed=1)
    cache = cold(model, form, ids, length)
    store.insert(ids, cache)
    store.flush()
    stores = [PrefixStore(max_bytes, tmp_path) for max_bytes in (64 * MIB, 1000)]
    for other in stores:  # what is too large for memory is handed out from its files
        other.bind(model, **asdict(form))
        before = other.lookup(ids)
        assert before is not None
        assert before.get_seq_length() == length - 1
        found = other.lookup(torch.cat((ids, more), dim=1))
        assert found is not None
        assert found.get_seq_length() == length
        assert same_bits(found, cache)
        assert torch.equal(fed(model, found, more, 20), fed(model, cache.fork(), more, 20))
        assert other.stats.nbytes == held_bytes(other)
    assert (stores[0].stats.fetched, stores[1].stats.nbytes) == (1, 0)


def test_what_other_processes_fed_in_other_pieces_is_never_mixed(tmp_path: Path) -> None:
    form, system = FORMS[3], tokens(1, 600)
    recipes = {pieces: torch.cat((system, tokens(1, 30, seed=sum(pieces))), dim=1) for pieces in [(630,), (300, 320)]}
    for pieces, text in recipes.items():
        model, store = packing("wide", form, directory=tmp_path)
        store.insert(text, cold(model, form, text, *pieces))
        store.flush()
    for pieces, text in recipes.items():
        model, store = packing("wide", form, directory=tmp_path)
        found = store.lookup(torch.cat((text, text), dim=1))
        assert found is not None
        assert same_bits(found, cold(model, form, text, *pieces))
    blocks = [path.name for path in files(tmp_path) if path.name.startswith("b-")]
    assert (len(blocks), len({name.split("-")[1] for name in blocks})) == (3, 2), (
        "no token of the first 256 saw a packed one"
    )


def test_files_of_all_forms_stay_within_their_bytes_together(tmp_path: Path) -> None:
    texts = [tokens(1, 300, seed=seed) for seed in range(2)]
    for text in texts:
        for form in FORMS:
            model, store = packing("wide", form, directory=tmp_path, max_disk_bytes=300_000)
            store.insert(text, cold(model, form, text, 300))
            assert 0 < store.stats.disk_nbytes <= 300_000
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 300_000
    assert store.lookup(torch.cat((text, text), dim=1)) is not None


WORKER = """
import os, random, sys, time
import torch
torch.set_num_threads(1)
import windowkv
from tiny import MODELS, tokens, logits, cache_argument
folder, seed = sys.argv[1], int(sys.argv[2])
randomly = random.Random(seed)
store = windowkv.PrefixStore(1 << 18, folder, max_disk_bytes=1 << 20)
model = MODELS["gemma3"]()
store.bind(model)
print("ready", flush=True)
for operation in range(100):
    more = tokens(1, randomly.randrange(1, 20), seed=randomly.randrange(9))
    text = torch.cat((tokens(1, 60, seed=randomly.randrange(5)), more), 1)
    with torch.no_grad():
        cache = store.lookup(text) or windowkv.DynamicSlidingWindowCache(model.config)
        out = model(text[:, cache.get_seq_length():], use_cache=True, **cache_argument(model, cache)).logits
    if operation % 5 == 0:
        torch.testing.assert_close(out[:, -1], logits(model, text)[:, -1], atol=1e-4, rtol=0)
    store.insert(text, cache)
print("done", store.stats.hits)
"""


def test_eight_processes_share_a_folder_and_some_are_killed(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    workers = [
        subprocess.Popen(
            [*command, str(seed)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for seed in range(8)
    ]
    randomly = random.Random(0)
    for worker in workers[:3]:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        try:
            worker.wait(timeout=randomly.random() / 2)
        except subprocess.TimeoutExpired:
            worker.kill()
        worker.communicate()
    for worker in workers[3:]:
        out, err = worker.communicate(timeout=200)
        assert "done" in out, err
        assert worker.returncode == 0, err
    (scope,) = scopes(tmp_path)
    tier = DiskTier(tmp_path, scope, 1 << 20)
    tier.prune()
    assert sum(entry.nbytes for entry in tier.entries()) <= 1 << 20
    assert all(tier.read(entry.name) is not None for entry in tier.entries())
