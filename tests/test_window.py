import pytest
from hypothesis import given, strategies as st

from windowkv.window import Retention, Span, growing_capacity, kv_range, sees, slack, tail_length

windows = st.one_of(st.none(), st.integers(1, 40))


@given(seen=st.integers(0, 100), new=st.integers(1, 20), window=windows)
def test_kv_range_is_what_the_queries_see(seen: int, new: int, window: int | None) -> None:
    length, offset = kv_range(seen, new, window)
    visible = {key for query in range(seen, seen + new) for key in range(seen + new) if sees(query, key, window)}
    assert visible == set(range(offset, offset + length))


@given(seen=st.integers(0, 100), window=windows)
def test_the_tail_is_what_the_next_query_sees_besides_itself(seen: int, window: int | None) -> None:
    assert tail_length(seen, window) == sum(sees(seen, key, window) for key in range(seen))


@given(held=st.integers(0, 200_000))
def test_growing_wastes_an_eighth_or_1024_tokens_at_most(held: int) -> None:
    capacity = growing_capacity(held)
    assert held <= capacity
    assert capacity - held <= min(held / 8, 1024)


def test_growing_copies_a_token_a_bounded_number_of_times() -> None:
    steps = [held for held in range(1, 8192) if growing_capacity(held) > growing_capacity(held - 1)]
    assert sum(steps) < 16 * 8192


@pytest.mark.parametrize(("window", "most"), [(1, 32), (512, 32), (1024, 64), (4096, 256)])
def test_slack_is_a_sixteenth_of_the_window_or_32(window: int, most: int) -> None:
    assert 1 <= slack(window) <= most


@given(
    window=windows,
    rollback=st.integers(0, 20),
    moves=st.lists(st.tuples(st.integers(0, 120), st.integers(0, 30)), max_size=30),
)
def test_every_point_within_rollback_of_the_furthest_can_be_returned_to(
    window: int | None, rollback: int, moves: list[tuple[int, int]]
) -> None:
    retention, span, furthest = Retention(window, rollback), Span(), 0
    for new, back in moves:
        step = retention.append(span, new)
        assert step.first == span.end - tail_length(span.end, window)
        if not step.detour:
            assert step.span.start <= step.first, "what attention reads must lie in the storage"
        span = step.span
        furthest = max(furthest, span.end)
        assert retention.bound is None or span.held <= retention.bound
        assert span.held <= retention.capacity(furthest)
        assert span.end - retention.rollback_room(span) <= max(0, furthest - rollback)
        back = min(back, retention.rollback_room(span))
        span = Span(span.start, span.end - back)
        assert span.held >= tail_length(span.end, window)
