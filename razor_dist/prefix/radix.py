"""A radix tree over token ids, which finds the cached sequence that begins as a prompt does.

An entry is a sequence of tokens whose caches can be cut anywhere between its *least cut* and its
end: streaming heads' caches have the window of those positions alone. A prompt can begin from the
longest of its prefixes that some entry can be cut to.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


class Match(NamedTuple):
    key: int | None  # of the entry that can be cut to ``tokens`` tokens; None if there is none
    tokens: int
    common: int  # tokens that the prompt has in common with any entry


@dataclass(eq=False)
class _Node:
    edge: Tokens  # between its parent's last token and its own
    end: int  # tokens from the root
    parent: _Node | None = None
    children: dict[int, _Node] = field(default_factory=dict)  # by the edge's first token
    entries: dict[int, int] = field(default_factory=dict)  # that end here: key, least cut

    def below(self) -> Iterator[tuple[int, int]]:
        """Stream key and least cut of each entry that begins with the tokens up to here."""
        nodes = [self]
        while nodes:
            node = nodes.pop()
            yield from node.entries.items()
            nodes += node.children.values()


class RadixIndex:
    """Entries by their tokens; those of different ``spaces`` know nothing of each other."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, _Node] = {}
        self._nodes: dict[int, tuple[Hashable, _Node]] = {}  # where each entry ends

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, namespace: Hashable, tokens: Tokens, key: int, least_cut: int) -> None:
        node = self._roots.setdefault(namespace, _Node(tokens[:0], 0))
        while node.end < len(tokens):
            rest = tokens[node.end :]
            child = node.children.get(int(rest[0]))
            if child is None:
                child = _Node(rest.copy(), len(tokens), node)
                node.children[int(rest[0])] = child
            elif (same := common_tokens(child.edge, rest)) < len(child.edge):
                child = self._split(child, same)
            node = child
        node.entries[key] = least_cut
        self._nodes[key] = namespace, node

    def set_least_cut(self, key: int, least_cut: int) -> None:
        self._nodes[key][1].entries[key] = least_cut

    def _split(self, node: _Node, at: int) -> _Node:
        """Return a new node between a node and its parent, after some tokens of its edge."""
        assert node.parent is not None
        upper = _Node(node.edge[:at].copy(), node.end - len(node.edge) + at, node.parent)
        node.parent.children[int(node.edge[0])] = upper
        upper.children[int(node.edge[at])] = node
        node.edge, node.parent = node.edge[at:].copy(), upper
        return upper

    def remove(self, key: int) -> None:
        namespace, node = self._nodes.pop(key)
        del node.entries[key]
        while node.parent is not None and not node.entries and len(node.children) < 2:
            parent = node.parent
            first = int(node.edge[0])
            if node.children:
                [child] = node.children.values()
                child.edge, child.parent = np.concatenate([node.edge, child.edge]), parent
                parent.children[first] = child
                return
            del parent.children[first]
            node = parent
        if not (node.parent or node.children or node.entries):
            del self._roots[namespace]

    def tokens(self, key: int) -> Tokens:
        """Return an entry's tokens."""
        edges, node = [], self._nodes[key][1]
        while node.parent is not None:
            edges.append(node.edge)
            node = node.parent
        return np.concatenate([node.edge, *reversed(edges)])

    def _path(self, namespace: Hashable, tokens: Tokens) -> list[tuple[_Node, int]]:
        """Return nodes, and the tokens that a text has in common with what is below each."""
        node = self._roots.get(namespace, _Node(tokens[:0], 0))
        path = [(node, 0)]
        while node.end < len(tokens):
            child = node.children.get(int(tokens[node.end]))
            if child is None:
                break
            path.append((child, node.end + common_tokens(child.edge, tokens[node.end :])))
            if path[-1][1] < child.end:
                break
            node = child
        return path

    def match(self, namespace: Hashable, tokens: Tokens, most: int) -> Match:
        """Return the entry that can be cut to the longest prefix of at most ``most`` tokens."""
        path = self._path(namespace, tokens)
        common = path[-1][1]
        for node, same in reversed(path):
            length = min(same, most)
            found = [(least, key) for key, least in node.below() if least <= length]
            if found and length:
                # The one with the longest tail, which its copy inherits.
                return Match(min(found)[1], length, common)
        return Match(None, 0, common)

    def sharing(
        self, namespace: Hashable, tokens: Tokens, among: Callable[[int], bool]
    ) -> tuple[int | None, int]:
        """Return the entry ``among`` some that has most tokens in common with a text, and how many.

        It need not be possible to cut it there.
        """
        for node, same in reversed(self._path(namespace, tokens)):
            found = next((key for key, _ in node.below() if among(key)), None)
            if same and found is not None:
                return found, same
        return None, 0

    def covered(self, key: int) -> int:
        """Return how many tokens of an entry could be had from the others."""
        node: _Node | None = self._nodes[key][1]
        while node is not None and node.end:
            if any(other != key and least <= node.end for other, least in node.below()):
                return node.end
            node = node.parent
        return 0


def common_tokens(a: Tokens, b: Tokens) -> int:
    """Return how many tokens two texts have in common."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length
