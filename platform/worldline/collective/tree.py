"""The canonical tree: the one association in which values of logical shards are added. Pure.

Floating-point addition is not associative, so a sum has the same bits for every world only if the association
is fixed. It is fixed as a complete binary tree over shards 0..V-1 (V a power of two): a node's value is its
left child's plus its right child's. A shard without rows is absent: a node with one absent child has the
value of the other, exactly. Whoever owns a contiguous range of shards can fold it down to its maximal
subtrees, at most about 2*log2(V) of them, and these are all that the others need.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Generic, NamedTuple, TypeVar

from worldline.world import ShardRange

T = TypeVar("T")
Add = Callable[[T, T], T]
"""add(left, right) -> their sum. It may write the sum into `left` and return it."""


class Node(NamedTuple):
    """The subtree over shards [place << level, (place + 1) << level)."""

    level: int
    place: int

    @property
    def parent(self) -> Node:
        return Node(self.level + 1, self.place >> 1)

    @property
    def is_right(self) -> bool:
        return bool(self.place & 1)

    @property
    def start(self) -> int:
        return self.place << self.level

    @property
    def stop(self) -> int:
        return (self.place + 1) << self.level

    @property
    def sibling(self) -> Node:
        return Node(self.level, self.place ^ 1)


def subtrees(owned: ShardRange) -> tuple[Node, ...]:
    """The maximal subtrees that tile [start, stop), from left to right."""
    nodes = []
    start = owned.start
    while start < owned.stop:
        level = (start & -start).bit_length() - 1 if start else owned.stop.bit_length()
        while start + (1 << level) > owned.stop:
            level -= 1
        nodes.append(Node(level, start >> level))
        start += 1 << level
    return tuple(nodes)


def present(nodes: Collection[Node], shards: Collection[int]) -> tuple[Node, ...]:
    """Those of `nodes` with at least one of `shards` under them."""
    return tuple(node for node in nodes if any(shard >> node.level == node.place for shard in shards))


class Fold(Generic[T]):
    """Adds shard values, coming in ascending order, into maximal subtrees, as a binary counter carries.

    Protocol: `push(node, value)` for disjoint subtrees, mostly leaves, that tile a contiguous range from left
    to right, value None where all shards of it are absent;
    then `partials` holds the present maximal subtrees of what was pushed. A value given to `push` belongs to
    the fold; `release` is called with each value that has been added into another and may be used again.
    """

    def __init__(self, add: Add[T], release: Callable[[T], None] = lambda _: None) -> None:
        self._add = add
        self._release = release
        self._stack: list[tuple[Node, T | None]] = []

    def push(self, node: Node, value: T | None) -> None:
        while node.is_right and self._stack and self._stack[-1][0] == node.sibling:
            _, left = self._stack.pop()
            if left is not None and value is not None:
                right, value = value, self._add(left, value)
                self._release(right)
            elif left is not None:
                value = left
            node = node.parent
        self._stack.append((node, value))

    def pop_left_sibling(self, node: Node) -> T | None:
        """Take out the value of the left sibling of `node`, where there is one, to be added to in place.

        The caller pushes the sum back at their parent.
        """
        if node.is_right and self._stack and self._stack[-1][0] == node.sibling:
            value = self._stack[-1][1]
            if value is not None:
                self._stack.pop()
            return value
        return None

    @property
    def partials(self) -> dict[Node, T]:
        return {node: value for node, value in self._stack if value is not None}


def total(partials: Mapping[Node, T], num_shards: int, add: Add[T]) -> T:
    """The root's value from disjoint subtrees that cover every present shard.

    Raises ValueError where `partials` is empty.
    """
    values: dict[Node, T] = dict(partials)
    level = 0
    root_level = num_shards.bit_length() - 1
    while level < root_level:
        for node in sorted(n for n in values if n.level == level):
            if node not in values:
                continue
            if not node.is_right and node.sibling in values:
                values[node.parent] = add(values.pop(node), values.pop(node.sibling))
            else:
                values[node.parent] = values.pop(node)
        level += 1
    if not values:
        raise ValueError("no shard has a value: nothing to add")
    return values[Node(root_level, 0)]
