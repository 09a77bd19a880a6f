"""Cutting texts at chapters, paragraphs and characters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from razor_dist.documents.structure import split


def words(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def characters(texts: Sequence[str]) -> list[int]:
    return [len(text) for text in texts]


@given(st.text(alphabet="ab. \n#é\u3002", max_size=200), st.integers(1, 40))
def test_parts_join_to_the_text_and_fit(text: str, limit: int) -> None:
    parts = split(text, limit, characters)
    assert "".join(parts) == text
    assert all(0 < len(part) <= limit for part in parts)
    # Nothing is cut that need not be: two neighbours never fit together.
    assert all(len(a + b) > limit for a, b in pairwise(parts))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(30, 90))
def test_parts_are_as_few_and_then_as_even_as_paragraphs_allow(
    lengths: list[int], limit: int
) -> None:
    text = "\n".join("word " * length + "\n" for length in lengths)
    sizes = words(split(text, limit, words))
    # The same by trying every bound on a part.
    packed = []
    for bound in range(max(lengths), limit + 1):
        parts = [0]
        for length in lengths:
            if parts[-1] + length > bound:
                parts.append(0)
            parts[-1] += length
        packed.append((len(parts), max(parts)))
    assert (len(sizes), max(sizes)) == min(packed)


def test_a_text_that_is_a_little_too_long_is_halved() -> None:
    text = "\n\n".join("word " * 50 for _ in range(160)) + " end" * 9
    assert words(split(text, 7_600, words)) == [4_000, 4_009]


def test_a_text_may_begin_with_white_space_that_has_no_tokens() -> None:
    assert split("\n\none two\n\nthree", 2, words) == ["\n\none two\n", "\nthree"]


def test_a_text_without_headings_is_counted_twice() -> None:
    counted = 0

    def count(texts: Sequence[str]) -> list[int]:
        nonlocal counted
        counted += sum(map(len, texts))
        return words(texts)

    text = "\n\n".join("word " * 50 for _ in range(160))
    assert len(split(text, 2_000, count)) == 4
    assert counted == 2 * len(text)


@pytest.mark.parametrize(
    ("text", "limit", "parts"),
    [
        ("# A\n\none two\n\n# B\n\nthree\n", 4, ["# A\n\none two\n\n", "# B\n\nthree\n"]),
        (
            "one\n\nCHAPTER I. Tea\n\ntwo three\n\nCHAPTER II\n\nfour\n",
            6,
            ["one\n\nCHAPTER I. Tea\n\ntwo three\n", "\nCHAPTER II\n\nfour\n"],
        ),
        ("# A\n\none\n\n## C\n\ntwo\n", 4, ["# A\n\none\n\n", "## C\n\ntwo\n"]),
        ("one two\n\nthree four\n\nfive", 4, ["one two\n", "\nthree four\n\nfive"]),
        ("one two\nthree four", 3, ["one two\n", "three four"]),
        ("One two. Three four.", 3, ["One two.", " Three four."]),
        ("one two three", 2, ["one two", " three"]),
        ("short", 9, ["short"]),
    ],
)
def test_the_most_significant_boundaries_are_taken(text: str, limit: int, parts: list[str]) -> None:
    assert [part.strip() for part in split(text, limit, words)] == [part.strip() for part in parts]
    assert "".join(split(text, limit, words)) == text
