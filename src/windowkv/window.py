"""Who sees whom and what must be kept, in integers: the window's edge is decided here and nowhere else.

Knows positions and counts. Knows nothing of tensors, models or configs.
"""

from dataclasses import dataclass, field
from typing import Any


def sees(query: int, key: int, window: int | None) -> bool:
    """Whether a causal query at one position attends to the key at another.

    `window` counts the query itself: with 4, position 9 sees 6, 7, 8 and 9. None is full attention.

    >>> [key for key in range(12) if sees(9, key, window=4)]
    [6, 7, 8, 9]
    """
    return key <= query and (window is None or query - key < window)


def tail_length(seen: int, window: int | None) -> int:
    """How many past tokens the next query can still see.

    >>> tail_length(100, window=4), tail_length(2, window=4), tail_length(100, window=1), tail_length(100, window=None)
    (3, 2, 0, 100)
    """
    return seen if window is None else min(seen, window - 1)


def kv_range(seen: int, new: int, window: int | None) -> tuple[int, int]:
    """`(kv_length, kv_offset)`: how many keys `new` queries after `seen` tokens meet, and the first one's position.

    >>> kv_range(100, 5, window=4)
    (8, 97)
    """
    tail = tail_length(seen, window)
    return tail + new, seen - tail


def slack(window: int) -> int:
    """Spare tokens of a sliding layer's buffer: room to append without moving the tail each time.

    >>> slack(16), slack(4096)
    (32, 256)
    """
    return max(32, window // 16)


def growing_capacity(held: int) -> int:
    """Room for `held` tokens in geometric steps: at most 12.5 % and at most 1,024 tokens are spare.

    >>> [growing_capacity(n) for n in (0, 1, 9, 17, 1000, 1025, 100_000)]
    [0, 1, 9, 18, 1024, 1152, 100352]
    """
    step = 1
    while step < 1024 and held >= 16 * step:  # comparisons, not bit tricks: torch.compile keeps the count symbolic
        step *= 2
    return -(-held // step) * step


@dataclass(frozen=True)
class Ring:
    """A fixed number of slots that positions take in turns: position p lies in slot p % capacity.

    At most `limit` tokens are ever fed; where there are slots for all of them, none is taken twice.

    >>> ring = Retention(window=4, rollback=2).ring(limit=1000)
    >>> ring.capacity, ring.wraps, ring.room
    (16, True, 13)
    """

    window: int | None
    capacity: int
    limit: int
    wraps: bool = field(init=False)  # whether new tokens come to take the slots of old ones
    # The most tokens that can be written at once before the first of them has seen its whole tail.
    room: int = field(init=False)

    def __post_init__(self) -> None:
        """Work out once what every append asks for: a compiled one then does not depend on the limit."""
        wraps = self.capacity < self.limit
        tail = self.window - 1 if wraps and self.window is not None else 0
        object.__setattr__(self, "wraps", wraps)
        object.__setattr__(self, "room", self.capacity - tail)

    def slots_of(self, positions: Any) -> Any:
        """Where positions lie: integers, or integer tensors."""
        # Where no slot is taken twice, a position beyond the limit is to fail, not to take the first one.
        return positions % self.capacity if self.wraps else positions

    def position(self, slot: Any, end: Any) -> Any:
        """The newest position before `end` that a slot can hold, negative where it was never written.

        Integers, or integer tensors.

        >>> [Ring(window=2, capacity=4, limit=9).position(slot, 6) for slot in range(4)]
        [4, 5, 2, 3]
        """
        return end - 1 - (end - 1 - slot) % self.capacity

    def rollback_room(self, seen: int, furthest: int) -> int:
        """How many tokens can be taken back and still leave the next query all that it may see.

        `furthest` is the most tokens that were ever seen: what they overwrote stays lost.

        >>> ring = Ring(window=4, capacity=32, limit=1000)
        >>> ring.rollback_room(20, 32), ring.rollback_room(100, 100), ring.rollback_room(90, 100)
        (20, 29, 19)
        """
        if self.window is None or furthest <= self.capacity:
            return seen
        return max(0, seen - (furthest - self.capacity + self.window - 1))


@dataclass(frozen=True)
class Span:
    """Positions [start, end) that a buffer holds, oldest first; position p lies in slot p - start."""

    start: int = 0
    end: int = 0

    @property
    def seen(self) -> int:
        """Tokens fed so far, which is the next token's position."""
        return self.end

    @property
    def held(self) -> int:
        """Tokens whose keys and values are still in memory."""
        return self.end - self.start

    def slots(self, first: int, last: int) -> slice:
        """Where positions [first, last) lie."""
        return slice(first - self.start, last - self.start)


@dataclass(frozen=True)
class Append:
    """Where one call's new tokens go; decided once, used for keys and for values."""

    first: int  # position of the oldest key that attention reads
    span: Span  # what is held afterwards
    detour: bool  # the new tokens do not fit beside the tail: attention reads a temporary copy


@dataclass(frozen=True)
class Retention:
    """How much of the past one layer keeps: its window, and how far it must be able to go back.

    `window` None keeps everything. Otherwise `kept` tokens are always held once that many were seen, and never more
    than `bound`.

    >>> Retention(window=512, rollback=64).bound
    607
    """

    window: int | None
    rollback: int = 0
    kept: int | None = field(init=False)  # tokens that may not be dropped: the tail at every point to return to
    bound: int | None = field(init=False)  # most tokens that are ever held

    def __post_init__(self) -> None:
        """Work out once what every append asks for."""
        kept = None if self.window is None else self.window - 1 + self.rollback
        object.__setattr__(self, "kept", kept)
        object.__setattr__(self, "bound", None if self.window is None or kept is None else kept + slack(self.window))

    def capacity(self, seen: int) -> int:
        """Tokens that the storage has room for after `seen` of them, however they came.

        >>> [Retention(4, rollback=2).capacity(seen) for seen in (0, 3, 20, 1000)]
        [0, 3, 20, 37]
        """
        room = growing_capacity(seen)
        return room if self.bound is None else min(room, self.bound)

    def ring(self, limit: int) -> Ring:
        """The slots of a layer that is fed at most `limit` tokens, all of them allocated at once.

        Nothing ever moves in a ring, so it needs no slack: what must be kept, one more, and up to a multiple of 16,
        which kernels like. Always within the bound.

        >>> Retention(window=512, rollback=64).ring(limit=4096).capacity
        576
        """
        if self.kept is None:
            return Ring(None, limit, limit)
        return Ring(self.window, min(limit, -(-(self.kept + 1) // 16) * 16), limit)

    def append(self, span: Span, new: int, reach: int = 0) -> Append:
        """Decide an append without touching a tensor.

        `reach` newest tokens must be possible to take back afterwards, the new ones included, even if that is more than
        `rollback` and takes more than the bound.

        >>> Retention(4, rollback=2).append(Span(10, 47), 1)  # full: keep the newest 3 + 2, then write
        Append(first=44, span=Span(start=42, end=48), detour=False)
        >>> Retention(4, rollback=2).append(Span(10, 47), 50)
        Append(first=44, span=Span(start=92, end=97), detour=True)
        >>> Retention(4, rollback=2).append(Span(10, 47), 50, reach=50)  # a draft of 50 tokens
        Append(first=44, span=Span(start=44, end=97), detour=False)
        """
        first = span.end - tail_length(span.end, self.window)
        end = span.end + new
        if self.bound is None or self.kept is None or end - span.start <= self.bound:
            return Append(first, Span(span.start, end), detour=False)
        kept = self.kept + max(0, reach - self.rollback)
        room = max(kept, self.bound)
        if end - first > room:
            return Append(first, Span(end - kept, end), detour=True)
        return Append(first, Span(max(span.start, span.end - kept, end - room), end), detour=False)

    def rollback_room(self, span: Span) -> int:
        """How many tokens can be taken back and still leave the next query all that it may see.

        >>> Retention(4).rollback_room(Span(10, 20)), Retention(4).rollback_room(Span(0, 20))
        (7, 20)
        """
        if span.start == 0 or self.window is None:
            return span.end  # nothing was dropped yet: even position 0 can be returned to
        return max(0, span.held - (self.window - 1))
