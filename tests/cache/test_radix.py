"""The radix index against a list of texts that is searched from end to end."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from razor_dist.prefix.radix import RadixIndex, Tokens

TEXTS = st.lists(st.integers(0, 2), max_size=12)
SPACES = st.sampled_from(["a", "b"])


def ids(text: list[int]) -> Tokens:
    return np.array(text, np.int32)


def common(a: list[int], b: list[int]) -> int:
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return same


class Index(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = RadixIndex()
        self.entries: dict[int, tuple[str, list[int], int]] = {}
        self.keys = 0

    @rule(space=SPACES, text=TEXTS.filter(bool), kept=st.floats(0, 1))
    def add(self, space: str, text: list[int], kept: float) -> None:
        least = round(kept * len(text))
        self.index.add(space, ids(text), self.keys, least)
        self.entries[self.keys] = space, text, least
        self.keys += 1

    @rule(which=st.integers(0, 99))
    def remove(self, which: int) -> None:
        if self.entries:
            key = list(self.entries)[which % len(self.entries)]
            self.index.remove(key)
            del self.entries[key]

    def best(self, space: str, text: list[int], most: int, but: int = -1) -> int:
        """The longest prefix that any entry but one can be cut to."""
        lengths = [0]
        for key, (own, tokens, least) in self.entries.items():
            length = min(common(tokens, text), most)
            if key != but and own == space and length >= least:
                lengths.append(length)
        return max(lengths)

    @rule(space=SPACES, text=TEXTS, most=st.integers(0, 12))
    def match(self, space: str, text: list[int], most: int) -> None:
        found = self.index.match(space, ids(text), most)
        assert found.tokens == self.best(space, text, most)
        shared = [common(t, text) for s, t, _ in self.entries.values() if s == space]
        assert found.common == max(shared, default=0)
        assert (found.key is None) == (found.tokens == 0)
        if found.key is not None:
            own, tokens, least = self.entries[found.key]
            assert own == space and least <= found.tokens <= len(tokens)
            assert tokens[: found.tokens] == text[: found.tokens]

    @rule(which=st.integers(0, 99))
    def covered(self, which: int) -> None:
        if self.entries:
            key = list(self.entries)[which % len(self.entries)]
            space, text, _ = self.entries[key]
            assert self.index.covered(key) == self.best(space, text, len(text), but=key)

    @invariant()
    def texts_are_whole_and_nothing_else_is_kept(self) -> None:
        assert len(self.index) == len(self.entries)
        for key, (_, text, _) in self.entries.items():
            assert self.index.tokens(key).tolist() == text
        # A node that nobody needs would grow into a leak.
        nodes = list(self.index._roots.values())
        assert bool(nodes) == bool(self.entries)
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            assert node.parent is None or node.entries or len(node.children) > 1


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
