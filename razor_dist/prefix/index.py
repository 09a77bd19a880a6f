"""The one index of the prefix cache: a radix tree of the token ids of all entries.

Entries are sequences on the device (`razor_dist.prefix.device`) and their copies in host memory and
on disk (`razor_dist.prefix.nodes`). An entry can be cut to any length from its *least cut* to its
end: only for those do the streaming heads' caches have the whole window. A prompt begins from the
longest of its prefixes to which some entry can be cut.
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
# (tokens, tokens before them) -> estimated seconds to prefill them.
PrefillCost = Callable[[float, int], float]


@dataclass(eq=False)
class Entry:
    """A sequence of tokens whose caches are in some tier."""

    key: int  # orders entries that are worth the same
    end: int  # its tokens, from the prompt's first one on
    least_cut: int  # tokens
    used_at: dict[Tier, float]  # by tier: `PrefixIndex.clock` at the last use
    where: set[Tier]  # empty once it has left all tiers


E = TypeVar("E", bound=Entry)


class Match(NamedTuple, Generic[E]):
    """The longest beginning of a prompt that need not be prefilled."""

    entry: E | None  # can be cut to ``tokens`` tokens
    tokens: int
    common: int  # tokens that the prompt has in common with any entry


@dataclass(eq=False)
class _TreeNode:
    edge: Tokens  # the tokens behind the parent's end
    end: int  # tokens from the root
    parent: _TreeNode | None = None
    children: dict[int, _TreeNode] = field(default_factory=dict)  # by the edge's first token
    entries: list[Entry] = field(default_factory=list)  # that end here

    def below(self, kind: type[E]) -> Iterator[E]:
        """Stream the entries of one kind that begin with the tokens up to here."""
        nodes = [self]
        while nodes:
            node = nodes.pop()
            yield from (entry for entry in node.entries if isinstance(entry, kind))
            nodes += node.children.values()


class PrefixIndex:
    """Entries by their tokens, a tree for each namespace.

    An entry's worth is the seconds per byte to prefill it again, plus its tier's clock when it was
    last used. A tier's clock is the largest worth of any entry evicted from it (GreedyDual-Size,
    Cao and Irani 1997). So unused entries fall behind used ones, costly entries more slowly.
    """

    def __init__(self, cost: PrefillCost) -> None:
        self._cost = cost
        self.names = Names(secrets.token_bytes(32))  # a store's own, if there is one
        self.clock: dict[Tier, float] = {"device": 0.0, "host": 0.0, "disk": 0.0}
        self.roots: dict[str, _TreeNode] = {}  # by the names of namespaces
        self._nodes: dict[Entry, tuple[str, _TreeNode]] = {}  # where each entry ends

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, namespace: Namespace | str, tokens: Tokens, entry: Entry) -> None:
        """Add a sequence; a string is a namespace's name, as manifests have it."""
        name = namespace if isinstance(namespace, str) else self.names.namespace(*namespace)
        node = self.roots.setdefault(name, _TreeNode(tokens[:0], 0))
        while node.end < len(tokens):
            rest = tokens[node.end :]
            child = node.children.get(int(rest[0]))
            if child is None:
                child = _TreeNode(rest.copy(), len(tokens), node)
                node.children[int(rest[0])] = child
            elif (same := common_tokens(child.edge, rest)) < len(child.edge):
                child = self._split(child, same)
            node = child
        node.entries.append(entry)
        self._nodes[entry] = name, node

    def _split(self, node: _TreeNode, at: int) -> _TreeNode:
        """Return a new node above ``node`` that takes the first ``at`` tokens of its edge."""
        assert node.parent is not None
        upper = _TreeNode(node.edge[:at].copy(), node.end - len(node.edge) + at, node.parent)
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
        edges, node = [], self._nodes[entry][1]
        while node.parent is not None:
            edges.append(node.edge)
            node = node.parent
        return np.concatenate([node.edge, *reversed(edges)])

    def _path(self, namespace: Namespace, tokens: Tokens) -> list[tuple[_TreeNode, int]]:
        """Return the nodes along a text, deepest first, each with how many tokens match.

        The root is left out, since no token matches there.
        """
        node = self.roots.get(self.names.namespace(*namespace), _TreeNode(tokens[:0], 0))
        path: list[tuple[_TreeNode, int]] = []
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
        """Return the entry that can be cut to the longest prefix of a text, up to ``most`` tokens.

        Entries of one ``kind`` count for which ``among`` is true.
        """
        common: int | None = None
        for node, same in self._path(namespace, tokens):
            below = [entry for entry in node.below(kind) if among(entry)]
            if below and common is None:
                common = same
            length = min(same, most)
            found = [entry for entry in below if entry.least_cut <= length]
            if found and length:
                # The entry with the longest tail: the sequence that continues it inherits the tail.
                best = min(found, key=lambda entry: (entry.least_cut, entry.key))
                return Match(best, length, common or 0)
        return Match(None, 0, common or 0)

    def sharing(
        self, kind: type[E], namespace: Namespace, tokens: Tokens, among: Callable[[E], bool]
    ) -> tuple[E | None, int]:
        """Return the entry with most tokens in common with a text, and the number of these.

        Entries of one ``kind`` count for which ``among`` is true, even if they cannot be cut there.
        """
        for node, same in self._path(namespace, tokens):
            found = next((entry for entry in node.below(kind) if among(entry)), None)
            if found is not None:
                return found, same
        return None, 0

    def covered(self, entry: Entry) -> int:
        """Return how many of an entry's first tokens other entries of its kind can be cut to."""
        node: _TreeNode | None = self._nodes[entry][1]
        while node is not None and node.end:
            others = (other for other in node.below(type(entry)) if other is not entry)
            if any(other.least_cut <= node.end for other in others):
                return node.end
            node = node.parent
        return 0

    def worth(self, entry: Entry, tier: Tier, covered: int, nbytes: float) -> float:
        """Return an entry's worth in a tier where other entries have ``covered`` of its tokens."""
        seconds = self._cost(entry.end - covered, covered)
        return entry.used_at[tier] + seconds / max(1.0, nbytes)

    def went(self, tier: Tier, worth: float) -> None:
        """Note an eviction; an entry worth less than an earlier one leaves the clock as it is."""
        self.clock[tier] = max(self.clock[tier], worth)


def common_tokens(a: Tokens, b: Tokens) -> int:
    """Return the length of the longest common prefix of two texts."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length
