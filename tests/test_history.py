"""What a cache remembers of its text: ids, padding, rows, and gaps of which nothing is known."""

import copy
import pickle
from typing import Any

import pytest
import torch

from tiny import tokens
from windowkv.history import MISSED, PADDING, UNKNOWN, TokenHistory, masked_ids


def history(*parts: list[list[int]]) -> TokenHistory:
    made = TokenHistory()
    for part in parts:
        made.append(torch.tensor(part))
    return made


def test_a_common_prefix_ends_where_any_row_differs() -> None:
    known = history([[1, 2, 3], [1, 2, 3]], [[4], [5]])
    assert known.common_prefix(torch.tensor([[1, 2, 3, 4, 9], [1, 2, 3, 5, 9]])) == 4
    assert known.common_prefix(torch.tensor([[1, 2, 3, 4], [1, 7, 3, 5]])) == 1
    assert known.common_prefix(torch.tensor([[1, 2], [1, 2]])) == 2
    assert known.common_prefix(torch.zeros(2, 0, dtype=torch.long)) == 0


def test_one_row_speaks_for_a_batch() -> None:
    assert history([[1, 2, 3]]).common_prefix(torch.tensor([[1, 2, 3], [1, 2, 4]])) == 2
    assert history([[1, 2]], [[3], [4]]).tokens.tolist() == [[1, 2, 3], [1, 2, 4]]


def test_padding_agrees_with_padding_alone() -> None:
    ids, mask = torch.tensor([[0, 0, 7]]), torch.tensor([[0, 0, 1]])
    known = history(masked_ids(ids, mask).tolist())
    assert known.tokens.tolist() == [[PADDING, PADDING, 7]]
    assert known.common_prefix(masked_ids(ids + torch.tensor([[5, 5, 0]]), mask)) == 3
    assert known.common_prefix(ids) == 0
    assert history(ids.tolist()).common_prefix(masked_ids(ids, mask)) == 0


def test_what_is_not_known_agrees_with_anything() -> None:
    known = history([[1, 2]])
    known.append_same(UNKNOWN, 2)
    known.append(torch.tensor([[5]]))
    known.append_same(UNKNOWN, 0)
    assert known.tokens.tolist() == [[1, 2, UNKNOWN, UNKNOWN, 5]]
    assert known.common_prefix(torch.tensor([[1, 2, 9, 8, 5, 6]])) == 5
    assert known.common_prefix(torch.tensor([[1, 2, 9, 8, 4]])) == 4


def test_what_was_missed_agrees_with_nothing() -> None:
    known = history([[1, 2]])
    known.append_same(MISSED, 1)
    assert known.common_prefix(torch.tensor([[1, 2, 3]])) == 2
    assert known.common_prefix(torch.tensor([[1, 2, MISSED + 1]])) == 2


@pytest.mark.parametrize(
    ("mask", "remembered"),
    [
        (None, [[MISSED, MISSED], [3, 4]]),
        ([[0, 1, 1, 1], [1, 1, 1, 1]], [[3, 4], [3, 4]]),
        ([[0, 1, 0, 1], [1, 1, 1, 0]], [[PADDING, 4], [3, PADDING]]),
        ([[1, 1, 1, 1], [1, 0, 1, 1]], [[MISSED, MISSED]] * 2),
        ([[0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 0, 0]], [[3, 4], [MISSED, MISSED]]),
        ([[1, 1], [1, 1]], [[MISSED, MISSED]] * 2),
    ],
)
def test_what_is_fed_under_another_past_agrees_with_nothing(mask: Any, remembered: Any) -> None:
    known = history([[PADDING, 2], [1, 2]])
    ids = torch.tensor([[3, 4], [3, 4]])
    assert known.under(None if mask is None else torch.tensor(mask), ids).tolist() == remembered


def test_thousands_of_single_tokens_are_all_remembered() -> None:
    known, ids = TokenHistory(), tokens(2, 3000)
    for column in ids.split(1, dim=1):
        known.append(column)
    assert torch.equal(known.tokens, ids.int())
    assert len(known) == 3000


def test_truncated_and_forked_histories_are_independent() -> None:
    known = history([[1, 2, 3, 4]])
    twin = known.fork()
    twin.truncate(2)
    twin.append(torch.tensor([[9]]))
    known.append(torch.tensor([[5]]))
    known.truncate(100)
    assert (twin.tokens.tolist(), known.tokens.tolist()) == ([[1, 2, 9]], [[1, 2, 3, 4, 5]])
    assert (len(twin), len(known)) == (3, 5)


def test_rows_follow_the_caches_rows() -> None:
    known = history([[1, 2], [3, 4]])
    known.take_rows(torch.tensor([0, 0, 1, 1]))
    assert known.tokens.tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]
    known.take_rows(torch.tensor([3, 0]))
    assert known.tokens.tolist() == [[3, 4], [1, 2]]
    single = history([[1, 2]])
    single.take_rows(torch.tensor([2, 1]))  # of a cache with three rows that share this text
    assert single.tokens.tolist() == [[1, 2]]


def test_it_is_copied_and_pickled_with_its_cache() -> None:
    for twin in (copy.deepcopy(history([[1, 2]])), pickle.loads(pickle.dumps(history([[1, 2]])))):
        twin.append(torch.tensor([[3]]))
        assert twin.tokens.tolist() == [[1, 2, 3]]


def test_padding_is_known_of_rows_that_come_and_go() -> None:
    ids = torch.tensor([[3], [3]])
    known = history([[PADDING, 2], [1, 2]])
    assert known.under(None, ids).tolist() == [[MISSED], [3]]
    known.append(ids)
    assert known.under(None, ids).tolist() == [[MISSED], [3]]
    known.append(torch.tensor([[4], [PADDING]]))
    assert known.under(None, ids).tolist() == [[MISSED], [MISSED]]
    known.truncate(3)
    assert known.under(None, ids).tolist() == [[MISSED], [3]]
    known.take_rows(torch.tensor([1, 0]))
    assert known.under(None, ids).tolist() == [[3], [MISSED]]
    known.take_rows(torch.tensor([0]))
    known.append(torch.tensor([[7], [8]]))  # one row that serves two
    assert known.under(None, ids).tolist() == [[3], [3]]
