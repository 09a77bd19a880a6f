"""The index against a list of texts that is searched from end to end."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from razor_dist.prefix.index import Entry, Namespace, PrefixIndex
from razor_dist.prefix.manifest import Tokens

TEXTS = st.lists(st.integers(0, 2), max_size=12)
SPACES = st.sampled_from([("a", 0), ("b", 0)])


class OnDevice(Entry): ...


class Stored(Entry): ...


KINDS = st.sampled_from([OnDevice, Stored])


class Cost:
    def work(self, tokens: float, context: int) -> float:
        return tokens


def ids(text: list[int]) -> Tokens:
    return np.array(text, np.int32)


def common(a: list[int], b: list[int]) -> int:
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return same


class Index(RuleBasedStateMachine):
    """Entries of two kinds, on the device and in the tiers below; a search sees one kind only."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(Cost().work)
        self.entries: dict[Entry, tuple[Namespace, list[int]]] = {}

    @rule(space=SPACES, text=TEXTS.filter(bool), kept=st.floats(0, 1), kind=KINDS)
    def add(self, space: Namespace, text: list[int], kept: float, kind: type[Entry]) -> None:
        least = round(kept * len(text))
        entry = kind(len(self.entries), len(text), least, 0.0, {"device"})
        self.index.add(space, ids(text), entry)
        self.entries[entry] = space, text

    @rule(which=st.integers(0, 99))
    def remove(self, which: int) -> None:
        if self.entries:
            entry = list(self.entries)[which % len(self.entries)]
            self.index.remove(entry)
            del self.entries[entry]

    def best(
        self,
        kind: type[Entry],
        space: Namespace,
        text: list[int],
        most: int,
        but: Entry | None = None,
    ) -> int:
        """The longest prefix to which any entry except ``but`` can be cut."""
        lengths = [0]
        for entry, (own, tokens) in self.entries.items():
            length = min(common(tokens, text), most)
            alike = isinstance(entry, kind) and own == space and entry is not but
            if alike and length >= entry.least_cut:
                lengths.append(length)
        return max(lengths)

    @rule(kind=KINDS, space=SPACES, text=TEXTS, most=st.integers(0, 12))
    def match(self, kind: type[Entry], space: Namespace, text: list[int], most: int) -> None:
        found = self.index.match(kind, space, ids(text), most)
        assert found.tokens == self.best(kind, space, text, most)
        alike = [
            tokens
            for entry, (own, tokens) in self.entries.items()
            if isinstance(entry, kind) and own == space
        ]
        assert found.common == max((common(tokens, text) for tokens in alike), default=0)
        assert (found.entry is None) == (found.tokens == 0)
        if found.entry is not None:
            own, tokens = self.entries[found.entry]
            assert own == space and found.entry.least_cut <= found.tokens <= len(tokens)
            assert tokens[: found.tokens] == text[: found.tokens]

    @rule(which=st.integers(0, 99))
    def covered(self, which: int) -> None:
        if self.entries:
            entry = list(self.entries)[which % len(self.entries)]
            space, text = self.entries[entry]
            best = self.best(type(entry), space, text, len(text), but=entry)
            assert self.index.covered(entry) == best

    @invariant()
    def texts_are_whole_and_nothing_else_is_kept(self) -> None:
        assert len(self.index) == len(self.entries)
        for entry, (_, text) in self.entries.items():
            assert self.index.tokens(entry).tolist() == text
        # A node that nobody needs would grow into a leak.
        nodes = list(self.index.roots.values())
        assert bool(nodes) == bool(self.entries)
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            assert node.parent is None or node.entries or len(node.children) > 1


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_a_prompt_with_nothing_in_common_looks_at_no_entry() -> None:
    """A store may hold thousands of entries, and waiting prompts are looked up at every step."""
    index, space = PrefixIndex(Cost().work), (None, 0)
    for key in range(3):
        index.add(space, ids([key, 5, 6]), Stored(key, 3, 0, 0.0, {"disk"}))

    looked: list[Entry] = []

    def look(entry: Entry) -> bool:
        looked.append(entry)
        return True

    assert index.match(Stored, space, ids([3, 5, 6]), 2, look) == (None, 0, 0)
    assert index.sharing(Stored, space, ids([3, 5, 6]), look) == (None, 0)
    assert not looked
    index.match(Stored, space, ids([2, 5, 6]), 2, look)
    assert looked
