"""Text comes out in pieces that join to the whole and never split a character."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from razor_dist.frontend import detokenizer
from razor_dist.frontend.assembler import Assembler, TextPiece, decode_one
from razor_dist.frontend.detokenizer import (
    REPLACEMENT,
    Detokenizer,
    StopMatcher,
    TokenTexts,
    token_texts,
)
from razor_dist.protocol.messages import Token
from razor_dist.protocol.sampling_params import SamplingParams
from tests.tokenizer import sentencepiece_tokenizer, smollm2_tokenizer

TOKENIZER = smollm2_tokenizer()
VOCABULARY = len(TOKENIZER)
# Tokens of one byte: most sequences of them are no UTF-8.
BYTES = [i for i in range(VOCABULARY) if len(str(TOKENIZER.convert_ids_to_tokens(i))) == 1]

anything = st.lists(st.integers(0, VOCABULARY - 1), max_size=60)
broken = st.lists(st.sampled_from(BYTES), max_size=60)
special = st.lists(st.sampled_from([*BYTES[100:], 0, 1, 2]), max_size=60)
text = st.text(st.sampled_from("aé😀世界🇫🇷👩‍👩‍👧 \n\u2028\ufffd"), max_size=30).map(
    lambda t: TOKENIZER.encode(t, add_special_tokens=False)
)


SENTENCES = sentencepiece_tokenizer()
SENTENCE_BYTES = range(3, 259)
TIME, A = SENTENCES.convert_tokens_to_ids(["▁time", "▁a"])


def pieces(
    ids: list[int], tokenizer: PreTrainedTokenizerBase = TOKENIZER, *, begins: bool = False
) -> list[str]:
    own = Detokenizer(tokenizer, begins=begins)
    return [*(own.push(token) for token in ids), own.flush()]


@pytest.mark.long
@settings(max_examples=400, deadline=None)
@given(st.one_of(anything, broken, special, text))
@example([])
@example(BYTES[-1:] * 50)
def test_the_pieces_join_to_the_decoded_whole(ids: list[int]) -> None:
    assert "".join(pieces(ids)) == TOKENIZER.decode(ids, skip_special_tokens=True)


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("aé😀世界🇫🇷👩‍👩‍👧 "), max_size=30))
def test_no_piece_of_valid_text_has_half_a_character(text: str) -> None:
    assert REPLACEMENT not in "".join(pieces(TOKENIZER.encode(text, add_special_tokens=False)))


def test_text_comes_as_soon_as_it_is_certain() -> None:
    ids = TOKENIZER.encode("one two 😀!", add_special_tokens=False)
    got = pieces(ids)
    assert got[:2] == ["one", " two"]
    assert got[-2:] == ["!", ""]


def test_the_cost_per_token_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []

    class Counted(TokenTexts):
        def decode(self, ids: Sequence[int], **how: bool) -> str:
            decoded.append(len(ids))
            return super().decode(ids, **how)

    counted = Counted(**vars(token_texts(TOKENIZER)))
    monkeypatch.setattr(detokenizer, "token_texts", lambda tokenizer: counted)
    pieces([BYTES[n % len(BYTES)] for n in range(5000)])
    assert len(decoded) < 2 * 5000 and max(decoded) <= 100


# ------------------------------------------------------------- byte fallback


def continued(ids: list[int]) -> str:
    """Return the text that the tokens add; a special token ends bytes that are characters."""
    parts: list[list[int]] = [[]]
    for token in ids:
        in_bytes = bool(parts[-1]) and parts[-1][-1] in SENTENCE_BYTES
        if token not in SENTENCES.all_special_ids:
            parts[-1].append(token)
        elif in_bytes and not decoded(parts[-1]).endswith(REPLACEMENT):
            parts.append([])
    return "".join(map(decoded, parts))


def decoded(ids: list[int]) -> str:
    return str(SENTENCES.decode([TIME, *ids]))[len("time") :]


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.integers(0, len(SENTENCES) - 1),
            st.sampled_from(SENTENCE_BYTES),
            st.sampled_from([0xE4 + 3, 0xB8 + 3, 0x96 + 3]),
        ),
        max_size=60,
    )
)
@example([0xE4 + 3, 0xB8 + 3, 0x96 + 3, 0xFF + 3, TIME])
@example([0xE4 + 3, 0xB8 + 3, 2, 0x96 + 3])
@example([0xE4 + 3, 0xB8 + 3, 0x96 + 3, 2, 0xFF + 3])
@example([0x41 + 3] * 40 + [A] * 20)
def test_pieces_of_byte_fallback_join_to_the_decoded_whole(ids: list[int]) -> None:
    assert "".join(pieces(ids, SENTENCES)) == continued(ids)


@pytest.mark.parametrize(
    "text", ["世界", "😀😀", "日本語のテスト", "the 世界 says 😀 a time\n", "a👩‍👩‍👧"]
)
def test_bytes_of_characters_come_out_as_characters(text: str) -> None:
    ids = SENTENCES.encode(text, add_special_tokens=False)
    assert SENTENCES.decode(ids) == text
    streamed = pieces(ids, SENTENCES)
    assert "".join(streamed) == f" {text}"
    assert not any(REPLACEMENT in piece for piece in streamed)


@pytest.mark.parametrize("text", ["the time", "世 a", "  a", "", "the world says " * 9])
def test_a_text_begins_without_the_tokenizers_space(text: str) -> None:
    ids = SENTENCES.encode(text)
    assert "".join(pieces(ids, SENTENCES, begins=True)) == text


def test_a_continuation_keeps_its_first_space() -> None:
    assert pieces([TIME, A], SENTENCES) == [" time", " a", ""]
    assert decode_one(SENTENCES, TIME) == " time"
    assert decode_one(SENTENCES, 2) == "</s>"


def test_characters_in_bytes_come_before_a_special_token() -> None:
    """It may begin a tool call."""
    assert pieces([*(byte + 3 for byte in "世".encode()), 2, A], SENTENCES) == [
        *("", "", "", "世", " a", "")
    ]


def offsets(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    assembler = Assembler(tokenizer, SamplingParams())
    return [assembler.push(Token("a", token)).offset for token in ids]


def test_offsets_count_the_characters_of_the_text() -> None:
    ids = [*SENTENCES.encode("a 世 time", add_special_tokens=False)]
    # The word, the space, three bytes of one character, the word after it.
    assert offsets(SENTENCES, ids) == [0, 2, 3, 3, 3, 3]
    assert offsets(TOKENIZER, TOKENIZER.encode("one two 😀!")) == [0, 3, 7, 8, 9]


def test_a_stop_string_of_bytes_ends_the_text() -> None:
    ids = SENTENCES.encode("a 世界 time", add_special_tokens=False)
    assembler = Assembler(SENTENCES, SamplingParams(stop=("界",), logprobs=0))
    got = []
    for token in ids:
        got.append(assembler.push(Token("a", token, -1.0)))
        if got[-1].finish_reason is not None:
            break
    assert "".join(piece.text for piece in got) == " a 世"
    assert got[-1].stop_reason == "界"
    assert [piece.offset for piece in got] == [0, 2, 3, 3, 3, 3, 3, 3, 3]


# -------------------------------------------------------------- stop strings


def literal_stop(text: str, stops: list[str], least: int = 0) -> tuple[str, str | None]:
    """Read letter by letter; stop at the first end of a stop string, the longest there.

    Stop strings that end within the first ``least`` letters are text.
    """
    for end in range(least + 1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=500)
@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.integers(0, 12),
)
@example(["x", "y", "a", "b", "c"], ["abc"], 3)
@example(["a", "a", "a"], ["aa"], 2)
@example(["ab", "x"], ["ab", "abcd"], 1)
def test_stops_are_found_however_the_text_is_cut(
    chunks: list[str], stops: list[str], least: int
) -> None:
    matcher = StopMatcher(stops)
    shown, found = "", None
    for number, chunk in enumerate(chunks):
        safe, found = matcher.push(chunk, may_end=number >= least)
        shown += safe
        if found is not None:
            break
    else:
        shown += matcher.flush()
    text, ignored = "".join(chunks), len("".join(chunks[:least]))
    assert (shown, found) == literal_stop(text, stops, ignored)


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab 世", max_size=12),
    st.lists(st.text("ab 世", min_size=1, max_size=4), max_size=3),
    st.integers(0, 12),
    st.sampled_from([TOKENIZER, SENTENCES]),
)
@example("xyabc", ["abc"], 3, SENTENCES)
def test_a_stop_string_may_begin_within_min_tokens(
    text: str, stops: list[str], least: int, tokenizer: PreTrainedTokenizerBase
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    certain = pieces(ids, tokenizer)
    assembler = Assembler(tokenizer, SamplingParams(stop=tuple(stops), min_tokens=least))
    got: list[TextPiece] = []
    for number, token in enumerate(ids, 1):
        finish = "length" if number == len(ids) else None
        got.append(assembler.push(Token("a", token, -1.0, finish=finish)))
        if got[-1].finish_reason is not None:
            break
    # What is certain only as the answer ends comes with its last token.
    whole = "".join(certain)
    ignored = len("".join(certain[:least])) if least < len(ids) else len(whole)
    shown, stop = literal_stop(whole, stops, ignored)
    assert "".join(piece.text for piece in got) == shown
    assert not got or got[-1].stop_reason == stop
    assert stop is None or len(got) > least


def test_only_a_possible_start_is_held_back() -> None:
    matcher = StopMatcher(["###"])
    assert matcher.push("a#") == ("a", None)
    assert matcher.push("b##") == ("#b", None)
    assert matcher.push("#c") == ("", "###")
