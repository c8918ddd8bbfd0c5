"""The radix tree agrees with a list of texts, whatever is added, split and pruned."""

from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given, strategies as st

from windowkv.prefix.tree import Ids, Node, Tree, prune

TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=12)


def ids(text: list[int]) -> Ids:
    return np.array(text, np.int32)


def agreement(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def added(tree: Tree[str, str], text: list[int]) -> Node[str, str]:
    node, agreed = tree.matches(ids(text))[0]
    if agreed != node.end:
        node = tree.split(node, agreed)
    node = tree.add(node, ids(text))[-1]
    node.checkpoint = str(text)
    return node


def spelt(node: Node[str, str]) -> list[int]:
    return [int(i) for each in node.path() for i in each.ids]


@given(TEXTS, st.lists(st.integers(0, 2), max_size=14), st.integers(1, 5))
def test_a_match_is_the_longest_agreement_with_any_text(texts: list[list[int]], query: list[int], block: int) -> None:
    tree: Tree[str, str] = Tree(block)
    for text in texts:
        node = added(tree, text)
        assert (node.end, spelt(node)) == (len(text), text)
        assert all(each.end - each.start <= block for each in node.path())
    ((node, agreed),) = tree.matches(ids(query))
    assert agreed == max(agreement(text, query) for text in texts)
    assert spelt(node)[:agreed] == query[:agreed]
    assert {node.checkpoint for node in tree.nodes() if node.checkpoint} == {str(text) for text in texts}


@given(TEXTS, st.randoms(use_true_random=False), st.integers(1, 5))
def test_pruning_leaves_what_leads_to_a_checkpoint_and_no_more(
    texts: list[list[int]], random: object, block: int
) -> None:
    tree: Tree[str, str] = Tree(block)
    for text in texts:
        added(tree, text)
    left = {str(text): text for text in texts}
    for node in sorted((n for n in tree.nodes() if n.checkpoint), key=lambda _: random.random()):  # type: ignore[attr-defined]
        del left[str(node.checkpoint)]
        node.checkpoint = None
        prune(node)
        assert {n.checkpoint for n in tree.nodes() if n.checkpoint} == set(left)
        assert all(n.children or n.checkpoint for n in tree.nodes())
        assert all(tree.matches(ids(text))[0][1] == len(text) for text in left.values())
    assert not list(tree.nodes())


def test_the_same_ids_may_stand_for_several_contents() -> None:
    tree: Tree[str, str] = Tree(2)
    for content, text in (("a", [1, 2, 3]), ("b", [1, 2, 3, 4]), ("a", [1, 2, 4])):
        node, agreed = tree.match(ids(text), lambda node, _, content=content: node.block == content)
        if agreed != node.end:
            node = tree.split(node, agreed)
        for each in tree.add(node, ids(text)):
            each.block = content
        added = tree.match(ids(text), lambda node, _, content=content: node.block == content)
        assert (added[0].end, added[1], spelt(added[0])) == (len(text), len(text), text)
        added[0].checkpoint = str(text)
    assert [(node.block, agreed) for node, agreed in tree.matches(ids([1, 2, 3, 4]))] == [("b", 4), ("a", 3)]
    assert sum(node.end == 2 for node in tree.nodes()) == 2
    for node in [node for node in tree.nodes() if node.block == "a" and node.checkpoint]:
        node.checkpoint = None
        prune(node)
    assert [node.block for node in tree.nodes()] == ["b", "b"]


def test_below_reaches_as_far_as_it_is_asked_to() -> None:
    tree: Tree[str, str] = Tree(2)
    added(tree, [1, 2, 3, 4, 5, 6])
    added(tree, [1, 2, 7])
    node, _ = tree.matches(ids([1, 2]))[0]
    assert sorted(each.end for each in node.below(2)) == [2]
    assert sorted(each.end for each in node.below(3)) == [2, 3, 4]


def test_what_would_tear_the_tree_is_refused() -> None:
    tree: Tree[str, str] = Tree(4)
    node = added(tree, [1, 2, 3])
    for at in (0, 3, 4):
        with pytest.raises(ValueError, match=f"token {at} is not within"):
            tree.split(node, at)
