"""transformers' contract for one layer of a cache, over a buffer.

Translates names and signs. Knows nothing of how tokens are stored, and does no arithmetic of its own.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from windowkv.buffers import Buffer
from windowkv.packed_buffer import PackedBuffer
from windowkv.rows import RowSelection
from windowkv.window import kv_range


class BufferedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A full, sliding or chunked layer whose keys and values lie in a buffer."""

    is_compileable = False
    is_croppable = True
    supports_early_init = True

    def __init__(self, buffer: Buffer | PackedBuffer) -> None:
        """Make a layer over that buffer; a retention without a window makes it a full one."""
        self.buffer = buffer

    @property
    def is_sliding(self) -> bool:
        """Whether transformers should size a sliding mask by this layer."""
        return self.buffer.retention.window is not None

    @property
    def is_initialized(self) -> bool:
        """Whether shapes, dtype and device are known."""
        return self.buffer.rows is not None

    @property
    def record_past(self) -> bool:
        """Whether drafts of any length can be taken back; see `windowkv.buffers.Recording`."""
        return self.buffer.recording.on

    @record_past.setter
    def record_past(self, on: bool) -> None:
        self.buffer.recording = replace(self.buffer.recording, on=on)

    def activate_past_recording(self) -> None:
        """Make drafts of any length possible to take back, until the next append."""
        self.record_past = True

    @property
    def keys(self) -> Tensor | None:
        """The keys that the next query sees, `[B, H, min(seen, window - 1), D]`; None before the first update.

        A view, valid until the next update or selection of rows.
        """
        return self.buffer.tail[0] if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:
        """The values that the next query sees, `[B, H, min(seen, window - 1), Dv]`; None before the first update.

        A view, valid until the next update or selection of rows.
        """
        return self.buffer.tail[1] if self.is_initialized else None

    def fork(self) -> "BufferedLayer":
        """An independent layer with the same tokens; see `Buffer.fork`."""
        twin = copy.copy(self)
        twin.buffer = self.buffer.fork()
        return twin

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Fix batch, heads, dtype and device by tensors `[B, H, 0, D]`."""
        self.buffer.append(key_states[:, :, :0], value_states[:, :, :0])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add tokens `[B, H, Q, D]` and return all that they attend to; see `Buffer.append`."""
        return self.buffer.append(key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """`(kv_length, kv_offset)` of what `update` will return for that many new tokens."""
        return kv_range(self.get_seq_length(), query_length, self.buffer.retention.window)

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self.buffer.span.seen

    def get_max_length(self) -> int:
        """-1: a window bounds what is held, not how many tokens may be fed."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Take back `-tokens_to_remove` tokens."""
        self.buffer.take_back(-tokens_to_remove)

    def reset(self) -> None:
        """Forget every token and free the storage."""
        self.buffer.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row `beam_idx[i]` was."""
        self.buffer.take_rows(RowSelection(beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows `indices`, in that order."""
        self.buffer.take_rows(RowSelection(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, next to itself."""
        if self.buffer.rows is not None:
            self.buffer.take_rows(RowSelection(torch.arange(self.buffer.rows).repeat_interleave(repeats)))


def recurrent_states(layer: Any) -> list[Tensor]:
    """The states `[B, ...]` of one of transformers' recurrent or convolutional layers; none of any other."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return []
    states = (*layer.conv_states.values(), *layer.recurrent_states.values())
    return [state for state in states if isinstance(state, Tensor)]
