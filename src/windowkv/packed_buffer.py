"""Keys and values of one layer of which only the newest are stored as they were computed, and the others packed.

Two buffers, one of tokens and one of what a codec made of them, and the position from which on the first is read. Knows
nothing of how tokens are packed, or of what follows what in a buffer.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from windowkv.buffers import TOKENS, Buffer, Recording, check_take_back
from windowkv.codecs import Codec
from windowkv.errors import InputError
from windowkv.quantisation import SLICE, PackedRetention
from windowkv.rows import RowSelection
from windowkv.window import Retention, Span, tail_length


@dataclass(frozen=True)
class Held:
    """What a packed buffer must keep: views."""

    packed: Span
    parts: tuple[Tensor, ...]  # of the keys, then of the values
    recent: Span
    states: tuple[Tensor, ...]  # keys and values


class PackedBuffer:
    """As `Buffer`, whose names it has, of tokens that are packed when they are no longer among the newest.

    What an append returns is a temporary copy: the past as it is stored, and the new tokens as they are. A token is
    packed once, in place of what was held of it before, and never again: what is taken back, forked or reordered is the
    packed form. After going back further than to what is left as computed, fewer tokens than usual are, for a while.
    """

    def __init__(self, parts: PackedRetention, codecs: tuple[Codec, Codec]) -> None:
        """Hold nothing yet: batch, heads, dtype and device are those of the first append."""
        self.parts, self.codecs = parts, codecs
        self.recent, self.packed = Buffer(parts.recent), Buffer(parts.packed)

    @classmethod
    def over(cls, parts: PackedRetention, codecs: tuple[Codec, Codec], held: Held) -> "PackedBuffer":
        """A buffer of tokens that exist already, whose tensors are never written to in place."""
        buffer = cls(parts, codecs)
        buffer.packed = Buffer.over(parts.packed, held.packed, held.parts)
        buffer.recent = Buffer.over(parts.recent, held.recent, held.states)
        return buffer

    @property
    def retention(self) -> Retention:
        """What it keeps in all."""
        return self.parts.whole

    @property
    def span(self) -> Span:
        """Positions that it holds."""
        return Span(self.packed.span.start, self.recent.span.end)

    @property
    def recording(self) -> Recording:
        """See `Buffer`."""
        return self.recent.recording

    @recording.setter
    def recording(self, recording: Recording) -> None:
        self.recent.recording = recording

    @property
    def storages(self) -> tuple[Tensor, ...]:
        """All storages, or nothing before the first append."""
        return self.recent.storages + self.packed.storages

    @property
    def held_tensors(self) -> tuple[Tensor, ...]:
        """All tensors that it keeps alive now."""
        return self.recent.held_tensors + self.packed.held_tensors

    @property
    def rows(self) -> int | None:
        """How many rows it holds; None before the first append."""
        return self.recent.rows

    @property
    def tail(self) -> tuple[Tensor, ...]:
        """Copies of the keys and values that the next query will see, `[B, H, min(seen, window - 1), D]`."""
        nothing = tuple(storage[:, :, :0] for storage in self.recent.storages)
        return self._visible(*nothing) if nothing else ()

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As `Buffer.append`. Raises InputError for states that need a gradient besides, which codes do not carry."""
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise InputError(
                "keys or values need a gradient, which a quantised cache does not carry: "
                "run it under torch.no_grad(), or use a cache without kv_dtype"
            )
        # All that allocates comes first: when memory runs out, the buffer is as it was.
        add = self.recent.prepare(keys, values)
        seen, new = self.span.seen, keys.shape[TOKENS]
        reach = self.recording.after(seen, new).reach
        pack = self._packing(self.parts.packed_until(seen + new, reach), (keys, values))
        visible_keys, visible_values = self._visible(keys, values)
        pack()
        add()
        return visible_keys, visible_values

    def check_take_back(self, count: int) -> None:
        """See `Buffer.check_take_back`."""
        check_take_back(self.retention, self.span, count)

    def take_back(self, count: int) -> None:
        """See `Buffer.take_back`. What a recording held unpacked is packed now."""
        self.check_take_back(count)
        end = self.span.end - count
        self._packing(self.parts.packed_until(end), ())()
        if end < self.packed.span.end:
            self.packed.cut(end)
        self.recent.cut(end)

    def take_rows(self, rows: RowSelection) -> None:
        """See `Buffer.take_rows`."""
        for move in [self.recent.prepare_rows(rows), self.packed.prepare_rows(rows)]:
            move()

    def fork(self) -> "PackedBuffer":
        """See `Buffer.fork`."""
        twin = copy.copy(self)
        twin.recent, twin.packed = self.recent.fork(), self.packed.fork()
        return twin

    def clear(self) -> None:
        """Forget every token and free the storages."""
        self.recent.clear()
        self.packed.clear()

    def held(self) -> Held:
        """The newest tokens, as many as must be kept."""
        until, end = self.packed.span.end, self.span.end
        kept = self.retention.kept
        first = self.packed.span.start if kept is None else min(until, max(self.packed.span.start, end - kept))
        packed, recent = Span(first, until), Span(until, end)
        return Held(packed, self.packed.states(first, until), recent, self.recent.states(until, end))

    def between(self, row: int, start: int, end: int) -> tuple[Tensor, ...]:
        """Copies of one row's parts at positions [start, end), which are held; of those not packed, as they will be."""
        until = min(max(start, self.packed.span.end), end)
        pieces = [self.packed.between(row, start, until)] if start < until else []
        if until < end or not pieces:
            pieces.append(self._parts_of(self.recent.between(row, until, end)))
        return _joined(pieces)

    def _packing(self, end: int, new: Sequence[Tensor]) -> Callable[[], None]:
        """All of packing what is older than a position that can fail, and what does the rest."""
        packed, seen = self.packed, self.recent.span.end
        start = packed.span.end
        if end <= start:
            return self._repeating(new)
        kept = self.parts.packed.kept
        first = start if kept is None else max(start, end - kept)
        if first > start:  # a long prompt, of which the next query sees only the end
            packed = copy.copy(packed)
            packed.span = Span(first, first)
        pieces = []
        for at in range(first, end, SLICE):
            stop = min(at + SLICE, end)
            if at < seen:
                pieces.append(self._parts_of(self.recent.states(at, min(stop, seen))))
            if stop > seen:
                pieces.append(self._parts_of([state[:, :, max(at - seen, 0) : stop - seen] for state in new]))
        joined = _joined(pieces) if pieces else ()
        if new:  # a single row that becomes several does so as a whole, also where only old tokens are packed
            joined = tuple(part.expand(new[0].shape[0], -1, -1, -1) for part in joined)
        pieces.clear()  # they are a copy of what is joined
        add = packed.prepare(*joined) if joined else None

        def commit() -> None:
            if add is not None:
                add()
            self.packed = packed

        return commit

    def _repeating(self, new: Sequence[Tensor]) -> Callable[[], None]:
        """As `_packing`, where nothing is packed: a single row becomes as many as there are new ones."""
        rows, packed = self.packed.rows, self.packed
        if not new or rows in (None, new[0].shape[0]):
            return lambda: None
        repeated = packed.fork()
        repeated.take_rows(RowSelection(torch.zeros(new[0].shape[0], dtype=torch.long)))

        def commit() -> None:
            self.packed = repeated

        return commit

    def _parts_of(self, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(part for codec, state in zip(self.codecs, states, strict=True) for part in codec.pack(state))

    def _visible(self, *new: Tensor) -> tuple[Tensor, ...]:
        """What new tokens `[B, H, Q, D]` attend to."""
        until, end = self.packed.span.end, self.recent.span.end
        first = end - tail_length(end, self.retention.window)
        if first == end:
            return new
        parts = self.packed.states(first, until) if first < until else ()
        recent = self.recent.states(max(first, until), end)
        visible = []
        for codec, past, state in zip(self.codecs, recent, new, strict=True):
            out = state.new_empty((*state.shape[:TOKENS], end - first + state.shape[TOKENS], state.shape[-1]))
            packed = max(0, until - first)
            if packed:
                codec.unpack(parts[: len(codec.names)], out[:, :, :packed])
                parts = parts[len(codec.names) :]
            out[:, :, packed : end - first] = past
            out[:, :, end - first :] = state
            visible.append(out)
        return tuple(visible)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the parts, the keys' first."""
        keys, values = self.codecs
        return tuple(f"keys.{part}" for part in keys.names) + tuple(f"values.{part}" for part in values.names)


def _joined(pieces: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    if len(pieces) == 1:
        return pieces[0]
    rows = max(piece[0].shape[0] for piece in pieces)
    alike = [tuple(part.expand(rows, -1, -1, -1) for part in piece) for piece in pieces]
    return tuple(torch.cat(column, TOKENS) for column in zip(*alike, strict=True))
