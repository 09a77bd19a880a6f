"""Passages are the sentences that tokens came from, in characters of the text as it was sent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from razor_dist.frontend import passages
from razor_dist.frontend.outputs import AnswerSentence, Source
from razor_dist.frontend.passages import (
    SINKS,
    Part,
    PromptText,
    Trace,
    cited,
    conversation_parts,
    question_begin,
    sentence_around,
    sentences,
)
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.models.registry import resolve_model
from razor_dist.models.tokenizer import load_tokenizer
from razor_dist.protocol.messages import HEADER_SIZE, decoder, encode


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(load_tokenizer(resolve_model("smollm2")))


texts = st.text(st.sampled_from("aß🙂é .!?\n界。A1"), max_size=60)


@settings(max_examples=25)
@given(st.lists(texts, min_size=1, max_size=4))
def test_every_token_is_found_in_the_message_that_it_came_from(
    encoder: PromptEncoder, contents: list[str]
) -> None:
    messages = [{"role": "user", "content": text} for text in contents]
    ids, text = encoder.chat_with_ends(messages)
    assert ids == encoder.chat(messages)
    whole = encoder.chat_text(messages)
    for part in text.parts:
        assert part.message is not None and part.text == contents[part.message]
        assert whole[part.begin : part.begin + len(part.text)] == part.text
    assert [part.message for part in text.parts] == [i for i, c in enumerate(contents) if c.strip()]
    everything = [part._replace(searched=len(part.text)) for part in text.parts]
    for position, end in enumerate(text.ends):
        index, begin, after = PromptText(everything, text.ends).passage(position)
        if index >= 0:
            assert begin <= end - 1 - everything[index].begin < after + 9  # or in the space behind
    assert decoder(PromptText)(encode(text)[HEADER_SIZE:]).parts == text.parts


def test_a_template_may_strip_and_leave_out() -> None:
    contents = {0: "rules", 1: "  user \n", 3: "user"}
    marks = {i: f"<{i}>" for i in contents}
    text, marked = "[user]user[user]user[end]", "[user]<1>[user]<3>[end]"
    parts = conversation_parts(text, marked, marks, contents, 3)
    assert [(p.message, p.begin, p.text) for p in parts] == [(1, 4, "  user \n"), (3, 16, "user")]
    assert text[parts[0].begin + 2 : parts[0].begin + 6] == "user"
    assert [part.searched for part in parts] == [8, 0]


@given(st.data())
def test_a_token_is_in_the_first_part_that_has_it(data: st.DataObject) -> None:
    """Parts overlap where a template has stripped the space between them."""
    parts = [
        Part("x" * size, begin, data.draw(st.integers(0, size)))
        for begin, size in data.draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9))))
    ]
    ends = data.draw(st.lists(st.integers(0, 40), min_size=1))
    text = PromptText(parts, np.array(ends, np.int32))
    for position, end in enumerate(ends):
        having = (n for n, part in enumerate(parts) if 0 < end - part.begin <= part.searched)
        assert text.passage(position)[0] == next(having, -1)


class Looked(list[Any]):
    """A list that counts how many items of it and of its slices are looked at."""

    def __init__(self, items: Iterable[Any], looks: Counter[str] | None = None) -> None:
        super().__init__(items)
        self.looks = Counter[str]() if looks is None else looks

    def __iter__(self) -> Iterator[Any]:
        self.looks["items"] += len(self)
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if isinstance(index, slice):
            return Looked(found, self.looks)
        self.looks["items"] += 1
        return found


def test_the_parts_are_walked_once_for_all_passages() -> None:
    count = 2_000
    parts = Looked(Part("ab. ", 4 * index, 4) for index in range(count))
    text = PromptText(parts, np.arange(1, 4 * count + 1, dtype=np.int32))
    assert [text.passage(4 * count - n)[0] for n in (1, 5)] == [count - 1, count - 2]
    assert all(text.passage(position) for position in range(4 * count - 400, 4 * count))
    assert parts.looks["items"] <= count + 402  # all once, then one for each passage


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("Some text. More.\n\nWhat is it?", "What is it?"),
        ("What is it?", "What is it?"),
        ("Text. " * 200 + "What is it?", "What is it?"),
        ("Text. " * 200 + "\nWhat is it?\nAnswer:", "What is it?\nAnswer:"),
        ("Text. " * 200 + "What is it?\nAnswer:", "What is it?\nAnswer:"),
        ("Text. " * 200 + "\nWhat is it? Be brief.", "What is it? Be brief."),
        ("Text. " * 200 + "What\nis it?", "What\nis it?"),
        ("Text.\n\n" + "word " * 200, ""),
        ("", ""),
    ],
)
def test_the_question_is_the_end(text: str, question: str) -> None:
    begin = question_begin(text)
    if question:
        assert text[begin:] == question
    else:
        assert 500 <= len(text) - begin <= 501 or not text


def test_sentences() -> None:
    text = (
        'He said: "Go! Now." Then e.g. nothing. A wrapped\nline goes on.\n\nA title\nA row 1.5 m\n'
        "界の文。次の文。 it ended. and so on . remember this"
    )
    found, at = [], 0
    while at < len(text):
        begin, end = sentence_around(text, at, len(text))
        found.append(text[begin:end])
        at = end + len(text[end:]) - len(text[end:].lstrip())
    assert found == [
        'He said: "Go!',
        'Now."',
        "Then e.g. nothing.",
        "A wrapped\nline goes on.",
        "A title",
        "A row 1.5 m",
        "界の文。",
        "次の文。",
        "it ended.",
        "and so on .",
        "remember this",
    ]
    assert sentence_around("x" * 9000, 5000, 9000) == (4000, 6000)


def test_a_run_of_white_space_is_looked_at_once() -> None:
    """From each of its characters on, it would take 28 ms for each position asked about."""
    assert sentence_around("End. \n\n \nBegin", 9, 14) == (9, 14)
    for run in (" \n\nB", " \nB", " \n \n"):
        assert passages._BREAK.match(f"a{run}", 1)
        assert not passages._BREAK.match(f"a {run}", 2)


def trace_of(text: str, pairs: list[tuple[int, float]], searched: int | None = None) -> Trace:
    """A trace of a prompt whose tokens are characters."""
    part = Part(text, 0, len(text) if searched is None else searched)
    ends = np.arange(1, len(text) + 1, dtype=np.int32)
    trace = Trace(np.zeros(len(text), np.int32), PromptText([part], ends), None, 2)
    trace.add(pairs)
    return trace


def test_what_is_no_source_is_left_out() -> None:
    text = "One is here. Two is there. Which?"
    pairs = [(0, 0.3), (SINKS, 0.1), (6, 0.1), (20, 0.2), (28, 0.2), (len(text) + 5, 0.1)]
    sources, grounded = trace_of(text, pairs, text.index("Which")).sources()
    assert [source.text for source in sources] == ["One is here.", "Two is there."]
    assert [source.weight for source in sources] == [pytest.approx(0.5), pytest.approx(0.5)]
    assert grounded == pytest.approx(0.5)
    assert all(text[s.start : s.end] == s.text for s in sources)
    assert trace_of(text, []).whole() == ([], None, None)


def test_token_ids_are_cut_into_runs() -> None:
    trace = Trace(np.zeros(100, np.int32), None, None, 5)
    trace.add([(30, 0.2), (31, 0.2), (40, 0.1), (80, 0.3), (120, 0.2)])
    sources, _ = trace.sources()
    assert [(s.start, s.end) for s in sources] == [(30, 41), (80, 81)]
    assert all(source.text is None for source in sources)
    trace.tokens = [[(0, 0.9), (120, 0.1)]]  # nothing but the first tokens and the answer
    assert trace.whole() == ([], 0.0, None)


def test_every_token_may_come_from_another_passage() -> None:
    text = "One is here. Two is there. Which?"
    trace = trace_of(text, [(6, 0.8), (0, 0.2)])
    trace.add([(0, 0.6), (20, 0.3), (8, 0.1)])
    trace.add([(0, 1.0)])
    sources, grounded = trace.sources()
    assert [source.weight for source in sources] == [pytest.approx(0.75), pytest.approx(0.25)]
    assert grounded == pytest.approx((0.8 + 0.3) / 1.2)


def test_a_sentence_looks_at_its_own_tokens_alone() -> None:
    trace = trace_of("One is here. Which?", [])
    looked = Looked(trace.tokens)
    trace.tokens = looked
    for n in range(500):
        trace.add([(6, 1.0)], 3 * n, "It.")
        trace.add([], 3 * n + 3, " ")
    found = trace.sentences([(3 * n, 3 * n + 3) for n in range(500)])
    assert len(found) == 500 and looked.looks["items"] < 5 * len(looked)


def test_every_sentence_of_an_answer_has_its_own_sources() -> None:
    text = "One is here. Two is there. Which?"
    trace = trace_of(text, [])  # of the first token nothing is told
    answer = "It is two.  Then one. And so on."
    two, one = [(20, 0.6), (0, 0.4)], [(6, 0.9), (20, 0.1)]
    tokens = ((2, two), (5, two), (9, []), (10, one), (16, one), (20, one), (21, []))
    found = []
    for index, (begin, pairs) in enumerate(tokens):
        end = tokens[index + 1][0] if index + 1 < len(tokens) else len(answer)
        trace.add(pairs, begin, answer[0 if index == 0 else begin : end])
        found += trace.sentences(trace.ended())
        assert len(found) == (begin >= 10) + (begin >= 21), "told once the next one begins"
    trace.add(two, len(answer))  # the end of the sequence, which is of no sentence
    found += trace.sentences(trace.ended(last=True))
    words = [answer[sentence.start : sentence.end] for sentence in found]
    assert words == ["It is two.", "Then one.", "And so on."]
    told = [[(s.text, pytest.approx(s.weight)) for s in sentence.sources] for sentence in found]
    assert told == [
        [("Two is there.", 1.0)],
        [("One is here.", 0.9), ("Two is there.", 0.1)],
        [],
    ]
    assert [sentence.grounded for sentence in found] == [
        pytest.approx(1.0),
        pytest.approx(0.9),
        None,
    ]
    assert trace.ended(last=True) == []
    padded = f" {text}\n\nx"
    assert [padded[begin:end] for begin, end in sentences(padded)] == [
        "One is here.",
        "Two is there.",
        "Which?",
        "x",
    ]


def asked(question: str, *texts: str) -> tuple[PromptText, list[Source]]:
    """A conversation whose last message ends with a question, and all its passages."""
    parts = [Part(text, 0, len(text), index) for index, text in enumerate(texts)]
    last = parts[-1]
    parts[-1] = last._replace(text=last.text + question)
    found = [
        Source(begin, end, 0.5, part.text[begin:end], part.message)
        for part in parts
        for begin, end in sentences(part.text[: part.searched])
    ]
    return PromptText(parts, np.zeros(0, np.int32)), found


def test_the_passage_with_the_questions_words_matches_it_best() -> None:
    text, found = asked(
        "What is the number of ROME?",
        "The number of Oslo is 3. Nothing. ",
        "The number of Rome is 5. A romeo. ",
    )
    oslo, nothing, rome, romeo = (text.question_match(source) for source in found)
    # Of four passages (estimated: 68 characters are fewer than two of 100, so none has no word).
    twice, once = (math.log(1 + 0.5 / (n + 0.5)) for n in (2, 1))
    assert rome == 1 and nothing == romeo == 0  # a word within another does not count
    assert oslo == pytest.approx(4 * twice / (4 * twice + once))  # the, number, of, is


def test_a_question_without_words_of_the_text_matches_nothing() -> None:
    text, [source] = asked("Pourquoi?", "Some words. ")
    assert text.question_match(source) is None


def test_letters_that_grow_move_nothing() -> None:
    # The small letters of this one are two characters.
    text, found = asked("Which is red?", "\u0130. The red one. A blue one. ")
    assert [text.question_match(source) for source in found] == [0, 1, 0]


def test_words_that_are_everywhere_do_not_count() -> None:
    text, found = asked("The red one?", "The sky is the sea. The red door. " + "The end. " * 99)
    assert [text.question_match(source) for source in found[:2]] == [0, 1]


@given(st.lists(st.sampled_from(["ab", "cd", "ef", "gh.", "ij!", "kl?"]), min_size=1, max_size=30))
def test_a_match_is_a_share_and_one_passage_has_all_of_it(words: list[str]) -> None:
    text, found = asked("ab ef gh?", " ".join(words) + ". ")
    matches = [text.question_match(source) for source in found]
    if {"ab", "ef", "gh."} & set(words):
        assert max(m for m in matches if m is not None) == pytest.approx(1)
        assert all(m is not None and 0 <= m <= 1 for m in matches)
    else:
        assert set(matches) == {None}


@pytest.mark.parametrize(("grounded", "count"), [(0.4, 1), (0.39, 0), (None, 0)])
def test_a_sentence_cites_what_weighs_enough_if_it_is_sure(
    grounded: float | None, count: int
) -> None:
    own = [Source(0, 9, weight, "A passage") for weight in (0.1, 0.09)]
    assert cited(AnswerSentence(0, 5, own, grounded)) == own[:count]
