"""Which row each row of a cache is to become, and moving only those that change.

Knows indices and tensors whose first dimension is rows. Knows nothing of tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from windowkv.errors import InputError


@dataclass(frozen=True)
class RowSelection:
    """Row i is to be what row `sources[i]` was; integers `[B']` that may repeat and leave out.

    >>> RowSelection(torch.tensor([0, 3, 2, 1])).changed.tolist()
    [1, 3]
    """

    sources: Tensor

    @cached_property
    def changed(self) -> Tensor:
        """The rows that are to be other ones than now, `[C]`. An accelerator is waited for, once for all layers."""
        return (self.sources != torch.arange(len(self.sources), device=self.sources.device)).nonzero().flatten()

    def keeps_all(self, held: int | None) -> bool:
        """Whether all of so many rows stay as they are."""
        return len(self.sources) == held and not len(self.changed)

    def prepare_move(self, storage: Tensor) -> Callable[[], None]:
        """All of moving rows within a storage `[B, ...]` that can fail, and what does the rest; B must be B'."""
        if not len(self.changed):
            return lambda: None
        if storage.dtype.itemsize == 1:  # torch copies no rows of float8 into others
            storage = storage.view(torch.uint8)
        changed = self.changed.to(storage.device)
        moved = storage.index_select(0, self.sources[self.changed].to(storage.device))

        def commit() -> None:
            storage.index_copy_(0, changed, moved)

        return commit


def checked_rows(selection: Any, held: int | None) -> RowSelection:
    """A selection from `held` rows, by integers `[B']` or by a mask `[B]`; InputError for rows not there."""
    try:
        rows: Tensor = torch.as_tensor(selection)
    except (TypeError, ValueError, RuntimeError) as why:
        raise InputError(f"rows {selection!r}: they are integers, one for each row that is to be") from why
    if rows.dtype == torch.bool:
        if held is not None and rows.shape != (held,):
            raise InputError(f"a mask of {rows.numel()} rows: this cache holds {held}")
        rows = rows.nonzero().flatten()
    if rows.ndim != 1 or (rows.numel() and (rows.is_floating_point() or rows.is_complex())):
        raise InputError(f"rows {rows.tolist()}: they are integers, one for each row that is to be")
    rows = rows.long()
    # On an accelerator, rows that are not there are its own error, as in transformers.
    if held is None:
        return RowSelection(rows)
    if rows.device.type == "cpu" and rows.numel() and not (-held <= int(rows.min()) and int(rows.max()) < held):
        raise InputError(f"rows {rows.tolist()}: this cache holds rows 0 to {held - 1}")
    return RowSelection(rows.where(rows >= 0, rows + held))
