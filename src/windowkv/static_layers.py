"""transformers' contract for one layer of a static cache, over a buffer with fixed addresses.

Translates names and signs, and tells transformers' masks which position lies in which slot. Does no arithmetic.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from windowkv.fixed_buffers import FixedBuffer
from windowkv.rows import RowSelection
from windowkv.window import Ring


@dataclass(frozen=True)
class KeyPositions:
    """What stands for `kv_offset` where keys lie in no order: added to a slot, it gives the position of the key there.

    transformers adds its offset to the slots of keys, and to their number to learn how long a padding mask must be.

    >>> torch.arange(2) + KeyPositions(torch.tensor([8, 5]), end=9)
    tensor([8, 5])
    """

    positions: Tensor  # [kv_length]
    end: int  # all positions are before it

    def __radd__(self, slots: Any) -> Any:
        """The positions of slots, a tensor; the end of all positions, for a count of keys."""
        if isinstance(slots, Tensor):
            return self.positions.to(slots.device)[slots]
        return self.end


class FixedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A full, sliding or chunked layer whose keys and values lie in a `FixedBuffer`."""

    is_compileable = True
    is_croppable = True
    supports_early_init = True

    def __init__(self, ring: Ring) -> None:
        """Make an empty layer; a ring without a window makes it a full one."""
        self.buffer = FixedBuffer(ring)

    @property
    def is_sliding(self) -> bool:
        """Whether transformers should size a sliding mask by this layer."""
        return self.buffer.ring.window is not None

    @property
    def is_initialized(self) -> bool:
        """Whether shapes, dtype and device are known."""
        return self.buffer.keys is not None

    @property
    def keys(self) -> Tensor | None:
        """All slots, `[B, H, capacity, D]`; None before the first update."""
        return self.buffer.keys

    @property
    def values(self) -> Tensor | None:
        """All slots, `[B, H, capacity, Dv]`; None before the first update."""
        return self.buffer.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for tensors `[B, H, any, D]`."""
        self.buffer.allocate(key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add tokens `[B, H, Q, D]` and return all that they attend to; see `FixedBuffer.append`."""
        return self.buffer.append(key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        """`(kv_length, kv_offset)` of what `update` will return for that many new tokens; see `KeyPositions`.

        Raises InputError for more tokens than there is room for.
        """
        buffer = self.buffer
        buffer.check_room(query_length)
        length = buffer.visible_length(query_length)
        if not buffer.ring.wraps:
            return length, 0
        positions = buffer.visible_positions(query_length)
        if torch.compiler.is_compiling():  # dynamo adds no object to a tensor; added to slots, this gives positions too
            return length, positions - torch.arange(length, device=positions.device)
        return length, KeyPositions(positions, buffer.ring.limit + 1)

    def get_seq_length(self) -> Any:
        """Tokens seen: an integer, and a tensor in a compiled graph, which must not depend on it."""
        return self.buffer.seen.clone() if torch.compiler.is_compiling() else int(self.buffer.seen)

    def get_max_length(self) -> int:
        """The most tokens that may be fed."""
        return self.buffer.ring.limit

    def crop(self, tokens_to_remove: int) -> None:
        """Take back `-tokens_to_remove` tokens."""
        self.buffer.take_back(-tokens_to_remove)

    def reset(self) -> None:
        """Forget every token, in place."""
        self.buffer.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row `beam_idx[i]` was, in place."""
        self.buffer.take_rows(RowSelection(beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        """The same: as many rows as there are."""
        self.buffer.take_rows(RowSelection(indices))
