"""Texts as a store knows them: ids, and where in its row of a batch each begins.

Knows ids and padding. Knows nothing of what is stored for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from windowkv.errors import InputError
from windowkv.history import PADDING
from windowkv.prefix.tree import Ids

Tokens = Sequence[int] | Tensor | Ids  # [n], or a tensor [1, n]


@dataclass(frozen=True)
class Text:
    """The ids of one row, whole, and how many padding tokens stand before them."""

    ids: Ids
    padding: int = 0

    @property
    def end(self) -> int:
        """Tokens of its row, padding included."""
        return self.padding + len(self.ids)

    def row(self, end: int) -> Tensor:
        """The first `end` tokens of its row as a history has them, int32 `[1, end]`.

        >>> Text(np.array([7, 8, 9], np.int32), padding=2).row(4).tolist()
        [[-1, -1, 7, 8]]
        """
        padded = np.concatenate((np.full(self.padding, PADDING, np.int32), self.ids))
        return torch.from_numpy(padded[:end])[None]


def as_ids(tokens: Tokens) -> Ids:
    """Ids `[n]` of a list, or of an integer tensor `[n]` or `[1, n]`. Raises InputError for anything else."""
    try:
        tensor = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError) as why:
        raise InputError(f"tokens {tokens!r}: ids are a list of integers, or a tensor [n] or [1, n] of them") from why
    if tensor.ndim == 2 and tensor.shape[0] == 1:
        tensor = tensor[0]
    other = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
    if tensor.ndim != 1 or (tensor.numel() and other) or tensor.is_meta or tensor.layout != torch.strided:
        raise InputError(f"tokens {tensor.dtype} {list(tensor.shape)} {tensor.layout}: ids are integers, [n] or [1, n]")
    ids = tensor.cpu().numpy()
    if len(ids) and not 0 <= ids.min() <= ids.max() <= np.iinfo(np.int32).max:
        raise InputError(f"tokens from {ids.min()} to {ids.max()}: ids are integers from 0 to {np.iinfo(np.int32).max}")
    return ids.astype(np.int32)


def texts_of(ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> list[Text] | None:
    """The texts of a prompt, ids and mask `[B, n]`, positions `[..., B, n]`; one where all rows are equal.

    None where the ids do not tell all: a mask that is no padding on the left, or other positions than their order.
    """
    rows, width = ids.shape
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(ids.device) != 0
    if real.shape != ids.shape or bool((real[:, 1:] < real[:, :-1]).any()) or not bool(real[:, -1:].all()):
        return None
    order = real.cumsum(dim=1) - 1
    if positions is not None and not _in_order(positions, order, real):
        return None
    padding = (width - real.sum(dim=1)).tolist()
    if len(set(padding)) == 1 and bool((ids == ids[:1])[real].all()):
        rows = 1
    held = ids.cpu()
    return [Text(as_ids(held[row, padding[row] :]), padding[row]) for row in range(rows)]


def _in_order(positions: Tensor, order: Tensor, real: Tensor) -> bool:
    if positions.ndim < 1 or positions.shape[-1] != order.shape[1]:
        return False
    return bool(((positions.to(order.device) == order) | ~real).all())
