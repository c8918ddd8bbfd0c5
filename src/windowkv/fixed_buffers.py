"""Where keys and values of one layer are stored when no address may change: a ring of slots.

Knows tensors and positions. Knows nothing of models, configs, masks or transformers. What a compiled graph runs is
decided by shapes alone, and how many tokens were seen is a tensor: one graph serves every step.
"""

import torch
from torch import Tensor

from windowkv.errors import InputError, RollbackError
from windowkv.rows import RowSelection
from windowkv.window import Ring

TOKENS = 2  # the dimension of [B, H, T, D] that slots are in


class FixedBuffer:
    """Keys and values of one layer in slots that are allocated once and never move.

    Keys are rotated before they come here, so attention does not care which slot a token lies in; only a mask does.

    >>> buffer = FixedBuffer(Ring(window=2, capacity=4, limit=9))
    >>> states = torch.arange(6.0).reshape(1, 1, 6, 1)
    >>> for token in states.split(1, dim=2):
    ...     keys, values = buffer.append(token, token)
    >>> keys.flatten().tolist(), buffer.visible_positions(0).tolist()
    ([4.0, 5.0, 2.0, 3.0], [4, 5, 2, 3])
    """

    def __init__(self, ring: Ring) -> None:
        """Hold nothing yet: batch, heads, dtype and device are those of the first append."""
        self.ring = ring
        self.seen = torch.zeros((), dtype=torch.int64)  # tokens fed so far
        self.keys: Tensor | None = None  # [B, H, capacity, D]
        self.values: Tensor | None = None  # [B, H, capacity, Dv]
        # The most tokens ever seen, as far as taking back had to learn of it: the rest of the time it is `seen`.
        self._furthest = 0

    @property
    def rows(self) -> int | None:
        """How many texts it holds; None before the first."""
        return None if self.keys is None else self.keys.shape[0]

    def allocate(self, keys: Tensor, values: Tensor) -> None:
        """Fix batch, heads, dtype and device by tensors `[B, H, any, D]`, and all addresses with them."""
        with torch.inference_mode(False):  # an inference tensor could not be written to anywhere else
            shapes = [(*like.shape[:TOKENS], self.ring.capacity, like.shape[-1]) for like in (keys, values)]
            self.keys = torch.zeros(shapes[0], dtype=keys.dtype, device=keys.device)
            self.values = torch.zeros(shapes[1], dtype=values.dtype, device=values.device)
            self.seen = torch.zeros((), dtype=torch.int64, device=keys.device)
        if not torch.compiler.is_compiling():
            for tensor in (self.keys, self.values, self.seen):
                torch._dynamo.mark_static_address(tensor)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add `Q` tokens and return what they attend to, where `visible_positions(Q)` said that it would lie.

        keys `[B, H, Q, D]`, values `[B, H, Q, Dv]`. All slots are returned, or, where new tokens would overwrite what
        the first of them still sees, the tail and the new tokens, copied.

        Raises InputError when the tensors do not fit what is held; nothing changes then.
        """
        if self.keys is None or self.values is None:
            self.allocate(keys, values)
        assert self.keys is not None
        assert self.values is not None
        self._check(keys, values)
        new = keys.shape[TOKENS]
        visible = self.keys, self.values
        if new > self.ring.room:
            tail = self.ring.slots_of(self.seen + self._tail_distances())
            visible = (
                torch.cat((self.keys.index_select(TOKENS, tail), keys), TOKENS),
                torch.cat((self.values.index_select(TOKENS, tail), values), TOKENS),
            )
        kept = min(new, self.ring.capacity)
        slots = self.ring.slots_of(self.seen + torch.arange(new - kept, new, device=self.seen.device))
        self.keys.index_copy_(TOKENS, slots, keys[:, :, new - kept :])
        self.values.index_copy_(TOKENS, slots, values[:, :, new - kept :])
        self.seen.add_(new)
        return visible

    def visible_length(self, new: int) -> int:
        """How many keys `append` will return for that many new tokens."""
        ring = self.ring
        return ring.capacity if new <= ring.room or ring.window is None else ring.window - 1 + new

    def visible_positions(self, new: int) -> Tensor:
        """The position of each key that `append` will return for that many new tokens, `[visible_length(new)]`.

        What was never written stands after every query, so that causality hides it.
        """
        end = self.seen + new
        if new <= self.ring.room:
            slots = torch.arange(self.ring.capacity, device=self.seen.device)
            positions: Tensor = self.ring.position(slots, end)
        else:
            fresh = torch.arange(new, device=self.seen.device)
            positions = self.seen + torch.cat((self._tail_distances(), fresh))
        return torch.where(positions < 0, end, positions)

    def check_room(self, new: int) -> None:
        """Raise InputError when that many new tokens are more than the buffer was made for.

        Says nothing in a compiled graph, nor of a single token on an accelerator, which would have to be waited for.
        """
        if torch.compiler.is_compiling() or (new == 1 and self.seen.device.type != "cpu"):
            return
        needed = int(self.seen) + new
        if needed > self.ring.limit:
            raise InputError(
                f"{new} tokens after {int(self.seen)}: this cache was made for max_cache_len={self.ring.limit} tokens "
                f"in all, and {needed} are needed"
            )

    def check_take_back(self, count: int) -> None:
        """Raise RollbackError when the newest `count` tokens cannot be taken back."""
        seen = int(self.seen)
        room = self.ring.rollback_room(seen, max(seen, self._furthest))
        if not 0 <= count <= room:
            raise RollbackError(
                f"cannot take back {count} tokens: 0 to {room} of the {seen} seen can be; "
                "a cache made with a larger rollback keeps more"
            )

    def take_back(self, count: int) -> None:
        """Forget the newest `count` tokens, at no copy. Raises RollbackError, and changes nothing, beyond the room."""
        self.check_take_back(count)
        self._furthest = max(self._furthest, int(self.seen))
        self.seen.sub_(count)

    def take_rows(self, rows: RowSelection) -> None:
        """Make row i what row `rows.sources[i]` was, as many as there are; only rows that change are copied."""
        for move in [rows.prepare_move(storage) for storage in (self.keys, self.values) if storage is not None]:
            move()

    def clear(self) -> None:
        """Forget every token; storage and addresses stay."""
        self._furthest = 0
        for tensor in (self.seen, self.keys, self.values):
            if tensor is not None:
                tensor.zero_()  # keys too: what is masked still spoils a softmax when it is no number

    def _tail_distances(self) -> Tensor:
        """Where the tail lies, counted from the next position: `[window - 1]`, whatever was seen."""
        return torch.arange(1 - (self.ring.window or 1), 0, device=self.seen.device)

    def _check(self, keys: Tensor, values: Tensor) -> None:
        assert self.keys is not None
        assert self.values is not None
        for name, new, held in (("keys", keys, self.keys), ("values", values, self.values)):
            if (new.shape[0], new.shape[1], new.shape[3]) != (held.shape[0], held.shape[1], held.shape[3]):
                raise InputError(
                    f"{name} [batch, heads, tokens, head_dim] = {list(new.shape)}, but this cache was allocated for "
                    f"batch {held.shape[0]}, heads {held.shape[1]}, head_dim {held.shape[3]}: use a new cache"
                )
            if (new.dtype, new.device) != (held.dtype, held.device):
                raise InputError(
                    f"{name} in {new.dtype} on {new.device}, but this cache was allocated in {held.dtype} on "
                    f"{held.device}: use a new cache"
                )
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise InputError("a cache with fixed addresses carries no gradients: run under torch.no_grad()")
        self.check_room(keys.shape[TOKENS])
