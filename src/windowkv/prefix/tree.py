"""Which texts begin alike: a radix tree over token ids.

Knows ids, and which stretch of text each node stands for. Knows nothing of what is stored for it.
"""

from collections.abc import Iterator
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
    children: "dict[int, Node[BlockT, CheckpointT]]" = field(default_factory=dict)  # by their first id
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
            waiting += [child for child in node.children.values() if child.start < limit]


class Tree(Generic[BlockT, CheckpointT]):
    """Texts by their beginnings; no stretch is longer than `block_tokens`.

    >>> tree = Tree(block_tokens=4)
    >>> tree.add(np.array([1, 2, 3, 4, 5, 6], np.int32))[-1].end
    6
    >>> node, agreed = tree.match(np.array([1, 2, 3, 9], np.int32))
    >>> node.ids.tolist(), agreed
    ([1, 2, 3, 4], 3)
    """

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        """Hold no text yet."""
        self.block_tokens = block_tokens
        self.root: Node[BlockT, CheckpointT] = Node(np.zeros(0, np.int32), 0)

    def match(self, ids: Ids) -> tuple[Node[BlockT, CheckpointT], int]:
        """The last node that agrees with a text in a token or more (or the root), and how many tokens agree in all."""
        node, agreed = self.root, 0
        while agreed == node.end and agreed < len(ids) and (child := node.children.get(int(ids[agreed]))) is not None:
            node = child
            agreed += common_prefix(child.ids, ids[agreed:])
        return node, agreed

    def add(self, ids: Ids) -> list[Node[BlockT, CheckpointT]]:
        """The path of nodes for a text, the last of which ends where it does; missing ones are made, without content.

        The node in which the text leaves the tree must end there: see `split`.
        """
        node, agreed = self.match(ids)
        if agreed != node.end:
            raise ValueError(
                f"the text leaves the tree after {agreed} tokens, within a node that ends after {node.end}"
            )
        for start in range(agreed, len(ids), self.block_tokens):
            part = ids[start : start + self.block_tokens].copy()
            child: Node[BlockT, CheckpointT] = Node(part, start + len(part), node)
            node.children[int(part[0])] = child
            node = child
        return node.path()

    def split(self, node: Node[BlockT, CheckpointT], at: int) -> Node[BlockT, CheckpointT]:
        """End a node's stretch after `at` tokens from the root, in a new node above it, which has no content yet."""
        cut = at - node.start
        if node.parent is None or not 0 < cut < len(node.ids):
            raise ValueError(f"token {at} is not within the stretch from {node.start} to {node.end}")
        upper: Node[BlockT, CheckpointT] = Node(node.ids[:cut].copy(), at, node.parent)
        node.parent.children[int(upper.ids[0])] = upper
        node.ids, node.parent = node.ids[cut:].copy(), upper
        upper.children[int(node.ids[0])] = node
        return upper

    def nodes(self) -> Iterator[Node[BlockT, CheckpointT]]:
        """All of them but the root."""
        return (node for node in self.root.below(1 << 62) if node is not self.root)


def prune(node: Node[BlockT, CheckpointT]) -> list[Node[BlockT, CheckpointT]]:
    """Take out a node, and those above it, that lead to no checkpoint; tells which."""
    gone = []
    while node.parent is not None and not node.children and node.checkpoint is None:
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
