"""Fast attention equals its definition, the definition equals a softmax written by hand, and no tensor is L x L."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from windowkv import attention
from windowkv.attention import (
    BLOCK,
    Scoring,
    aligned_attention,
    causal_attention,
    masked_attention,
    ranges_attention,
    visible,
)
from windowkv.window import sees

PLAIN, CAPPED = Scoring(0.3), Scoring(0.3, softcap=2.0)
WITH_SINKS = Scoring(0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))


@pytest.fixture(params=[True, False], ids=["matrix-units", "none"])
def either_processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs with and without matrix units take different ways in bfloat16, and every CPU can go both."""
    monkeypatch.setattr(attention, "has_matrix_units", lambda: request.param)


def states(
    batch: int, heads: int, tokens: int, dim: int = 16, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Tensor:
    """`[batch, heads, tokens, dim]` in the memory order of a model's projections."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, heads, dim, generator=generator).to(dtype).transpose(1, 2)


def problem(
    queries: int, past: int, *, batch: int = 1, kv_heads: int = 2, heads: int = 4, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = (states(batch, kv_heads, past + queries, dtype=dtype, seed=seed) for seed in (1, 2))
    return states(batch, heads, queries, dtype=dtype), keys, values


def window_starts(queries: int, past: int, window: int | None, padding: tuple[int, ...] = (0,)) -> Tensor:
    own = torch.arange(past, past + queries)
    first = torch.zeros_like(own) if window is None else own - (window - 1)
    return torch.tensor(padding)[:, None].maximum(first).minimum(own)


def by_hand(
    query: Tensor, keys: Tensor, values: Tensor, allowed: Callable[[int, int], bool], scoring: Scoring
) -> Tensor:
    """One softmax per query and head, over Python floats."""
    batch, heads, queries, _ = query.shape
    past, group = keys.shape[2] - queries, heads // keys.shape[1]
    out = torch.zeros(batch, heads, queries, values.shape[-1])
    for b in range(batch):
        for h in range(heads):
            for q in range(queries):
                seen = [k for k in range(keys.shape[2]) if allowed(past + q, k)]
                scores = [float(query[b, h, q] @ keys[b, h // group, k]) * scoring.scale for k in seen]
                if scoring.softcap:
                    scores = [scoring.softcap * math.tanh(s / scoring.softcap) for s in scores]
                weights = [math.exp(s) for s in scores]
                total = sum(weights) + (math.exp(scoring.sinks[h]) if scoring.sinks is not None else 0.0)
                for weight, k in zip(weights, seen, strict=True):
                    out[b, h, q] += weight / total * values[b, h // group, k]
    return out


@pytest.mark.parametrize("scoring", [PLAIN, CAPPED, WITH_SINKS], ids=["plain", "softcap", "sinks"])
@pytest.mark.parametrize(("queries", "past"), [(1, 0), (1, 6), (7, 0), (5, 4)])
@pytest.mark.parametrize("window", [1, 3, 8, None])
def test_the_definition_is_a_softmax_over_what_the_window_shows(
    window: int | None, queries: int, past: int, scoring: Scoring
) -> None:
    query, keys, values = problem(queries, past)
    expected = by_hand(query, keys, values, lambda q, k: sees(q, k, window), scoring)
    out = masked_attention(query, keys, values, window_starts(queries, past, window), scoring)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("scoring", [PLAIN, CAPPED, WITH_SINKS], ids=["plain", "softcap", "sinks"])
@pytest.mark.parametrize("window", [1, 2, 40, BLOCK, 10_000, None])
@pytest.mark.parametrize("past", [0, 3, 200])
@pytest.mark.parametrize("queries", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_the_fast_path_equals_the_definition(queries: int, past: int, window: int | None, scoring: Scoring) -> None:
    query, keys, values = problem(queries, past)
    starts = window_starts(queries, past, window)
    expected = masked_attention(query, keys, values, starts, scoring)
    torch.testing.assert_close(ranges_attention(query, keys, values, starts, scoring), expected, atol=1e-5, rtol=0)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_ranges_over_any_shapes(data: st.DataObject) -> None:
    def number(first: int, last: int) -> int:
        return data.draw(st.integers(first, last))

    batch, kv_heads, group = number(1, 3), number(1, 3), number(1, 4)
    queries, past = number(1, 2 * BLOCK + 3), number(0, 300)
    query, keys, values = problem(queries, past, batch=batch, kv_heads=kv_heads, heads=kv_heads * group)
    own = torch.arange(past, past + queries)
    rows = [[number(0, past + queries)] for _ in range(data.draw(st.sampled_from([1, batch])))]
    drawn = torch.randint(
        0, past + queries, (len(rows), queries), generator=torch.Generator().manual_seed(number(0, 99))
    )
    starts = data.draw(st.sampled_from([drawn, torch.tensor(rows).expand(-1, queries)])).minimum(own)
    out = ranges_attention(query, keys, values, starts, PLAIN)
    torch.testing.assert_close(out, masked_attention(query, keys, values, starts, PLAIN), atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("queries", [1, 2 * BLOCK])
def test_ragged_rows_equal_each_row_alone(queries: int, window: int | None) -> None:
    query, keys, values = problem(queries, 90, batch=3)
    padding = (0, 70, 90 + queries - 1)
    together = ranges_attention(query, keys, values, window_starts(queries, 90, window, padding), PLAIN)
    for row, pads in enumerate(padding):
        real = max(0, pads - 90)
        alone = masked_attention(
            query[row : row + 1, :, real:],
            keys[row : row + 1, :, pads:],
            values[row : row + 1, :, pads:],
            window_starts(queries - real, 90 + real - pads, window),
            PLAIN,
        )
        torch.testing.assert_close(together[row : row + 1, :, real:], alone, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("either_processor")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [50, None])
@pytest.mark.parametrize("queries", [1, 200])
def test_low_precision_is_as_near_as_its_rounding(queries: int, window: int | None, dtype: torch.dtype) -> None:
    query, keys, values = problem(queries, 100, dtype=dtype)
    starts = window_starts(queries, 100, window)
    out = ranges_attention(query, keys, values, starts, PLAIN)
    expected = masked_attention(query.float(), keys.float(), values.float(), starts, PLAIN)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=3e-2, rtol=0)


def test_values_may_have_a_size_of_their_own() -> None:
    query, keys, _ = problem(200, 10)
    values = states(1, 2, 210, dim=24)
    starts = window_starts(200, 10, None)
    expected = masked_attention(query, keys, values, starts, PLAIN)
    torch.testing.assert_close(ranges_attention(query, keys, values, starts, PLAIN), expected, atol=1e-5, rtol=0)


def test_views_of_a_larger_storage_are_read_where_they_lie() -> None:
    query, keys, values = problem(9, 40)
    storage = torch.full((2, 1, 2, 100, 16), float("nan"))
    storage[:, :, :, 30:79] = torch.stack((keys, values))
    starts = window_starts(9, 40, 20)
    out = ranges_attention(query, *storage[:, :, :, 30:79], starts, PLAIN)
    torch.testing.assert_close(out, masked_attention(query, keys, values, starts, PLAIN), atol=1e-5, rtol=0)


def test_queries_that_see_nothing_before_themselves_yield_their_own_value() -> None:
    query, keys, values = problem(20, 0, kv_heads=4)
    out = ranges_attention(query, keys, values, torch.arange(20)[None], PLAIN)
    torch.testing.assert_close(out, values, atol=1e-6, rtol=0)


class _Allocations(TorchDispatchMode):
    """Notes the largest storage that an operation makes, beside those that were there before."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out


def largest_allocation(query: Tensor, keys: Tensor, values: Tensor, starts: Tensor, scoring: Scoring) -> int:
    with _Allocations(query, keys, values, starts) as allocations:
        ranges_attention(query, keys, values, starts, scoring)
    return allocations.largest


@pytest.mark.usefixtures("either_processor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_prompt_makes_no_tensor_larger_than_its_own_queries(dtype: torch.dtype) -> None:
    query, keys, values = problem(16_384, 0, kv_heads=1, dtype=dtype)
    largest = largest_allocation(query, keys, values, window_starts(16_384, 0, 512), PLAIN)
    assert largest == query.nbytes  # one mask of all pairs would be 256 times as large


@pytest.mark.usefixtures("either_processor")
@pytest.mark.parametrize("scoring", [PLAIN, WITH_SINKS], ids=["plain", "sinks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_attention_of_a_long_prompt_makes_no_mask_of_all_pairs(dtype: torch.dtype, scoring: Scoring) -> None:
    query, keys, values = problem(4096, 0, kv_heads=1, dtype=dtype)
    largest = largest_allocation(query, keys, values, window_starts(4096, 0, None), scoring)
    assert largest < 4096 * 4096  # bytes: less than even a bool for each pair


@pytest.mark.parametrize(("window", "past", "masks"), [(100, 300, 1), (100, 0, 2), (BLOCK + 2, 0, 3)])
def test_blocks_that_see_alike_share_a_mask(
    window: int, past: int, masks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    make = attention._additive_mask
    monkeypatch.setattr(attention, "_additive_mask", lambda *arguments: made.append(arguments) or make(*arguments))
    query, keys, values = problem(6 * BLOCK, past)
    starts = window_starts(6 * BLOCK, past, window)
    out = ranges_attention(query, keys, values, starts, PLAIN)
    assert len(made) == masks  # one more while the window fills
    torch.testing.assert_close(out, masked_attention(query, keys, values, starts, PLAIN), atol=1e-5, rtol=0)


def test_decoding_copies_no_key_and_makes_no_mask_when_all_rows_see_the_same() -> None:
    query, keys, values = problem(1, 5000)
    assert largest_allocation(query, keys, values, torch.tensor([[17]]), PLAIN) <= 4 * query.nbytes


@pytest.mark.parametrize("past", [0, 1, 1000])
def test_causal_attention_equals_the_definition(past: int) -> None:
    query, keys, values = problem(70, past)
    expected = masked_attention(query, keys, values, window_starts(70, past, None), PLAIN)
    torch.testing.assert_close(causal_attention(query, keys, values, PLAIN.scale), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [1, 3, 8, None])
def test_what_is_visible_is_what_the_window_says(window: int | None) -> None:
    shown = visible(window_starts(6, 5, window), 11)[0]
    assert shown.tolist() == [[sees(query, key, window) for key in range(11)] for query in range(5, 11)]


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("length", [1, 512, 513, 4096, 4097, 5000])
def test_a_single_query_is_exact_however_many_threads_share_its_keys(
    length: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for batch, heads in ((1, 1), (2, 1), (1, 3)):
        query, keys, values = problem(1, length - 1, batch=batch, kv_heads=heads, heads=4 * heads)
        starts = torch.zeros(1, 1, dtype=torch.long)
        expected = masked_attention(query, keys, values, starts, PLAIN)
        torch.testing.assert_close(ranges_attention(query, keys, values, starts, PLAIN), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("queries", "past"), [(1, 0), (1, 7), (9, 0), (5, 12)])
def test_causal_attention_as_accelerators_do_it_is_exact(queries: int, past: int) -> None:
    query, keys, values = problem(queries, past)
    expected = masked_attention(query, keys, values, window_starts(queries, past, None), PLAIN)
    torch.testing.assert_close(aligned_attention(query, keys, values, PLAIN.scale), expected, atol=1e-5, rtol=0)
