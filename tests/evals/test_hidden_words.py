"""The needle model's documents."""

from __future__ import annotations

import pytest

from razor_dist.evals.hidden_words import hide_words
from razor_dist.evals.needle.model import MAX_TOKENS
from razor_dist.evals.needle.tokenizer import needle_tokenizer, needle_vocabulary


@pytest.mark.parametrize("tokens", [100, 1024, 5000])
def test_has_its_length_and_its_words_once(tokens: int) -> None:
    document = hide_words(tokens, [0, 50, 100], seed=3)
    ids = needle_tokenizer(MAX_TOKENS)(document.text)["input_ids"]
    assert len(ids) == tokens
    assert needle_vocabulary()["<unk>"] not in ids
    words = document.text.split()
    for hidden in document.hidden:
        assert document.text.count(f"{hidden.sentence}") == 1
        assert all(words.count(word) == 1 for word in (hidden.key, *hidden.words))
    assert words[0] == "remember" and document.text.endswith(document.hidden[2].sentence)


def test_depth_is_where_it_stands() -> None:
    document = hide_words(20_000, [10, 90, 50])
    for hidden in document.hidden:
        place = document.text.index(hidden.sentence) / len(document.text)
        assert place == pytest.approx(hidden.depth / 100, abs=0.01)


def test_a_seed_decides_everything() -> None:
    assert hide_words(500, [50], seed=1) == hide_words(500, [50], seed=1)
    assert hide_words(500, [50], seed=1) != hide_words(500, [50], seed=2)


def test_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="do not hold 3 sentences"):
        hide_words(20, [10, 50, 90])
    with pytest.raises(ValueError, match="percentages"):
        hide_words(100, [101])
