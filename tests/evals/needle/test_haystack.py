"""The needle model's documents."""

from __future__ import annotations

import pytest

from razor_dist.config.errors import ConfigError
from razor_dist.evals.needle.documents import hide_words
from razor_dist.evals.needle.model import MAX_TOKENS, needle_tokenizer, needle_vocabulary
from razor_dist.evals.texts import Corpus, same_haystack


@pytest.mark.parametrize("tokens", [100, 1024, 5000])
def test_has_its_length_and_its_words_once(tokens: int) -> None:
    text, facts = hide_words(tokens, [0, 50, 100], seed=3)
    ids = needle_tokenizer(MAX_TOKENS)(text)["input_ids"]
    assert len(ids) == tokens
    assert needle_vocabulary()["<unk>"] not in ids
    words = text.split()
    for fact in facts:
        assert text.count(fact.sentence) == 1
        assert all(words.count(word) == 1 for word in (fact.subject, *fact.answer.split()))
    assert words[0] == "remember" and text.endswith(facts[2].sentence)


def test_depth_is_where_it_stands() -> None:
    text, facts = hide_words(20_000, [10, 90, 50])
    for fact in facts:
        place = text.index(fact.sentence) / len(text)
        assert place == pytest.approx(fact.depth / 100, abs=0.01)


def test_a_seed_decides_everything() -> None:
    assert hide_words(500, [50], seed=1) == hide_words(500, [50], seed=1)
    assert hide_words(500, [50], seed=1) != hide_words(500, [50], seed=2)


def test_what_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="do not hold 3 sentences"):
        hide_words(20, [10, 50, 90])
    with pytest.raises(ConfigError, match="depths must be a percentage from 0 to 100"):
        hide_words(100, [101])


def test_engines_in_turn_tokenise_the_text_once_each() -> None:
    name, text = Corpus.of("noise")
    tokenizers = [needle_tokenizer(MAX_TOKENS) for _ in range(2)]
    one, other, again, last = (same_haystack(name, text, each) for each in tokenizers * 2)
    assert one is again is not other is last
