"""Citations of ``/v1/messages``: the places in texts, blocks and pages that answers came from."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from razor_dist.api.formats import Format
from razor_dist.api.parsing import ParsedRequest
from razor_dist.api.responses_format import FORMATS
from razor_dist.config.errors import RequestError
from razor_dist.documents.read import Document
from razor_dist.frontend.answers import Choice
from razor_dist.frontend.assembler import TextPiece
from razor_dist.frontend.passages import Trace
from tests.documents import files
from tests.server.message_bodies import (
    asking,
    client,
    content_source,
    document,
    parse,
    pdf_source,
    prompt_of,
    text_source,
    through_client,
)
from tests.server.process import ServerProcess, server_on
from tests.tokenizer import smollm2_tokenizer

SCRIPTS = ["grass", "Größe", "\N{GRINNING FACE}", "数据", "\U0001f468\u200d\U0001f469", "e\u0301"]
words = st.lists(st.sampled_from(SCRIPTS), min_size=1, max_size=4).map(" ".join)
# With what follows each sentence.
gaps = st.sampled_from([". ", ".\r\n", ".\n\n", ".\r\n\r\n", "\u3002", "! ", "?\n"])


@st.composite
def texts(draw: st.DrawFn, number: int) -> list[str]:
    """Texts of sentences, each of which has a number of its own, counted from ``number``."""
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        text = draw(st.sampled_from(["", "\r\n ", "\ufeff"]))
        for _ in range(draw(st.integers(1, 4))):
            number += 1
            text += f"The {draw(words)} no{number}{draw(gaps)}"
        parts.append(text)
    return parts


@st.composite
def documents(draw: st.DrawFn) -> list[tuple[str, list[str]]]:
    """Kinds of documents, with their parts' texts: one text, blocks, or pages."""
    kinds = draw(st.lists(st.sampled_from(["text", "content", "pdf"]), min_size=1, max_size=4))
    return [(kind, draw(texts(100 * (n + 1)))) for n, kind in enumerate(kinds)]


def looking_at(request: ParsedRequest, marks: Sequence[str]) -> list[int]:
    """The position of the token that ends in each mark, found without the code under test."""
    prompt = prompt_of(request)
    encoded = smollm2_tokenizer()(prompt, return_offsets_mapping=True, add_special_tokens=False)
    assert encoded["input_ids"] == request.prompts[0].tokens.tolist()
    places = encoded["offset_mapping"]
    last = [prompt.index(mark) + len(mark) - 1 for mark in marks]
    return [next(n for n, (a, b) in enumerate(places) if a <= at < b) for at in last]


def traced(request: ParsedRequest, said: Sequence[tuple[str, int, float]]) -> Choice:
    """An answer of these texts, each of which looks at a position with a weight."""
    prompt = request.prompts[0]
    trace = Trace(prompt.tokens, prompt.text, None, prompt.params.return_sources)
    choice, offset = Choice(prompt.tokens), 0
    for n, (text, position, weight) in enumerate(said):
        trace.add([(position, weight), (0, 1 - weight)], offset, text)
        last = "stop" if n == len(said) - 1 else None
        piece = TextPiece(5, text, None, last, offset=offset)
        choice.pieces.append(asyncio.run(choice.traced(trace, piece)))
        offset += len(text)
    return choice


def plain(message: Any) -> list[Any]:
    """Texts and citations of a message."""
    return [(b.text, [c.to_dict() for c in b.citations or ()]) for b in message.content]


def location(kind: str, parts: Sequence[str], citation: Any) -> str:
    """The text of the place that a citation names."""
    if kind == "text":
        assert citation.type == "char_location"
        return parts[0][citation.start_char_index : citation.end_char_index]
    if kind == "pdf":
        assert citation.type == "page_location"
        return "|".join(parts[citation.start_page_number - 1 : citation.end_page_number - 1])
    assert citation.type == "content_block_location"
    return "|".join(parts[citation.start_block_index : citation.end_block_index])


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(data=st.data(), given_documents=documents())
def test_citations_are_exact(
    data: st.DataObject, given_documents: list[tuple[str, list[str]]]
) -> None:
    blocks, pdfs = [], []
    for n, (kind, parts) in enumerate(given_documents):
        if kind == "text":
            parts[:] = ["".join(parts)]
            source = text_source(parts[0])
        elif kind == "content":
            source = content_source(*parts)
        else:
            parts[:] = [part.strip("\ufeff\r\n ") for part in parts]
            begins = [sum(len(p) + 2 for p in parts[:i]) for i in range(len(parts))]
            pdfs.append(Document("\n\n".join(parts), begins))
            source = pdf_source(b"%PDF-")
        blocks.append(document(source, title=f"{kind} {n}"))
    body = asking(*blocks)
    if pdfs:
        assert [w for w, _ in parse("messages", body).unread] == [
            f"messages[0].content[{n}].source.data"
            for n, (kind, _) in enumerate(given_documents)
            if kind == "pdf"
        ]
    request = parse("messages", body, pdfs)
    marks = [
        f"no{100 * (n + 1) + number + 1}"
        for n, (_, parts) in enumerate(given_documents)
        for number in range("".join(parts).count("no"))
    ]
    asked = data.draw(st.lists(st.sampled_from(marks), min_size=1, max_size=5))
    said = [
        (text, at, 0.9)
        for mark, at in zip(asked, looking_at(request, asked), strict=True)
        for text in ("It says ", f"that {mark}", ". ")
    ]
    choice = traced(request, said)

    def form() -> Format:
        return FORMATS["messages"](request, "m", [choice], smollm2_tokenizer())

    whole, final, events = through_client(form, choice.pieces)
    assert plain(final) == plain(whole)
    assert [block.text for block in whole.content] == [f"It says that {mark}. " for mark in asked]
    for mark, block in zip(asked, whole.content, strict=True):
        [citation] = block.citations
        index = int(mark[2:]) // 100 - 1
        kind, parts = given_documents[index]
        assert citation.document_index == index
        assert citation.document_title == f"{kind} {index}"
        cited = citation.cited_text
        assert mark in cited and cited == cited.strip() and cited.count("no") == 1
        where = location(kind, parts, citation)
        assert where == cited if kind == "text" else where.count(cited) == 1 and "|" not in where
    deltas = [e.delta.type for e in events if e.type == "content_block_delta"]
    assert deltas.count("citations_delta") == len(asked)


def test_weak_sources_questions_and_earlier_turns_are_not_cited() -> None:
    messages = [
        {"role": "user", "content": [document(text_source("The door is red. The sky is no1."))]},
        {"role": "assistant", "content": "The answer was no2."},
        {"role": "user", "content": "Remember no3.\n\nWhat is no4?"},
    ]
    request = parse("messages", asking() | {"messages": messages})
    one, two, three, four = looking_at(request, ["no1", "no2", "no3", "no4"])
    said = [
        ("First. ", one, 0.9),
        ("Weak. ", one, 0.9),
        ("Second. ", two, 0.9),
        ("Third. ", three, 0.9),
        ("Fourth. ", four, 0.9),
        ("Last.", one, 0.2),  # of all attention, and half of what is not to the first token
    ]
    choice = traced(request, said)
    # The weak one looks everywhere: less than `FOUND` of it is in one passage.
    weak = next(piece for piece in choice.pieces if "Second" in piece.text)
    assert weak.sentences[0].grounded == pytest.approx(1)
    form = FORMATS["messages"](request, "m", [choice], smollm2_tokenizer())
    texts = {b["text"].strip(): b["citations"] for b in form.whole()["content"]}
    assert [text for text, citations in texts.items() if citations] == ["First.", "Weak.", "Last."]
    assert texts["First."][0]["cited_text"] == "The sky is no1."


def test_documents_in_the_result_of_a_tool_are_cited() -> None:
    text = {"type": "text", "text": "Two files."}
    own = [document(text_source("Red. Blue no2."), title="b"), document(pdf_source(b"%PDF-"))]
    result = {"type": "tool_result", "tool_use_id": "c1", "is_error": True}
    messages = [
        {"role": "user", "content": [document(text_source("Grass. Sky no1."), title="a")]},
        {"role": "assistant", "content": "I look."},
        {"role": "user", "content": [result | {"content": [text, *own]}, text]},
    ]
    body = asking() | {"messages": messages}
    where = "messages[2].content[0].content"
    assert parse("messages", body).unread == [(f"{where}[2].source.data", b"%PDF-")]
    request = parse("messages", body, [Document("The page is no3.", [0])])
    shown = 'tool\nError: Two files.\n\nDocument "b":\n\nRed. Blue no2.\n\nDocument 3:\n\nThe page'
    assert shown in prompt_of(request)
    marks = ["no1", "no2", "no3"]
    places = looking_at(request, marks)
    choice = traced(
        request, [(f"It is {m}. ", at, 0.9) for m, at in zip(marks, places, strict=True)]
    )
    blocks = FORMATS["messages"](request, "m", [choice], smollm2_tokenizer()).whole()["content"]
    found = [citation for block in blocks for citation in block["citations"]]
    assert [(c["document_index"], c["document_title"]) for c in found] == [
        (0, "a"),
        (1, "b"),
        (2, None),
    ]
    assert (found[1]["cited_text"], found[1]["start_char_index"]) == ("Blue no2.", 5)
    assert (found[2]["type"], found[2]["start_page_number"]) == ("page_location", 1)
    own[0]["citations"] = None
    with pytest.raises(RequestError, match=re.escape(f"{where}[1].citations must be enabled")):
        parse("messages", body)


CASTLE = "The castle says nothing."


@pytest.fixture(scope="module")
def looking() -> Iterator[ServerProcess]:
    """A server whose answers look at " castle", and are the question again and again."""
    with server_on("tests.server.page_rank", "--max-model-len", "128K") as server:
        yield server


@pytest.mark.long
def test_text_pdf_and_blocks_are_cited_over_http(looking: ServerProcess) -> None:
    ours, filler = client(looking.url()), "The grass is green. "
    long = document(text_source(f"{filler * 15_000}{CASTLE} {filler}"))  # for another process
    blocks = [
        document(text_source(f"\N{GRINNING FACE} {filler}{CASTLE}\r\n{filler}"), title="a.txt"),
        document(content_source(filler, CASTLE, filler)),
        document(pdf_source(files.pdf(filler, CASTLE, filler)), title="b.pdf"),
    ]
    places = [
        {"type": "char_location", "start_char_index": 22, "end_char_index": 46},
        {"type": "content_block_location", "start_block_index": 1, "end_block_index": 2},
        {"type": "page_location", "start_page_number": 2, "end_page_number": 3},
    ]
    for n, block in enumerate(blocks):
        message = ours.messages.create(**asking(block))
        first = message.content[0]
        assert first.type == "text" and first.citations is not None
        about = {"cited_text": CASTLE, "document_index": 0, "document_title": block.get("title")}
        assert [c.to_dict() for c in first.citations] == [about | places[n]]
        with ours.messages.stream(**asking(block)) as events:
            assert plain(events.get_final_message()) == plain(message)
    all_three = ours.messages.create(**asking(*blocks)).content[0]
    assert all_three.type == "text" and all_three.citations is not None
    assert [c.document_index for c in all_three.citations] == [0, 1, 2]
    found = ours.messages.create(**asking(long, blocks[2], max_tokens=40)).content[0]
    assert found.type == "text" and found.citations is not None
    of_text, of_pdf = found.citations
    assert of_text.type == "char_location" and of_text.start_char_index == 15_000 * len(filler)
    assert of_text.cited_text == of_pdf.cited_text == CASTLE
    asked = asking(*blocks)
    del asked["max_tokens"]
    assert ours.messages.count_tokens(**asked).input_tokens > 50
