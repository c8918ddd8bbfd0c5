"""Which token ids a cache has seen, and how far another text agrees with them.

Knows ids. Knows nothing of caches, layers or generate.
"""

import copy

import torch
from torch import Tensor

UNKNOWN = -2  # fed without ids, or with more than ids: agrees with anything
PADDING = -1  # hidden by the attention mask: agrees with padding only, whatever its id
_PARTS = 256  # appends after which they are joined, so that a token costs no copy of all before it


def masked_ids(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Ids `[B, n]` with padding in place of what an attention mask `[B, n]` hides.

    >>> masked_ids(torch.tensor([[7, 8, 9]]), torch.tensor([[0, 1, 1]])).tolist()
    [[-1, 8, 9]]
    """
    return ids if mask is None else ids.masked_fill(mask.to(ids.device) == 0, PADDING)


class TokenHistory:
    """The ids of every token fed so far, in order; a single row speaks for a batch of any size.

    >>> history = TokenHistory()
    >>> history.append(torch.tensor([[3, 4, 5]]))
    >>> history.append_unknown(1)
    >>> len(history), history.common_prefix(torch.tensor([[3, 4, 5, 6, 7]]))
    (4, 4)
    >>> history.common_prefix(torch.tensor([[3, 9]]))
    1
    """

    def __init__(self, tokens: Tensor | None = None) -> None:
        """Start with integers `[B, n]`, or with nothing."""
        self._parts = [] if tokens is None else [tokens.to(torch.int32)]
        self._length = 0 if tokens is None else tokens.shape[1]
        self.interrupted = False  # a forward began and did not end: the layers may hold different tokens

    def __len__(self) -> int:
        """Tokens fed."""
        return self._length

    @property
    def tokens(self) -> Tensor:
        """All of them, int32 `[B, n]`."""
        if len(self._parts) != 1:
            rows = max((len(part) for part in self._parts), default=1)
            parts = [part.expand(rows, -1).to(self._parts[-1].device) for part in self._parts]
            self._parts = [torch.cat(parts, dim=1) if parts else torch.zeros(1, 0, dtype=torch.int32)]
        return self._parts[0]

    @property
    def rows(self) -> int:
        """How many texts they are."""
        return max((len(part) for part in self._parts), default=1)

    def append(self, ids: Tensor) -> None:
        """Add integers `[B, q]`."""
        self._parts = (
            [*self._parts, ids.to(torch.int32)] if len(self._parts) < _PARTS else [self.tokens, ids.to(torch.int32)]
        )
        self._length += ids.shape[1]

    def append_unknown(self, count: int) -> None:
        """Add tokens of which no ids are known; none for a count below 1."""
        if count > 0:
            self.append(torch.full((1, count), UNKNOWN, dtype=torch.int32))

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        if length < self._length:
            self._parts, self._length = [self.tokens[:, :length]], length

    def take_rows(self, rows: Tensor) -> None:
        """Make row i what row `rows[i]` was, integers `[B']`."""
        if self.rows > 1:
            self._parts = [self.tokens.index_select(0, rows.to(self.tokens.device))]

    def repeat_rows(self, repeats: int) -> None:
        """Repeat every row, next to itself."""
        if self.rows > 1:
            self._parts = [self.tokens.repeat_interleave(repeats, dim=0)]

    def common_prefix(self, ids: Tensor) -> int:
        """How many of the first tokens agree with ids `[B, n]`, in every row."""
        width = min(self._length, ids.shape[1])
        known, ids = self.tokens[:, :width].to(ids.device), ids[:, :width]
        agree = ((known == ids) | (known == UNKNOWN)).all(dim=0)
        return int(agree.int().cumprod(dim=0).sum())

    def fork(self) -> "TokenHistory":
        """An independent history of the same tokens, which it shares."""
        return copy.copy(self)  # no part is ever changed, and no list of them
