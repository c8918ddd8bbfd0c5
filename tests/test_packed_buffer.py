"""The quantised storage, driven by random operations against its definition: tokens packed one by one, or not yet."""

from typing import Any

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from windowkv.buffers import Recording
from windowkv.codecs import CODECS
from windowkv.errors import InputError, RollbackError
from windowkv.packed_buffer import PackedBuffer
from windowkv.quantisation import FORMATS, PackedRetention
from windowkv.rows import RowSelection
from windowkv.window import Retention, tail_length

HEADS, DIMS = 2, (4, 6)
STEP = 4


def states(rows: list[list[int]], dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """`[B, H, T, dim]` in which every number stands for a token of its own."""
    base = torch.tensor(rows, dtype=torch.double).reshape(len(rows), 1, -1, 1)
    phase = base * 1.7 + torch.arange(HEADS).reshape(1, -1, 1, 1) + torch.arange(dim) * 0.9
    return (torch.sin(phase) * (1 + base % 7)).to(dtype)


def packed(state: Tensor, name: str) -> Tensor:
    """What is left of tokens, packed one by one."""
    out, codec = torch.empty_like(state), CODECS[name][DIMS.index(state.shape[-1])]
    for token, place in zip(state.split(1, dim=2), out.split(1, dim=2), strict=True):
        codec.unpack(codec.pack(token), place)
    return out


class PackedBufferMachine(RuleBasedStateMachine):
    """Every row is a list of the numbers of its tokens, of which the first `until` are packed."""

    @initialize(
        window=st.one_of(st.none(), st.integers(1, 40)),
        rollback=st.integers(0, 6),
        more=st.integers(0, 6),
        batch=st.integers(1, 3),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        name=st.sampled_from(list(CODECS)),
    )
    def start(self, window: int | None, rollback: int, more: int, batch: int, dtype: torch.dtype, name: str) -> None:
        self.retention = PackedRetention(Retention(window, rollback), residual=rollback + more, step=STEP)
        self.buffer = PackedBuffer(self.retention, CODECS[name])
        self.window, self.rollback, self.dtype, self.name = window, rollback, dtype, name
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self.until, self.furthest, self.counter, self.single = 0, 0, 0, batch == 1

    def expected(self, first: int, past: int, dim: int) -> Tensor:
        """Positions from `first` on, of which the first `past` positions are there already."""
        whole = [row[first:] for row in self.rows]
        exact = states(whole, dim, self.dtype)
        old = max(0, min(self.until, past) - first)
        return torch.cat((packed(exact[:, :, :old], self.name), exact[:, :, old:]), dim=2)

    def feed(self, new: int, mode: Any, reach: int = 0) -> None:
        fresh = [list(range(self.counter + 1000 * i, self.counter + 1000 * i + new)) for i in range(len(self.rows))]
        self.counter += new
        seen = len(self.rows[0])
        self.rows = [row + more for row, more in zip(self.rows, fresh, strict=True)]
        with mode():
            shown = self.buffer.append(*(states(fresh, dim, self.dtype) for dim in DIMS))
            for state, dim in zip(shown, DIMS, strict=True):
                assert torch.equal(state, self.expected(seen - tail_length(seen, self.window), seen, dim))
        oldest = seen + new - self.retention.residual - max(0, reach - self.rollback)
        self.until = max(self.until, oldest // STEP * STEP)
        self.furthest = max(self.furthest, seen + new)

    @rule(
        new=st.one_of(st.integers(0, 4), st.integers(0, 120)),
        mode=st.sampled_from([torch.no_grad, torch.inference_mode, torch.enable_grad]),
    )
    def append(self, new: int, mode: Any) -> None:
        self.feed(new, mode)

    @rule(new=st.integers(1, 100), data=st.data())
    def draft_and_take_back(self, new: int, data: st.DataObject) -> None:
        self.buffer.recording = Recording(on=True)
        self.feed(new, torch.no_grad, reach=max(new, 3))
        count = data.draw(st.integers(0, new))
        self.buffer.take_back(count)
        self.buffer.recording = Recording()
        self.rows = [row[: len(row) - count] for row in self.rows]
        self.until = max(self.until, (len(self.rows[0]) - self.retention.residual) // STEP * STEP)

    @rule(count=st.integers(0, 60))
    def take_back(self, count: int) -> None:
        seen = len(self.rows[0])
        try:
            self.buffer.take_back(count)
        except RollbackError:
            assert count > seen or seen - count < self.furthest - self.rollback
            return
        assert count <= seen
        self.rows = [row[: seen - count] for row in self.rows]
        self.until = min(self.until, seen - count)

    @precondition(lambda self: self.buffer.rows)
    @rule(data=st.data(), writable=st.booleans())
    def take_rows(self, data: st.DataObject, writable: bool) -> None:
        width = data.draw(st.sampled_from([len(self.rows), 1, 4]))
        rows = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=width, max_size=width))
        with torch.set_grad_enabled(not writable):  # with gradients nothing is written in place
            self.buffer.take_rows(RowSelection(torch.tensor(rows)))
        self.rows = [list(self.rows[row]) for row in rows]

    @precondition(lambda self: len(self.rows) == 1 and self.buffer.rows)
    @rule(batch=st.integers(2, 4))
    def feed_a_batch_to_one_row(self, batch: int) -> None:
        self.rows = [list(self.rows[0]) for _ in range(batch)]
        self.feed(2, torch.no_grad)

    @rule()
    def go_on_with_a_fork(self) -> None:
        other = self.buffer.fork()
        with torch.no_grad():  # what the other side writes is not seen here
            if other.rows:
                other.take_rows(RowSelection(torch.arange(len(self.rows)).flip(0)))
            other.append(*(states([[7] * 50] * len(self.rows), dim, self.dtype) for dim in DIMS))

    @rule()
    def reopen_what_must_be_kept(self) -> None:
        self.buffer = PackedBuffer.over(self.retention, CODECS[self.name], self.buffer.held())

    @rule(batch=st.integers(1, 3))
    def clear(self, batch: int) -> None:
        self.buffer.clear()
        self.rows, self.until, self.furthest = [[] for _ in range(batch)], 0, 0

    @invariant()
    def shows_the_tail(self) -> None:
        seen = len(self.rows[0])
        assert self.buffer.span.seen == seen
        first = seen - tail_length(seen, self.window)
        for tail, dim in zip(self.buffer.tail, DIMS, strict=False):
            assert torch.equal(tail, self.expected(first, seen, dim))


PackedBufferMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestPackedBufferMachine = PackedBufferMachine.TestCase


def fill(buffer: PackedBuffer, count: int, batch: int = 1) -> None:
    with torch.no_grad():
        buffer.append(*(states([list(range(count))] * batch, dim) for dim in DIMS))


def nbytes(retention: PackedRetention, name: str, seen: int, batch: int) -> int:
    """By the definition: what stays as computed in float32, and what is packed."""
    recent = retention.recent.capacity(seen) * 4 * sum(DIMS)
    packed_tokens = retention.packed.capacity(retention.packed_until(seen))
    return (
        batch
        * HEADS
        * (recent + packed_tokens * sum(each.nbytes(dim) for each, dim in zip(FORMATS[name], DIMS, strict=True)))
    )


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("window", [None, 30, 300])
@pytest.mark.parametrize("chunks", [[700], [300, 400], [1] * 700, [699, 1], [37] * 18 + [34]])
def test_bytes_depend_on_the_tokens_seen_alone(name: str, window: int | None, chunks: list[int]) -> None:
    retention = PackedRetention(Retention(window, rollback=5), residual=8)
    buffer = PackedBuffer(retention, CODECS[name])
    for chunk in chunks:
        fill(buffer, chunk, batch=2)
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in buffer.held_tensors}
    assert sum(held.values()) == nbytes(retention, name, 700, batch=2)


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("draft", [1, 20, 500])
def test_a_draft_is_not_packed_before_it_is_accepted_and_leaves_the_bound(window: int | None, draft: int) -> None:
    retention = PackedRetention(Retention(window, rollback=5), residual=8)
    buffer = PackedBuffer(retention, CODECS["int4"])
    fill(buffer, 100)
    buffer.recording = Recording(on=True)
    fill(buffer, draft)
    assert buffer.packed.span.end <= 100
    buffer.take_back(draft)
    assert (buffer.span.seen, buffer.packed.span.end) in [(100, 64), (100, 96)]
    assert buffer.recent.storages[0].shape[2] == retention.recent.bound


def test_what_is_packed_is_never_packed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, tokens = PackedBuffer(PackedRetention(Retention(None, rollback=5), residual=8), CODECS["int8"]), []
    pack = type(CODECS["int8"][0]).pack

    def counting(codec: Any, state: Tensor) -> tuple[Tensor, ...]:
        tokens.append(state.shape[2])
        return pack(codec, state)

    monkeypatch.setattr(type(CODECS["int8"][0]), "pack", counting)
    fill(buffer, 100)
    for _ in range(50):
        fill(buffer, 1)
    buffer.take_rows(RowSelection(torch.tensor([0, 0])))
    buffer.fork().take_back(100)
    fill(buffer, 3, batch=2)
    assert sum(tokens) == 2 * buffer.packed.span.end, "keys and values, once each"


def test_states_that_need_a_gradient_are_refused_and_nothing_changes() -> None:
    buffer = PackedBuffer(PackedRetention(Retention(None), residual=8), CODECS["int8"])
    fill(buffer, 50)
    keys, values = (states([[1]], dim).requires_grad_() for dim in DIMS)
    with pytest.raises(InputError, match=r"torch\.no_grad"):
        buffer.append(keys, values)
    assert buffer.span.seen == 50
    with torch.no_grad():
        buffer.append(keys, values)


@pytest.mark.parametrize("allocation", range(1, 12))
def test_running_out_of_memory_leaves_the_buffer_as_it_was(allocation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    retention = PackedRetention(Retention(40, rollback=5), residual=8)
    buffer = PackedBuffer(retention, CODECS["int4"])
    for _ in range(8 + 31 + 64):  # the next token makes it pack, and move what is packed
        fill(buffer, 1)
    before, calls = buffer.tail, []
    for method in ("clone", "new_empty", "clamp", "to"):
        real = getattr(Tensor, method)

        def limited(tensor: Tensor, *args: Any, real: Any = real, **kwargs: Any) -> Tensor:
            calls.append(tensor)
            if len(calls) == allocation:
                raise MemoryError
            return real(tensor, *args, **kwargs)

        monkeypatch.setattr(Tensor, method, limited)
    with pytest.raises(MemoryError):
        fill(buffer, 1)
    monkeypatch.undo()
    assert buffer.span.seen == 8 + 31 + 64
    assert all(torch.equal(now, then) for now, then in zip(buffer.tail, before, strict=True))
