"""Where keys and values of one layer are stored, and which positions are still there.

Knows tensors and positions. Knows nothing of models, configs, masks or transformers.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from windowkv.errors import InputError, RollbackError
from windowkv.rows import RowSelection
from windowkv.window import Append, Retention, Span, growing_capacity, tail_length

TOKENS = 2  # the dimension of [B, H, T, D] that grows
_MARGIN = (
    3  # tokens before a draft that generate may step back too, or feed before it learns that it should have stopped
)


@dataclass(frozen=True)
class Recording:
    """What must be possible to take back beyond a retention's rollback: drafts, which may be of any length.

    Once on, that is the newest append of several tokens: a draft is checked in one go. A model that drafts feeds the
    tokens of one draft singly, after a prompt that is no draft: there it is all tokens since some were taken back.
    """

    on: bool = False
    drafts: bool = False
    reach: int = 0  # how many of the newest tokens that is

    def after(self, seen: int, new: int) -> "Recording":
        """The recording after `new` tokens on top of `seen` ones."""
        if not self.on:
            return self
        if self.drafts and (not seen or new == 1):
            return replace(self, reach=self.reach + new if seen else _MARGIN)
        return replace(self, reach=max(new, _MARGIN))

    def forgotten(self) -> "Recording":
        """The recording after some tokens, or none, were taken back: what is left is accepted."""
        return replace(self, reach=0)


def check_take_back(retention: Retention, span: Span, count: int) -> None:
    """Raise RollbackError when the newest `count` tokens of what is held cannot be taken back."""
    room = retention.rollback_room(span)
    if not 0 <= count <= room:
        raise RollbackError(
            f"cannot take back {count} tokens: 0 to {room} of the {span.seen} seen can be; "
            f"a cache made with a larger rollback than {retention.rollback} keeps more"
        )


class Buffer:
    """Keys and values of one layer, in order of position, within the bound of its retention.

    Appending writes in place and hands out views, so no token costs a copy of the window; when the room is used up,
    what must be kept moves to the front (compact). Storage follows the tokens up to the bound and never goes beyond.
    Without a window everything is kept and the storage grows in steps.

    >>> buffer = Buffer(Retention(window=4, rollback=2))
    >>> states = torch.arange(100.0).reshape(1, 1, 100, 1)
    >>> keys, values = buffer.append(states, states)  # a prompt sees itself whole
    >>> keys.shape[2], buffer.span
    (100, Span(start=95, end=100))
    >>> keys, values = buffer.append(states[:, :, :1], states[:, :, :1])
    >>> keys.flatten().tolist()
    [97.0, 98.0, 99.0, 0.0]
    """

    def __init__(self, retention: Retention) -> None:
        """Hold nothing yet: batch, heads, dtype and device are those of the first append."""
        self.retention = retention
        self.span = Span()
        self._storages: tuple[Tensor, ...] = ()
        self._pieces: tuple[tuple[Tensor, ...], ...] = ()  # what they are to be joined from, once they are asked for
        self.recording = Recording()
        self._lent = False  # somebody else may read the storage: autograd, a fork, a file

    @classmethod
    def over(cls, retention: Retention, span: Span, storages: tuple[Tensor, ...]) -> "Buffer":
        """A buffer of tokens that exist already, `[B, H, span.held, D]` each, which is never written to in place."""
        buffer = cls(retention)
        buffer.span, buffer.storages, buffer._lent = span, storages, True
        return buffer

    @classmethod
    def in_pieces(cls, retention: Retention, span: Span, pieces: tuple[tuple[Tensor, ...], ...]) -> "Buffer":
        """As `over`, of keys and of values that lie in several tensors each, one after the other."""
        buffer = cls(retention)
        buffer.span, buffer._pieces = span, pieces
        return buffer

    @property
    def storages(self) -> tuple[Tensor, ...]:
        """Keys `[B, H, capacity, D]` and values `[B, H, capacity, Dv]`, or nothing."""
        if self._pieces:
            capacity = self.retention.capacity(self.span.end)
            self._storages = tuple(_joined(pieces, self.span.held, capacity) for pieces in self._pieces)
            self._pieces, self._lent = (), False
        return self._storages

    @storages.setter
    def storages(self, storages: tuple[Tensor, ...]) -> None:
        self._storages, self._pieces = storages, ()

    @property
    def held_tensors(self) -> tuple[Tensor, ...]:
        """All tensors that it keeps alive now."""
        return tuple(piece for pieces in self._pieces for piece in pieces) or self._storages

    @property
    def rows(self) -> int | None:
        """How many rows it holds; None before the first append."""
        return self.held_tensors[0].shape[0] if self.held_tensors else None

    @property
    def tail(self) -> tuple[Tensor, ...]:
        """Views of the keys and values that the next query will see, `[B, H, min(seen, window - 1), D]`."""
        return self.states(self.span.end - tail_length(self.span.end, self.retention.window), self.span.end)

    def between(self, row: int, start: int, end: int) -> tuple[Tensor, ...]:
        """Copies of one row's keys and values at positions [start, end), which are held: `[1, H, end - start, D]`."""
        pieces = self._pieces or tuple((storage,) for storage in self._storages)
        return tuple(_cut(each, row, self.span.slots(start, end)) for each in pieces)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add `Q` tokens and return what they attend to: the visible past and themselves.

        keys `[B, H, Q, D]`, values `[B, H, Q, Dv]`; returns `[B, H, K, D]` and `[B, H, K, Dv]` with
        `K = min(seen, window - 1) + Q`, valid until the next append. A buffer that holds a single row takes a batch of
        any size: the row is repeated.

        Raises InputError when the tensors do not fit each other or what is held; nothing changes then.
        """
        visible_keys, visible_values = self.prepare(keys, values)()
        return visible_keys, visible_values

    def prepare(self, *states: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """All of an append that can fail, and what does the rest: when memory runs out, the buffer is as it was."""
        self._check(*states)
        storages = self.storages or tuple(map(_no_tokens, states))
        batch, new = states[0].shape[0], states[0].shape[TOKENS]
        if storages[0].shape[0] != batch:
            storages = tuple(storage.expand(batch, -1, -1, -1) for storage in storages)
        recording = self.recording.after(self.span.seen, new)
        step = self.retention.append(self.span, new, recording.reach)
        capacity = self._capacity(storages[0].shape[TOKENS], step.span)
        writes = [
            _prepare(old, fresh, self.span, step, capacity, in_place=not self._lent and _writable(old))
            for old, fresh in zip(storages, states, strict=True)
        ]

        def commit() -> tuple[Tensor, ...]:
            visible = tuple(write.run(step) for write in writes)
            self.storages, self.span = tuple(write.target for write in writes), step.span
            self.recording, self._lent = recording, torch.is_grad_enabled()
            return visible

        return commit

    def check_take_back(self, count: int) -> None:
        """Raise RollbackError when the newest `count` tokens cannot be taken back."""
        check_take_back(self.retention, self.span, count)

    def take_back(self, count: int) -> None:
        """Forget the newest `count` tokens, at no copy. Raises RollbackError, and changes nothing, beyond the room.

        What a recording held beyond the bound is dropped.
        """
        self.check_take_back(count)
        self.cut(self.span.end - count)

    def cut(self, end: int) -> None:
        """Forget the tokens from position `end` on, whether or not the next query still finds all that it may see."""
        span = Span(min(self.span.start, end), end)
        bound = self.retention.bound
        if bound is not None and any(storage.shape[TOKENS] > bound for storage in self.storages):
            kept = Span(max(span.start, span.end - bound), span.end)
            self.storages = tuple(_moved(storage, span.slots(kept.start, kept.end), bound) for storage in self.storages)
            span = kept
        self.span, self.recording = span, self.recording.forgotten()
        if not span.seen:
            self.storages, self._lent = (), False

    def take_rows(self, rows: RowSelection) -> None:
        """Make row i what row `rows.sources[i]` was: in place, where that is as many rows and nobody can notice."""
        self.prepare_rows(rows)()

    def prepare_rows(self, rows: RowSelection) -> Callable[[], None]:
        """All of `take_rows` that can fail, and what does the rest."""
        if self.rows == len(rows.sources) and not self._lent and all(map(_writable, self.storages)):
            # Spare slots are nobody's: only what is held moves.
            moves = [rows.prepare_move(storage[:, :, : self.span.held]) for storage in self.storages]

            def commit() -> None:
                for move in moves:
                    move()

            return commit
        storages = tuple(storage.index_select(0, rows.sources.to(storage.device)) for storage in self.storages)

        def replace_all() -> None:
            self.storages, self._lent = storages, False

        return replace_all

    def fork(self) -> "Buffer":
        """An independent buffer with the same tokens: whichever appends first moves to storages of its own."""
        self._lent = True
        return copy.copy(self)

    def states(self, first: int, last: int) -> tuple[Tensor, ...]:
        """Views of what it stores of positions [first, last), which it must hold."""
        return tuple(storage[:, :, self.span.slots(first, last)] for storage in self.storages)

    def kept(self) -> tuple[Span, tuple[Tensor, ...]]:
        """The newest tokens, as many as must be kept, and views of their keys and values."""
        newest = self.span.held if self.retention.kept is None else min(self.span.held, self.retention.kept)
        span = Span(self.span.end - newest, self.span.end)
        return span, self.states(span.start, span.end)

    def clear(self) -> None:
        """Forget every token, and drafts, and free the storage."""
        self.span, self.storages, self._lent, self.recording = Span(), (), False, Recording()

    def _capacity(self, capacity: int, span: Span) -> int:
        """Tokens that there is to be room for, when there is room for `capacity` now."""
        bound = self.retention.bound
        if bound is not None and span.held > bound:  # a recording goes beyond it, for a while
            return max(capacity, growing_capacity(span.held))
        if (span.end > capacity and capacity != bound) or (bound is not None and capacity > bound):
            return self.retention.capacity(span.end)
        return capacity

    def _check(self, *states: Tensor) -> None:
        keys, values = states[:2]
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[::2] != values.shape[::2]:
            raise InputError(
                f"keys {list(keys.shape)} and values {list(values.shape)}: must be [batch, heads, tokens, head_dim], "
                "with one batch and one number of tokens"
            )
        for name, held, new in zip(("keys", "values"), self.storages, states, strict=False):
            if (held.dtype, held.device) != (new.dtype, new.device):
                raise InputError(
                    f"{name} in {new.dtype} on {new.device}, but this cache holds {held.dtype} on {held.device}; "
                    "a new cache (or cache.reset()) takes any dtype and device"
                )
            if held.shape[1::2] != new.shape[1::2] or held.shape[0] not in (1, new.shape[0]):
                raise InputError(
                    f"{name} [batch, heads, tokens, head_dim] = {list(new.shape)}, but this cache holds "
                    f"batch {held.shape[0]}, heads {held.shape[1]}, head_dim {held.shape[3]}; "
                    "select or repeat its rows first, or use a new cache"
                )


@dataclass(frozen=True)
class _Write:
    """One tensor's share of an append, with everything allocated."""

    target: Tensor  # [B, H, capacity, D]
    kept: Tensor | None  # old tokens that move to the front of the target; None where they already lie right
    new: Tensor  # new tokens that are stored
    temporary: Tensor | None  # what attention reads, if not the target

    def run(self, step: Append) -> Tensor:
        """Write, and return what attention reads."""
        last = step.span.held
        first_new = last - self.new.shape[TOKENS]
        if self.kept is not None:
            self.target[:, :, :first_new] = self.kept
        self.target[:, :, first_new:last] = self.new
        return (
            self.target[:, :, step.span.slots(step.first, step.span.end)] if self.temporary is None else self.temporary
        )


def _prepare(storage: Tensor, new: Tensor, span: Span, step: Append, capacity: int, *, in_place: bool) -> _Write:
    temporary = None
    if step.detour:
        past = storage[:, :, span.slots(step.first, span.end)]
        temporary = torch.cat((past, new), TOKENS) if past.shape[TOKENS] else new
        new = new[:, :, max(0, step.span.start - span.end) :]
    in_place = in_place and storage.shape[TOKENS] == capacity
    if in_place and step.span.start == span.start:
        return _Write(storage, None, new, temporary)
    kept = storage[:, :, span.slots(min(step.span.start, span.end), span.end)]
    if in_place:
        # Reading and writing overlapping memory in one copy gives garbage, so a move within the storage takes a clone.
        return _Write(storage, kept.clone(), new, temporary)
    target = new.new_empty((*new.shape[:TOKENS], capacity, new.shape[-1]))
    return _Write(target, kept, new, temporary)


def _writable(storage: Tensor) -> bool:
    """Whether writing in place spoils nothing: no gradient, no inference tensor, no row that stands for several."""
    if torch.is_grad_enabled() or storage.requires_grad or not storage.is_contiguous():
        return False
    # A compiled graph cannot ask for the inference mode, and needs not: torch.compile keeps the two apart itself.
    return torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not storage.is_inference()


def _moved(storage: Tensor, slots: slice, capacity: int) -> Tensor:
    """A storage of that capacity, in which these slots come first."""
    moved = storage.new_empty((*storage.shape[:TOKENS], capacity, storage.shape[-1]))
    moved[:, :, : slots.stop - slots.start] = storage[:, :, slots]
    return moved


def _joined(pieces: tuple[Tensor, ...], tokens: int, capacity: int) -> Tensor:
    """One storage of that capacity, in which that many tokens of them come one after the other."""
    joined = pieces[0].new_empty((*pieces[0].shape[:TOKENS], capacity, pieces[0].shape[-1]))
    end = 0
    for piece in pieces:
        taken = piece[:, :, : tokens - end]
        joined[:, :, end : end + taken.shape[TOKENS]] = taken
        end += taken.shape[TOKENS]
    return joined


def _cut(pieces: tuple[Tensor, ...], row: int, slots: slice) -> Tensor:
    """A copy of some slots of one row of tensors that lie one after the other."""
    cut = [pieces[0][row : row + 1, :, :0]]
    begin = 0
    for piece in pieces:
        first, last = max(slots.start - begin, 0), min(slots.stop - begin, piece.shape[TOKENS])
        if first < last:
            cut.append(piece[row : row + 1, :, first:last])
        begin += piece.shape[TOKENS]
    return torch.cat(cut, TOKENS)


def _no_tokens(like: Tensor) -> Tensor:
    return like.new_empty((*like.shape[:TOKENS], 0, like.shape[-1]))
