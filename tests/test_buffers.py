"""The storage, driven by random operations against a list of tokens per row."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from windowkv.buffers import Buffer, Recording
from windowkv.errors import InputError, RollbackError
from windowkv.rows import RowSelection
from windowkv.window import Retention, tail_length

HEADS, KEY_DIM, VALUE_DIM = 2, 3, 5
DTYPES = (torch.float32, torch.bfloat16)


def states(numbers: list[list[int]], dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """`[B, H, T, dim]` in which every token carries its number, head and feature; exact in bfloat16 up to 256."""
    base = torch.tensor(numbers, dtype=torch.long).reshape(len(numbers), 1, -1, 1)
    return ((base + torch.arange(HEADS).reshape(1, -1, 1, 1) + torch.arange(dim)) % 251).to(dtype)


class BufferMachine(RuleBasedStateMachine):
    """Every row is a list of the numbers of its tokens; the buffer must show the visible end of that list, always."""

    @initialize(
        window=st.one_of(st.none(), st.integers(1, 12)),
        rollback=st.integers(0, 6),
        batch=st.integers(1, 3),
        dtype=st.sampled_from(DTYPES),
    )
    def start(self, window: int | None, rollback: int, batch: int, dtype: torch.dtype) -> None:
        self.buffer = Buffer(Retention(window, rollback))
        self.window, self.rollback, self.dtype = window, rollback, dtype
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self.furthest, self.counter = 0, 0

    @rule(
        new=st.one_of(st.integers(0, 4), st.integers(0, 120)),
        contiguous=st.booleans(),
        mode=st.sampled_from(["no_grad", "inference", "grad"]),
    )
    def append(self, new: int, contiguous: bool, mode: str) -> None:
        fresh = [list(range(self.counter + 1000 * i, self.counter + 1000 * i + new)) for i in range(len(self.rows))]
        self.counter += new
        past = tail_length(len(self.rows[0]), self.window)
        expected = [row[len(row) - past :] + more for row, more in zip(self.rows, fresh, strict=True)]
        keys, values = states(fresh, KEY_DIM, self.dtype), states(fresh, VALUE_DIM, self.dtype)
        if not contiguous:
            keys, values = keys.transpose(1, 2).contiguous().transpose(1, 2), values.flip(-1).flip(-1)
        with {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}[mode]():
            seen_keys, seen_values = self.buffer.append(keys, values)
            assert torch.equal(seen_keys, states(expected, KEY_DIM, self.dtype))
            assert torch.equal(seen_values, states(expected, VALUE_DIM, self.dtype))
        self.rows = [row + more for row, more in zip(self.rows, fresh, strict=True)]
        self.furthest = max(self.furthest, len(self.rows[0]))

    @rule(new=st.integers(1, 150), data=st.data(), singly=st.booleans())
    def draft_and_take_back(self, new: int, data: st.DataObject, singly: bool) -> None:
        self.buffer.recording = Recording(on=True, drafts=singly)
        if singly and not self.rows[0]:
            self.append(1, True, "no_grad")
        for count in [1] * new if singly else [new]:
            self.append(count, True, "no_grad")
        count = data.draw(st.integers(0, new))
        self.buffer.take_back(count)
        self.buffer.recording = Recording()
        self.keep(len(self.rows[0]) - count)

    @rule(count=st.integers(0, 40))
    def take_back(self, count: int) -> None:
        seen = len(self.rows[0])
        before = copy.deepcopy(self.buffer)
        if seen - count >= max(0, self.furthest - self.rollback):
            self.buffer.take_back(count)
        else:
            try:
                self.buffer.take_back(count)
            except RollbackError:
                assert self.buffer.span == before.span
                return
        self.keep(seen - count)

    def keep(self, seen: int) -> None:
        self.rows = [row[:seen] for row in self.rows]
        if not seen:
            self.furthest = 0  # the storage is freed: a buffer without tokens is as good as new

    @precondition(lambda self: self.buffer.storages)
    @rule(data=st.data(), writable=st.booleans())
    def take_rows(self, data: st.DataObject, writable: bool) -> None:
        width = data.draw(st.sampled_from([len(self.rows), 1, 4]))
        rows = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=width, max_size=width))
        with torch.set_grad_enabled(not writable):  # with gradients nothing is written in place
            self.buffer.take_rows(RowSelection(torch.tensor(rows)))
        self.rows = [list(self.rows[row]) for row in rows]

    @rule()
    def go_on_with_a_fork(self) -> None:
        other = self.buffer.fork()
        if other.storages:
            with torch.no_grad():  # what the other side writes is not seen here
                other.take_rows(RowSelection(torch.arange(len(self.rows)).flip(0)))
                other.append(*(states([[7] * 5] * len(self.rows), dim, self.dtype) for dim in (KEY_DIM, VALUE_DIM)))

    @precondition(lambda self: len(self.rows) == 1 and self.buffer.storages)
    @rule(batch=st.integers(2, 4))
    def feed_a_batch_to_one_row(self, batch: int) -> None:
        self.rows = [list(self.rows[0]) for _ in range(batch)]
        self.append(2, True, "no_grad")

    @rule(batch=st.integers(1, 3))
    def clear(self, batch: int) -> None:
        self.buffer.clear()
        self.rows, self.furthest = [[] for _ in range(batch)], 0

    @invariant()
    def shows_the_tail(self) -> None:
        seen = len(self.rows[0])
        assert self.buffer.span.seen == seen
        for tail, dim in zip(self.buffer.tail, (KEY_DIM, VALUE_DIM), strict=False):
            assert torch.equal(
                tail, states([row[seen - tail_length(seen, self.window) :] for row in self.rows], dim, self.dtype)
            )

    @invariant()
    def holds_what_the_furthest_position_needs_and_no_more(self) -> None:
        for storage, dim in zip(self.buffer.storages, (KEY_DIM, VALUE_DIM), strict=False):
            capacity = self.buffer.retention.capacity(self.furthest)
            assert storage.shape == (len(self.rows), HEADS, capacity, dim)
            assert storage.untyped_storage().nbytes() == storage.nbytes


BufferMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestBufferMachine = BufferMachine.TestCase


def fill(buffer: Buffer, count: int, batch: int = 1) -> None:
    with torch.no_grad():
        buffer.append(*(states([list(range(count))] * batch, dim) for dim in (KEY_DIM, VALUE_DIM)))


def test_decoding_writes_in_place_between_compactions() -> None:
    buffer = Buffer(Retention(window=64, rollback=8))
    fill(buffer, 500)
    places = []
    for _ in range(320):
        fill(buffer, 1)
        keys = buffer.tail[0]
        places.append(keys.data_ptr() - buffer.storages[0].data_ptr())
    row = KEY_DIM * buffer.storages[0].element_size()
    steps = [(after - before) // row for before, after in pairwise(places)]
    assert set(steps) == {1, -31}, "a view moves one token at a time, or back to the front"
    assert steps.count(-31) == (320 - 1) // 32


class CountCopies(torch.utils._python_dispatch.TorchDispatchMode):
    """Numbers that any operation writes to memory."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and func._schema.name not in {
            "aten::slice",
            "aten::new_empty",
            "aten::expand",
            "aten::detach",
        }:
            self.written += out.numel()
        return out


def test_decoding_copies_at_most_two_windows_per_slack_tokens() -> None:
    window, rollback = 512, 64
    buffer = Buffer(Retention(window, rollback))
    fill(buffer, 2000)
    token = [torch.zeros(1, HEADS, 1, dim) for dim in (KEY_DIM, VALUE_DIM)]
    with CountCopies() as copies, torch.no_grad():
        for _ in range(320):
            buffer.append(*token)
    per_token = copies.written / 320 / HEADS / (KEY_DIM + VALUE_DIM)
    assert per_token <= 1 + 2 * (window - 1 + rollback) / 32


def test_a_long_prompt_is_not_kept_alive_by_a_view() -> None:
    buffer = Buffer(Retention(window=8, rollback=2))
    fill(buffer, 10_000)
    assert [storage.shape[2] for storage in buffer.storages] == [8 - 1 + 2 + 32] * 2
    assert all(storage.untyped_storage().nbytes() == storage.nbytes for storage in buffer.storages)
    assert all(storage.untyped_storage().nbytes() == storage.nbytes for storage in copy.deepcopy(buffer).storages)


def test_gradients_flow_through_several_appends() -> None:
    whole = torch.randn(1, HEADS, 30, KEY_DIM, requires_grad=True)
    buffer = Buffer(Retention(window=6, rollback=1))
    total = sum(buffer.append(part, part)[0].square().sum() for part in whole.split([3, 1, 1, 20, 5], dim=2))
    (gradient,) = torch.autograd.grad(total, whole)
    visible = torch.zeros(30)
    for start, end in ((0, 3), (3, 4), (4, 5), (5, 25), (25, 30)):
        visible[max(0, start - 5) : end] += 1
    torch.testing.assert_close(gradient, 2 * whole.detach() * visible.reshape(1, 1, -1, 1))


@pytest.mark.parametrize("then", [torch.no_grad, torch.inference_mode])
def test_what_a_pending_backward_needs_is_not_written_over(then: Callable[[], AbstractContextManager[None]]) -> None:
    factor = torch.tensor(2.0, requires_grad=True)  # keys without a gradient, which autograd saves for its own
    buffer = Buffer(Retention(window=6, rollback=1))
    keys, _ = buffer.append(*(states([list(range(30))], KEY_DIM) for _ in range(2)))
    loss = (keys * factor).sum()
    with then():
        buffer.append(*(states([[30]], KEY_DIM) for _ in range(2)))
    loss.backward()
    assert factor.grad == states([list(range(30))], KEY_DIM).sum()


@pytest.mark.parametrize("draft", [10, 100, 1000])
def test_a_draft_of_any_length_can_be_taken_back_and_leaves_the_bound(draft: int) -> None:
    buffer = Buffer(Retention(window=8, rollback=2))
    fill(buffer, 50)
    buffer.recording = Recording(on=True)
    fill(buffer, draft)
    buffer.take_back(draft)
    assert buffer.span.seen == 50
    assert torch.equal(buffer.tail[0], states([list(range(43, 50))], KEY_DIM))
    assert buffer.storages[0].shape[2] == buffer.retention.bound


@pytest.mark.parametrize("recorded", [False, True])
def test_a_draft_that_is_kept_leaves_the_bound_with_the_next_append(recorded: bool) -> None:
    buffer = Buffer(Retention(window=8, rollback=2))
    fill(buffer, 50)
    buffer.recording = Recording(on=True)
    fill(buffer, 500)
    assert buffer.storages[0].shape[2] > buffer.retention.bound
    buffer.recording = Recording(on=recorded)
    fill(buffer, 1)
    assert buffer.storages[0].shape[2] == buffer.retention.bound


Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda k, v: (k.double(), v), "torch.float64"),
        (lambda k, v: (k, v.bfloat16()), "torch.bfloat16"),
        (lambda k, v: (k.to("meta"), v.to("meta")), "meta"),
        (lambda k, v: (k[:1], v[:1]), "batch 2"),
        (lambda k, v: (k.repeat(2, 1, 1, 1), v.repeat(2, 1, 1, 1)), r"\[4, 2, 1, 3\]"),
        (lambda k, v: (k[:, :1], v), "heads 2"),
        (lambda k, v: (k[..., :2], v), "head_dim 3"),
        (lambda k, v: (k, v.repeat(1, 1, 2, 1)), "tokens"),
        (lambda k, v: (k[0], v[0]), r"\[2, 1, 3\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_and_nothing_changes(change: Change, named: str) -> None:
    buffer = Buffer(Retention(window=4, rollback=0))
    fill(buffer, 50, batch=2)
    span, before = buffer.span, [tail.clone() for tail in buffer.tail]
    with pytest.raises(InputError, match=named):
        buffer.append(*change(states([[7], [8]], KEY_DIM), states([[7], [8]], VALUE_DIM)))
    assert buffer.span == span
    assert all(torch.equal(now, then) for now, then in zip(buffer.tail, before, strict=True))


@pytest.mark.parametrize("count", [-1, 6, 51])
def test_taking_back_too_much_says_how_much_would_work(count: int) -> None:
    buffer = Buffer(Retention(window=4, rollback=5))
    fill(buffer, 50)
    with pytest.raises(RollbackError, match=rf"{count} tokens: 0 to 5 of the 50 seen"):
        buffer.take_back(count)
    assert buffer.span.seen == 50


def test_running_out_of_memory_leaves_the_buffer_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = Buffer(Retention(window=8, rollback=2))
    fill(buffer, 41)  # the next token makes it compact
    before, calls = [tail.clone() for tail in buffer.tail], []
    clone = Tensor.clone

    def second_fails(tensor: Tensor) -> Tensor:
        calls.append(tensor)
        if len(calls) == 2:
            raise MemoryError
        return clone(tensor)

    monkeypatch.setattr(Tensor, "clone", second_fails)
    with pytest.raises(MemoryError):
        fill(buffer, 1)
    assert buffer.span.seen == 41
    assert all(torch.equal(now, then) for now, then in zip(buffer.tail, before, strict=True))
