"""Which texts begin alike: a radix tree over token ids.

Knows ids, and which stretch of text each node stands for. Knows nothing of what is stored for it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
BLOCK_TOKENS = 256  # most tokens of a stretch: a split copies less than that
BlockT = TypeVar("BlockT")
CheckpointT = TypeVar("CheckpointT")


@dataclass(eq=False)
class Node(Generic[BlockT, CheckpointT]):
    """A stretch of text: what follows its parent's, up to `end`."""

    ids: Ids  # of this stretch alone
    end: int  # tokens from the root to its end
    parent: "Node[BlockT, CheckpointT] | None" = None
    # By their first id. Several begin alike where what is stored for the same ids is not the same.
    children: "dict[int, list[Node[BlockT, CheckpointT]]]" = field(default_factory=dict)
    block: BlockT | None = None  # what is stored for the stretch
    checkpoint: CheckpointT | None = None  # what is stored for its end

    @property
    def start(self) -> int:
        """Tokens from the root to its beginning."""
        return self.end - len(self.ids)

    def path(self) -> "list[Node[BlockT, CheckpointT]]":
        """The nodes from below the root to here."""
        nodes = []
        node: Node[BlockT, CheckpointT] = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def below(self, limit: int) -> "Iterator[Node[BlockT, CheckpointT]]":
        """This node and those under it that begin before token `limit`."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += [child for alike in node.children.values() for child in alike if child.start < limit]


class Tree(Generic[BlockT, CheckpointT]):
    """Texts by their beginnings; no stretch is longer than `block_tokens`.

    >>> tree = Tree(block_tokens=4)
    >>> tree.add(tree.root, np.array([1, 2, 3, 4, 5, 6], np.int32))[-1].end
    6
    >>> node, agreed = tree.matches(np.array([1, 2, 3, 9], np.int32))[0]
    >>> node.ids.tolist(), agreed
    ([1, 2, 3, 4], 3)
    """

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        """Hold no text yet."""
        self.block_tokens = block_tokens
        self.root: Node[BlockT, CheckpointT] = Node(np.zeros(0, np.int32), 0)

    def matches(self, ids: Ids) -> list[tuple[Node[BlockT, CheckpointT], int]]:
        """Where a text ends or leaves the tree, the furthest first: the last node that agrees with it, and how far.

        That is the node (or the root) that shares a token or more with the text, and how many tokens agree in all.
        There are several only where several nodes begin alike.
        """
        found, waiting = [], [(self.root, 0)]
        while waiting:
            node, agreed = waiting.pop()
            further = self._further(node, agreed, ids)
            waiting += further
            if not further:
                found.append((node, agreed))
        return sorted(found, key=lambda each: -each[1])

    def match(
        self, ids: Ids, same: Callable[[Node[BlockT, CheckpointT], int], bool]
    ) -> tuple[Node[BlockT, CheckpointT], int]:
        """As the first of `matches`, of nodes that are the same up to a token from the root, and whose parents are."""
        node, agreed = self.root, 0
        while True:
            further = (each for each in self._further(node, agreed, ids) if same(*each))
            if (found := next(further, None)) is None:
                return node, agreed
            node, agreed = found

    def add(self, node: Node[BlockT, CheckpointT], ids: Ids) -> list[Node[BlockT, CheckpointT]]:
        """The path of nodes for a text that goes on where a node ends; those that are made have no content yet."""
        for start in range(node.end, len(ids), self.block_tokens):
            part = ids[start : start + self.block_tokens].copy()
            child: Node[BlockT, CheckpointT] = Node(part, start + len(part), node)
            node.children.setdefault(int(part[0]), []).append(child)
            node = child
        return node.path()

    def split(self, node: Node[BlockT, CheckpointT], at: int) -> Node[BlockT, CheckpointT]:
        """End a node's stretch after `at` tokens from the root, in a new node above it, which has no content yet."""
        cut = at - node.start
        if node.parent is None or not 0 < cut < len(node.ids):
            raise ValueError(f"token {at} is not within the stretch from {node.start} to {node.end}")
        upper: Node[BlockT, CheckpointT] = Node(node.ids[:cut].copy(), at, node.parent)
        alike = node.parent.children[int(upper.ids[0])]
        alike[alike.index(node)] = upper
        node.ids, node.parent = node.ids[cut:].copy(), upper
        upper.children[int(node.ids[0])] = [node]
        return upper

    def nodes(self) -> Iterator[Node[BlockT, CheckpointT]]:
        """All of them but the root."""
        return (node for node in self.root.below(1 << 62) if node is not self.root)

    def _further(
        self, node: Node[BlockT, CheckpointT], agreed: int, ids: Ids
    ) -> list[tuple[Node[BlockT, CheckpointT], int]]:
        """The nodes after one that agrees so far with a text, and how far they do."""
        if agreed < node.end or agreed == len(ids):
            return []
        children = node.children.get(int(ids[agreed]), [])
        return [(child, agreed + common_prefix(child.ids, ids[agreed:])) for child in children]


def prune(node: Node[BlockT, CheckpointT]) -> list[Node[BlockT, CheckpointT]]:
    """Take out a node, and those above it, that lead to no checkpoint; tells which."""
    gone = []
    while node.parent is not None and not node.children and node.checkpoint is None:
        alike = node.parent.children[int(node.ids[0])]
        alike.remove(node)
        if not alike:
            del node.parent.children[int(node.ids[0])]
        gone.append(node)
        node = node.parent
    return gone


def common_prefix(one: Ids, other: Ids) -> int:
    """How many of the first ids are equal.

    >>> common_prefix(np.array([1, 2, 3], np.int32), np.array([1, 2, 4, 5], np.int32))
    2
    """
    width = min(len(one), len(other))
    unequal = np.flatnonzero(one[:width] != other[:width])
    return int(unequal[0]) if len(unequal) else width
