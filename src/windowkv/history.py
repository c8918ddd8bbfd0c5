"""Which token ids a cache has seen, and how far another text agrees with them.

Knows ids. Knows nothing of caches, layers or generate.
"""

import copy

import torch
from torch import Tensor

PADDING = -1  # hidden by the attention mask: agrees with padding only, whatever its id
UNKNOWN = -2  # fed with more than ids, or before ids were recorded: agrees with anything
MISSED = -3  # fed past the recording: agrees with nothing
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
    >>> history.append_same(UNKNOWN, 1)
    >>> len(history), history.common_prefix(torch.tensor([[3, 4, 5, 6, 7]]))
    (4, 4)
    >>> history.common_prefix(torch.tensor([[3, 9]]))
    1
    """

    def __init__(self, tokens: Tensor | None = None) -> None:
        """Start with integers `[B, n]`, or with nothing."""
        self._parts = [] if tokens is None else [tokens.to(torch.int32)]
        self._length = 0 if tokens is None else tokens.shape[1]
        self._padded: Tensor | None = None  # which rows hold padding, bool [B, 1], once that is asked for

    def __len__(self) -> int:
        """Tokens fed."""
        return self._length

    @property
    def complete(self) -> bool:
        """Whether every id is known."""
        return bool((self.tokens >= PADDING).all())

    def under(self, mask: Tensor | None, ids: Tensor) -> Tensor:
        """New ids `[B, q]` as they are to be remembered: MISSED in rows where their mask shows another past than this.

        mask: what hides tokens, of all fed so far and the new ones, `[B, n]`; None hides nothing.
        """
        if mask is None:
            if self._padded is None:
                self._padded = _holds_padding(self.tokens)
            return ids.masked_fill(self._padded.to(ids.device), MISSED)
        past = self.tokens.to(ids.device)
        whole = self._length + ids.shape[1]
        if mask.shape[1] < whole:
            return torch.full_like(ids, MISSED)
        hidden = mask[:, : self._length].to(ids.device) == 0
        other = ((past != UNKNOWN) & (hidden != (past == PADDING))).any(dim=1, keepdim=True)
        return masked_ids(ids, mask[:, self._length : whole]).masked_fill(other, MISSED)

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
        if self._padded is not None:
            self._padded = self._padded.to(ids.device) | _holds_padding(ids)

    def append_same(self, mark: int, count: int) -> None:
        """Add UNKNOWN or MISSED tokens; none for a count below 1."""
        if count > 0:
            self.append(torch.full((1, 1), mark, dtype=torch.int32).expand(1, count))

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        if length < self._length:
            self._parts, self._length, self._padded = [self.tokens[:, :length]], length, None

    def take_rows(self, rows: Tensor) -> None:
        """Make row i what row `rows[i]` was, integers `[B']`."""
        if self.rows > 1:
            self._parts, self._padded = [self.tokens.index_select(0, rows.to(self.tokens.device))], None

    def common_prefix(self, ids: Tensor) -> int:
        """How many of the first tokens agree with ids `[B, n]`, in every row."""
        agreed = 0
        for part in self._parts:
            theirs = ids[:, agreed : agreed + part.shape[1]]
            ours = part[:, : theirs.shape[1]].to(ids.device)
            agree = ((ours == theirs) | (ours == UNKNOWN)).all(dim=0)
            agreed += int(agree.int().cumprod(dim=0).sum())
            if not bool(agree.all()) or theirs.shape[1] < part.shape[1]:
                break
        return agreed

    def fork(self) -> "TokenHistory":
        """An independent history of the same tokens, which it shares."""
        return copy.copy(self)  # no part is ever changed, and no list of them


def _holds_padding(ids: Tensor) -> Tensor:
    """Which rows of ids `[B, n]` hold padding, bool `[B, 1]`."""
    return (ids == PADDING).any(dim=1, keepdim=True)
