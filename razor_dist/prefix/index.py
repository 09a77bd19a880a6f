"""The one index of the prefix cache: what a prompt may begin with, and where its bytes are.

A radix tree over token ids. An entry's caches can be cut anywhere between its *least cut* and its
end: streaming heads' caches have the window of those positions alone. A prompt can begin from the
longest of its prefixes that some entry can be cut to.

Entries are sequences on the device (`razor_dist.prefix.device`) and what was copied of them to host
memory and disk (`razor_dist.prefix.nodes`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeVar

import numpy as np

from razor_dist.prefix.manifest import Names, Tokens

Tier = Literal["device", "host", "disk"]
# A cache salt, and the mark of positions (`razor_dist.models.longrope`).
Namespace = tuple[str | None, int]
# Estimates the seconds of prefilling: of the number of tokens, and of those before them.
PrefillCost = Callable[[float, int], float]


@dataclass(eq=False)
class Entry:
    """A sequence of tokens whose caches are somewhere."""

    key: int  # orders entries that are worth the same
    end: int  # its tokens
    least_cut: int
    used_at: dict[Tier, float]  # the clock of each tier's evictions when it was used last
    where: set[Tier]  # empty once it has left all


E = TypeVar("E", bound=Entry)


class Match(NamedTuple, Generic[E]):
    """The longest beginning of a prompt that can be had without prefilling it."""

    entry: E | None  # which can be cut to ``tokens`` tokens
    tokens: int
    common: int  # tokens that the prompt has in common with any entry


@dataclass(eq=False)
class _Node:
    edge: Tokens  # between its parent's last token and its own
    end: int  # tokens from the root
    parent: _Node | None = None
    children: dict[int, _Node] = field(default_factory=dict)  # by the edge's first token
    entries: list[Entry] = field(default_factory=list)  # that end here

    def below(self, kind: type[E]) -> Iterator[E]:
        """Stream the entries of one kind that begin with the tokens up to here."""
        nodes = [self]
        while nodes:
            node = nodes.pop()
            yield from (entry for entry in node.entries if isinstance(entry, kind))
            nodes += node.children.values()


class PrefixIndex:
    """Entries by their tokens; those of different namespaces know nothing of each other.

    An entry is worth the seconds to prefill it again per byte, plus what the clock said when it was
    used: the most that any evicted entry was worth (GreedyDual-Size). So what is not used loses to
    what is, and a costly one slower than a cheap one. Each tier has a clock of its own.
    """

    def __init__(self, cost: PrefillCost) -> None:
        self._cost = cost
        self.names = Names(secrets.token_bytes(32))  # a store's own, if there is one
        self.clock: dict[Tier, float] = {"device": 0.0, "host": 0.0, "disk": 0.0}
        self.roots: dict[str, _Node] = {}  # of the radix trees, by the names of namespaces
        self._nodes: dict[Entry, tuple[str, _Node]] = {}  # where each entry ends

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, namespace: Namespace | str, tokens: Tokens, entry: Entry) -> None:
        """Enter a sequence; ``namespace`` may be the name that a manifest has of it."""
        name = namespace if isinstance(namespace, str) else self.names.namespace(*namespace)
        node = self.roots.setdefault(name, _Node(tokens[:0], 0))
        while node.end < len(tokens):
            rest = tokens[node.end :]
            child = node.children.get(int(rest[0]))
            if child is None:
                child = _Node(rest.copy(), len(tokens), node)
                node.children[int(rest[0])] = child
            elif (same := common_tokens(child.edge, rest)) < len(child.edge):
                child = self._split(child, same)
            node = child
        node.entries.append(entry)
        self._nodes[entry] = name, node

    def _split(self, node: _Node, at: int) -> _Node:
        """Return a new node between a node and its parent, after some tokens of its edge."""
        assert node.parent is not None
        upper = _Node(node.edge[:at].copy(), node.end - len(node.edge) + at, node.parent)
        node.parent.children[int(node.edge[0])] = upper
        upper.children[int(node.edge[at])] = node
        node.edge, node.parent = node.edge[at:].copy(), upper
        return upper

    def remove(self, entry: Entry) -> None:
        name, node = self._nodes.pop(entry)
        node.entries.remove(entry)
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
            del self.roots[name]

    def tokens(self, entry: Entry) -> Tokens:
        """Return an entry's tokens."""
        edges, node = [], self._nodes[entry][1]
        while node.parent is not None:
            edges.append(node.edge)
            node = node.parent
        return np.concatenate([node.edge, *reversed(edges)])

    def _path(self, namespace: Namespace, tokens: Tokens) -> list[tuple[_Node, int]]:
        """Return nodes, the last first, and the tokens in common with what is below each.

        The root is left out: all that is below it, however much, has nothing in common.
        """
        node = self.roots.get(self.names.namespace(*namespace), _Node(tokens[:0], 0))
        path: list[tuple[_Node, int]] = []
        while node.end < len(tokens):
            child = node.children.get(int(tokens[node.end]))
            if child is None:
                break
            path.append((child, node.end + common_tokens(child.edge, tokens[node.end :])))
            if path[-1][1] < child.end:
                break
            node = child
        return path[::-1]

    def match(
        self,
        kind: type[E],
        namespace: Namespace,
        tokens: Tokens,
        most: int,
        among: Callable[[E], bool] = lambda _: True,
    ) -> Match[E]:
        """Return the entry ``among`` some that can be cut to the longest prefix of a text.

        That has at most ``most`` tokens.
        """
        common: int | None = None
        for node, same in self._path(namespace, tokens):
            below = [entry for entry in node.below(kind) if among(entry)]
            if below and common is None:
                common = same
            length = min(same, most)
            found = [entry for entry in below if entry.least_cut <= length]
            if found and length:
                # The one with the longest tail, which its copy inherits.
                best = min(found, key=lambda entry: (entry.least_cut, entry.key))
                return Match(best, length, common or 0)
        return Match(None, 0, common or 0)

    def sharing(
        self, kind: type[E], namespace: Namespace, tokens: Tokens, among: Callable[[E], bool]
    ) -> tuple[E | None, int]:
        """Return the entry ``among`` some that has most tokens in common with a text, and how many.

        It need not be possible to cut it there.
        """
        for node, same in self._path(namespace, tokens):
            found = next((entry for entry in node.below(kind) if among(entry)), None)
            if found is not None:
                return found, same
        return None, 0

    def covered(self, entry: Entry) -> int:
        """Return how many tokens of an entry could be had from the others of its kind."""
        node: _Node | None = self._nodes[entry][1]
        while node is not None and node.end:
            others = (other for other in node.below(type(entry)) if other is not entry)
            if any(other.least_cut <= node.end for other in others):
                return node.end
            node = node.parent
        return 0

    def worth(self, entry: Entry, tier: Tier, covered: int, nbytes: float) -> float:
        """Return an entry's worth in a tier, if ``covered`` tokens could be had from others."""
        seconds = self._cost(entry.end - covered, covered)
        return entry.used_at[tier] + seconds / max(1.0, nbytes)

    def went(self, tier: Tier, worth: float) -> None:
        """Note an eviction. What costs others their place goes after them, for less than they."""
        self.clock[tier] = max(self.clock[tier], worth)


def common_tokens(a: Tokens, b: Tokens) -> int:
    """Return how many tokens two texts have in common."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length
