"""Attention over keys in order of position, at the cost of what each query sees.

Knows tensors and, for each query, the first slot that it sees. Knows nothing of models, configs or caches.

Shapes: `B` batch, `H` heads of keys and values, `G` query heads for each of them, `Q` queries, `K` keys, `D` head_dim.
The last query stands at the last key, so query `i` is in slot `K - Q + i`. It sees slots `starts[..., i]` to its own:
that one integer says a window, a chunk, left padding and any mixture of them. Starts lie in the CPU's memory, wherever
the tensors do: which keys a block of queries reads is decided there, and nothing waits for an accelerator.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from windowkv.processor import has_matrix_units

TOKENS = 2  # the dimension of [B, H, T, D] that holds tokens
BLOCK = 128  # queries taken together: as good as any of 64 to 512 on a CPU, for windows of 512 to 4096
_ACCELERATOR_BLOCK = 512  # larger, since every block costs launches there
_SCORES = 1 << 24  # most scores that are held at once
_SHORT, _LONG = 512, 4096  # keys that few heads do not share, and from which on they split them, between threads

_Band = tuple[slice, slice, Tensor]  # queries, the slots that one of them sees, their starts from the first of those


@dataclass(frozen=True)
class Scoring:
    """How products of queries and keys become weights."""

    scale: float
    softcap: float | None = None  # scores s become softcap * tanh(s / softcap), as in Gemma 2
    sinks: Tensor | None = None  # sink logits [H * G] that take part in the softmax and add nothing, as in gpt-oss

    @property
    def plain(self) -> bool:
        """Whether a fused kernel can do it."""
        return self.softcap is None and self.sinks is None


def visible(starts: Tensor, keys: int, slots: slice = slice(None)) -> Tensor:
    """Which slots (all of `keys`, or a slice of them) each query sees: bool `[B, Q, K]` for starts `[B, Q]`.

    >>> visible(torch.tensor([[0, 1, 3]]), 4).int().tolist()
    [[[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]]
    """
    slot = torch.arange(keys, device=starts.device)
    own = slot[keys - starts.shape[-1] :, None]
    return (slot[slots] >= starts[..., None]) & (slot[slots] <= own)


def masked_attention(query: Tensor, keys: Tensor, values: Tensor, starts: Tensor, scoring: Scoring) -> Tensor:
    """The definition: all scores, one mask, one softmax. Slow on purpose; `ranges_attention` must equal it.

    query `[B, H * G, Q, D]`; keys `[B, H, K, D]`; values `[B, H, K, Dv]`; starts integers `[B or 1, Q]`, none beyond
    the query's own slot. Returns `[B, H * G, Q, Dv]`.
    """
    heads, queries = query.shape[1:3]
    scores = (_packed(query, keys.shape[1]) @ keys.mT * scoring.scale).view(-1, heads, queries, keys.shape[TOKENS])
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(~visible(starts.to(query.device), keys.shape[TOKENS])[:, None], float("-inf"))
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores.dtype).view(1, heads, 1, 1).expand(scores.shape[0], heads, queries, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32)[..., : keys.shape[TOKENS]].to(query.dtype)
    return _unpacked(_packed(weights, keys.shape[1]) @ values, queries)


def ranges_attention(query: Tensor, keys: Tensor, values: Tensor, starts: Tensor, scoring: Scoring) -> Tensor:
    """`masked_attention` at the cost of the visible keys; no mask is larger than a block of queries times its band.

    Same arguments and result, up to rounding.
    """
    if query.shape[TOKENS] == 1:
        return decode_attention(query, keys, values, starts, scoring)
    if scoring.plain and values.shape[-1] == keys.shape[-1] and not _products_win(query):
        rows, past = starts[:, -1], keys.shape[TOKENS] - query.shape[TOKENS]
        if torch.equal(starts, rows[:, None].minimum(torch.arange(past, past + starts.shape[1]))):
            return _rows_attention(query, keys, values, rows.tolist(), scoring.scale)
    return _blocks_attention(query, keys, values, starts, scoring)


def decode_attention(query: Tensor, keys: Tensor, values: Tensor, starts: Tensor, scoring: Scoring) -> Tensor:
    """`masked_attention` for one query per row: no mask unless rows differ, and no key or value is repeated."""
    first = int(starts.min())
    if first:
        keys, values, starts = keys[:, :, first:], values[:, :, first:], starts - first
    if len(starts) == 1 or not starts.any():
        return unmasked_attention(query, keys, values, scoring)
    if not scoring.plain:
        return masked_attention(query, keys, values, starts, scoring)
    return _fused_block(query, keys, values, _additive_mask(query, keys, starts), scoring)


def unmasked_attention(query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
    """`decode_attention` where every query sees every key."""
    if not scoring.plain:
        return masked_attention(query, keys, values, torch.zeros(1, 1, dtype=torch.long), scoring)
    length, rows = keys.shape[TOKENS], keys.shape[0] * keys.shape[1]
    # The fused kernel gives each thread whole rows of the batch and heads of keys: with too few of them, some rest.
    # In bfloat16 nothing is gained by employing these.
    resting = query.device.type == "cpu" and rows < torch.get_num_threads() and not _products_win(query)
    if resting and length <= _SHORT:
        return F.scaled_dot_product_attention(query, keys, values, scale=scoring.scale, enable_gqa=True)
    packed = _packed(query, keys.shape[1])
    if resting and length >= _LONG and values.shape[-1] == keys.shape[-1]:
        return _unpacked(_split_attention(packed, keys, values, scoring.scale, parts=2 * torch.get_num_threads()), 1)
    return _unpacked(F.scaled_dot_product_attention(packed, keys, values, scale=scoring.scale), 1)


def causal_attention(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Plain causal attention with the fused kernel, also over a past: query `i` sees slots up to `K - Q + i`.

    That kernel aligns the first query with the first key. But every query sees the whole past, which needs no mask, and
    the two parts are joined by their normalisers, as FlashAttention joins its blocks (arXiv 2205.14135, section 3.1).
    """
    queries, past = query.shape[TOKENS], keys.shape[TOKENS] - query.shape[TOKENS]
    if query.device.type != "cpu":
        return aligned_attention(query, keys, values, scale)
    if not past:
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    near, near_norm = flash(query, keys[:, :, past:], values[:, :, past:], 0.0, True, scale=scale)
    packed = _packed(query, keys.shape[1])
    far, far_norm = flash(packed, keys[:, :, :past], values[:, :, :past], 0.0, False, scale=scale)
    far_share = torch.sigmoid(far_norm.reshape(near_norm.shape) - near_norm)[..., None].to(query.dtype)
    joined: Tensor = near.lerp_(_unpacked(far, queries), far_share)
    return joined


def aligned_attention(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """`causal_attention` where the fused kernels can align the last query with the last key themselves."""
    bias = causal_lower_right(query.shape[TOKENS], keys.shape[TOKENS])
    keys, values = (_repeated(states, query.shape[1]) for states in (keys, values))
    return F.scaled_dot_product_attention(query, keys, values, bias, scale=scale)


def _split_attention(packed: Tensor, keys: Tensor, values: Tensor, scale: float, parts: int) -> Tensor:
    """Attention to parts of the keys, joined by their normalisers.

    As Flash-Decoding does it (https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    even = keys.shape[TOKENS] // parts * parts
    rows = packed.flatten(0, 1)[:, None]
    folded = [
        states[:, :, :even].flatten(0, 1).view(len(rows), parts, -1, states.shape[-1]) for states in (keys, values)
    ]
    out, norm = flash(rows.expand(-1, parts, -1, -1), *folded, 0.0, False, scale=scale)
    if even < keys.shape[TOKENS]:
        rest = [states[:, :, even:].flatten(0, 1)[:, None] for states in (keys, values)]
        last, last_norm = flash(rows, *rest, 0.0, False, scale=scale)
        out, norm = torch.cat((out, last), dim=1), torch.cat((norm, last_norm), dim=1)
    joined: Tensor = (out * norm.softmax(dim=1)[..., None].to(out.dtype)).sum(dim=1)
    return joined.view(packed.shape)


def _rows_attention(query: Tensor, keys: Tensor, values: Tensor, rows: list[int], scale: float) -> Tensor:
    """Causal attention in which row `b` sees nothing before slot `rows[b]`; one entry speaks for all rows."""
    if len(set(rows)) == 1:
        past = keys.shape[TOKENS] - query.shape[TOKENS]
        alone = max(0, rows[0] - past)  # queries that see only themselves, such as padding, yield their own value
        seen = slice(rows[0], None)
        others = causal_attention(query[:, :, alone:], keys[:, :, seen], values[:, :, seen], scale)
        own = _repeated(values[:, :, past : past + alone], query.shape[1])
        return torch.cat((own, others), dim=TOKENS) if alone else others
    parts = (
        _rows_attention(query[row : row + 1], keys[row : row + 1], values[row : row + 1], [start], scale)
        for row, start in enumerate(rows)
    )
    return torch.cat(list(parts))


def _blocks_attention(query: Tensor, keys: Tensor, values: Tensor, starts: Tensor, scoring: Scoring) -> Tensor:
    batch, heads, queries = query.shape[:3]
    # In the order [B, Q, H * G, Dv], which models want next, so that no copy is needed for it.
    out = query.new_empty(batch, queries, heads, values.shape[-1]).transpose(1, 2)
    block = BLOCK if query.device.type == "cpu" else _ACCELERATOR_BLOCK
    bands = _bands(starts, keys.shape[TOKENS], rows=batch * heads, block=block)
    if scoring.plain and not _products_win(query):
        for part, band, mask in _masks(bands, query, keys):
            out[:, :, part] = _fused_block(query[:, :, part], keys[:, :, band], values[:, :, band], mask, scoring)
        return out
    # One place for the scores of all blocks: bands that grow would leave holes behind that fit none of them.
    largest = max((part.stop - part.start) * (band.stop - band.start) for part, band, _ in bands)
    scratch = query.new_empty(batch * heads * largest)
    for part, band, part_starts in bands:
        block_states = query[:, :, part], keys[:, :, band], values[:, :, band]
        out[:, :, part] = _product_block(scratch, *block_states, part_starts, scoring)
    return out


def _bands(starts: Tensor, keys: int, rows: int, block: int) -> list[_Band]:
    """Blocks of queries, the slots that one of them sees, and their starts counted from the first of those slots."""
    queries = starts.shape[1]
    widest = int((torch.arange(keys - queries, keys) - starts).max()) + block
    length = max(1, min(block, _SCORES // (rows * widest)))
    blocks = [slice(first, min(first + length, queries)) for first in range(0, queries, length)]
    lowest = [int(starts[:, block].min()) for block in blocks]
    return [
        (block, slice(low, keys - queries + block.stop), starts[:, block] - low)
        for block, low in zip(blocks, lowest, strict=True)
    ]


def _masks(bands: list[_Band], query: Tensor, keys: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """The bands with masks for their starts. Most blocks of a window see alike and share one: making it takes time."""
    shared: tuple[int, Tensor, Tensor] | None = None  # how many slots, starts, mask
    for part, band, starts in bands:
        slots = band.stop - band.start
        if shared is None or slots != shared[0] or not torch.equal(starts, shared[1]):
            shared = slots, starts, _additive_mask(query[:, :, part], keys[:, :, band], starts)
        yield part, band, shared[2]


def _fused_block(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    packed = _packed(query, keys.shape[1])
    out = F.scaled_dot_product_attention(packed, keys, values, mask, scale=scoring.scale)
    return _unpacked(out, query.shape[TOKENS])


def _product_block(
    scratch: Tensor, query: Tensor, keys: Tensor, values: Tensor, starts: Tensor, scoring: Scoring
) -> Tensor:
    """By matrix products: twice as fast as the fused kernel in bfloat16, and open to softcaps and sink logits.

    Scores are rounded to the tensors' dtype, as in transformers' eager attention.
    """
    batch, heads, queries = query.shape[:3]
    packed = _packed(query * scoring.scale, keys.shape[1])
    scores = scratch[: batch * heads * queries * keys.shape[TOKENS]].view(*packed.shape[:3], -1)
    torch.matmul(packed, keys.mT, out=scores)
    if scoring.softcap is not None:
        scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    scores = scores.view(batch, heads, queries, -1)
    # Between its two edges every query sees every key, so only they are masked.
    device_starts = starts.to(query.device)
    for edge in (slice(0, int(starts.max())), slice(keys.shape[TOKENS] - queries, None)):
        scores[..., edge].masked_fill_(~visible(device_starts, keys.shape[TOKENS], edge)[:, None], float("-inf"))
    return _unpacked(_packed(_weights(scores, scoring), keys.shape[1]) @ values, queries)


def _weights(scores: Tensor, scoring: Scoring) -> Tensor:
    """Their softmax, in the place of the scores where nothing has to be added to them."""
    if scoring.sinks is None:
        return torch.softmax(scores, dim=-1, out=scores)
    sinks = scoring.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]


def _additive_mask(query: Tensor, keys: Tensor, starts: Tensor) -> Tensor:
    """0 where a query sees a key and -inf elsewhere, `[B or 1, 1, G * Q, K]` for packed queries."""
    seen = visible(starts.to(query.device), keys.shape[TOKENS])
    mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(~seen, float("-inf"))
    return mask.repeat(1, query.shape[1] // keys.shape[1], 1)[:, None]


def _products_win(query: Tensor) -> bool:
    """Whether matrix products are faster than the fused kernel, which gains from bfloat16 by matrix units alone."""
    return query.device.type == "cpu" and query.dtype == torch.bfloat16 and not has_matrix_units()


def _packed(states: Tensor, kv_heads: int) -> Tensor:
    """`[B, H * G, Q, D]` -> `[B, H, G * Q, D]`: heads that share keys become rows of one product."""
    return states.reshape(states.shape[0], kv_heads, -1, states.shape[-1])


def _unpacked(states: Tensor, queries: int) -> Tensor:
    """`[B, H, G * Q, D]` -> `[B, H * G, Q, D]`."""
    return states.reshape(states.shape[0], -1, queries, states.shape[-1])


def _repeated(states: Tensor, heads: int) -> Tensor:
    """Keys or values for every query head: `[B, H, K, D]` -> `[B, H * G, K, D]`."""
    return states.repeat_interleave(heads // states.shape[1], dim=1)
