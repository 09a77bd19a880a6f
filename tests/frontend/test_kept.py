"""Tokens of a text whose beginning is kept are those of the whole text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from razor_dist.config.errors import RequestError
from razor_dist.frontend.kept import continued, keep
from razor_dist.frontend.prompts import PromptEncoder
from tests.tokenizer import sentencepiece_tokenizer, smollm2_tokenizer

WORDS = ["the", " door", "s", " 12", "3", ".", "\n", "\n\n", "  ", " ", "\r\n", "\t", "'", "'s"]
WORDS += ["世界", "。", "\N{GRINNING FACE}", "é", "e\u0301", "<|im_end|>", "_", "-", "Zürich", "A"]
TEXTS = st.lists(st.sampled_from(WORDS), min_size=0, max_size=24).map("".join)
# The first is that of the embedded model: bytes, split by words; the other has no such split.
ENCODERS = {make: PromptEncoder(make()) for make in (smollm2_tokenizer, sentencepiece_tokenizer)}


@pytest.mark.long
@pytest.mark.parametrize("make", ENCODERS)
@settings(deadline=None, max_examples=400)
@given(end=TEXTS, first=TEXTS, then=TEXTS)
def test_whatever_follows_has_the_tokens_of_the_whole_text(
    make: Callable[[], PreTrainedTokenizerBase], end: str, first: str, then: str
) -> None:
    encoder, begin = ENCODERS[make], "the door of the house\n" * 20 + "the time"
    text = begin + end
    kept = keep(text + first, len(text), *encoder.with_ends(text + first))
    assert kept is not None and kept.length == len(text.rstrip()) and 0 < kept.cut < kept.length
    for rest in (first, then):
        whole = text.rstrip() + rest
        want = encoder.with_ends(whole)
        assert want[0][: len(kept.tokens)].tolist() == kept.tokens.tolist()
        found = continued(encoder, kept, whole)
        assert [part.tolist() for part in found] == [part.tolist() for part in want]


def test_another_beginning_is_refused_and_no_place_is_no_cut() -> None:
    encoder = ENCODERS[smollm2_tokenizer]
    text = "the door of the house"
    kept = keep(text, len(text), *encoder.with_ends(text))
    assert kept is not None and text[kept.cut :] == " house"
    for other in ("the door", "the Door of the house is"):
        with pytest.raises(RequestError, match="does not begin with its context") as error:
            continued(encoder, kept, other)
        assert error.value.param == "context"
    assert keep("世界" * 9, 18, *encoder.with_ends("世界" * 9)) is None


def test_a_context_of_another_tokenizer_is_refused() -> None:
    before, now = ENCODERS.values()
    text = "the door of the house"
    kept = keep(text, len(text), *before.with_ends(text))
    assert kept is not None
    with pytest.raises(RequestError, match="tokenizer makes other tokens of this context") as error:
        continued(now, kept, f"{text} is red")
    assert error.value.param == "context"
