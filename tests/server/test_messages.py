"""Anthropic's ``/v1/messages`` through its official client, with tools, documents, citations."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import anthropic
import httpx
import httpx2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from razor_dist.api.formats import Format
from razor_dist.api.parsing import ParsedRequest, parse_value
from razor_dist.api.responses_format import FORMATS
from razor_dist.api.tools import ToolUse
from razor_dist.config.errors import RequestError
from razor_dist.documents.read import Document
from razor_dist.frontend.answers import Choice, ChoiceEvent
from razor_dist.frontend.assembler import TextPiece
from razor_dist.frontend.passages import Trace
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.server.sse import stream
from tests.documents import files
from tests.server.process import ServerProcess, fake_server, server_on
from tests.server.test_tools import (
    ANSWERS,
    HERMES,
    LIMITS,
    NAMES,
    PARAMETERS,
    PARIS,
    encoder,
    letters,
)
from tests.tokenizer import smollm2_tokenizer

QUESTION = "What does the castle say?"
QUOTED = 'the "é" \\ law.txt'  # as JSON it is another text
SSE = {"Content-Type": "text/event-stream"}


def client(url: str, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)


def text_source(text: str) -> dict[str, Any]:
    return {"type": "text", "media_type": "text/plain", "data": text}


def content_source(*texts: str) -> dict[str, Any]:
    return {"type": "content", "content": [{"type": "text", "text": text} for text in texts]}


def pdf_source(data: bytes) -> dict[str, Any]:
    encoded = base64.b64encode(data).decode()
    return {"type": "base64", "media_type": "application/pdf", "data": encoded}


def document(source: dict[str, Any], cited: bool = True, **fields: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, "citations": {"enabled": cited}, **fields}


def asking(*blocks: dict[str, Any], question: str = QUESTION, **fields: Any) -> dict[str, Any]:
    content = [*blocks, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}]
    return {"model": "smollm2", "max_tokens": 80, "messages": messages, **fields}


def test_the_client_gets_a_message_and_the_same_as_a_stream(url: str) -> None:
    asked: Any = {
        "model": "smollm2",
        "max_tokens": 400,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        # The fake engine says the last message's tokens in reverse order.
        "messages": [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "One there castle"},
        ],
    }
    ours = client(url)
    whole = ours.messages.create(**asked)
    [block] = whole.content
    assert block.type == "text" and "there" in block.text and block.citations is None
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", "smollm2")
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
    counted = ours.messages.count_tokens(**{k: v for k, v in asked.items() if k != "max_tokens"})
    usage = whole.usage
    assert usage.input_tokens == counted.input_tokens > usage.output_tokens > 3
    assert (usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (0, 0)
    with ours.messages.stream(**asked) as events:
        kinds = [event.type for event in events]
        final = events.get_final_message()
    assert final.content[0].text == block.text  # type: ignore[union-attr]
    assert (final.usage.to_dict(), final.stop_reason) == (usage.to_dict(), "end_turn")
    named = [kind for kind in dict.fromkeys(kinds) if kind != "text"]
    assert named == [
        *("message_start", "content_block_start", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    short = ours.messages.create(**asked | {"max_tokens": 3})
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3)
    stopped = ours.messages.create(**asked, stop_sequences=["there"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "there")
    assert "there" not in "".join(b.text for b in stopped.content if b.type == "text")
    older = {"temperature": 0, "top_p": 0.5, "top_k": 5}  # fields of earlier clients
    assert ours.messages.create(**asked, extra_body=older).content == whole.content


BAD: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "unsupported field 'n'"),
    ({"max_tokens": None}, "max_tokens must be a valid integer"),
    ({"temperature": 3}, "temperature must be"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "unsupported field 'thinking'"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"messages": []}, "messages must have at least 1 item"),
    ({"messages": [{"role": "system", "content": "x"}]}, r"messages\[0\] must be an object whose"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"messages\[0\].content\[0"),
    (
        asking(document({"type": "url", "url": "https://x"})),
        r"messages\[0\].content\[0\].source must be an object whose type is one of text, content",
    ),
    (
        asking(document(text_source("A."), page=3)),
        r"unsupported field 'messages\[0\].content\[0\].page'",
    ),
    ({"tools": [{"name": "a", "input_schema": {}, "index": 3}]}, r"field 'tools\[0\].index'"),
    (
        asking(document(text_source("A.")), document(text_source("B."), cited=False)),
        r"messages\[0\].content\[1\].citations must be enabled for all documents or for none",
    ),
    (
        asking(document({"type": "base64", "media_type": "application/pdf", "data": "a"})),
        r"messages\[0\].content\[0\].source.data must be base64",
    ),
    (
        asking(document(pdf_source(b"text"))),
        r"messages\[0\].content\[0\].source.data must be a PDF file in base64",
    ),
    (
        asking(document(pdf_source(b"%PDF-1.4 broken"))),
        r"messages\[0\].content\[0\].source.data: the file cannot be read as pdf",
    ),
    ({"tools": [{"name": "a", "input_schema": {}}]}, "chat template knows no tools"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice must have a name if its type is tool"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use"} | {"id": "a"}]}]},
        r"missing required field 'messages\[0\].content\[0\].name'",
    ),
]


@pytest.mark.parametrize(("fields", "problem"), BAD, ids=lambda value: str(value)[:30])
def test_what_is_wrong_is_named_in_anthropics_shape(
    url: str, fields: dict[str, Any], problem: str
) -> None:
    body = asking() | fields
    with pytest.raises(anthropic.BadRequestError, match=problem) as refused:
        client(url).post("/v1/messages", body=body, cast_to=object)
    error: Any = refused.value.body
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"


def test_errors_have_anthropics_types(url: str) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not_found_error") as refused:
        client(url).messages.create(**asking(model="other"))
    error: Any = refused.value.body
    assert error["error"]["code"] == "model_not_found"
    with pytest.raises(anthropic.RequestTooLargeError, match="request_too_large"):
        client(url).messages.create(**asking(document(text_source("a" * 2**20))))
    lost = httpx.post(f"{url}/v1/messages/batches", json={})
    assert (lost.status_code, lost.json()["error"]["type"]) == (404, "not_found_error")
    keys = fake_server("--api-key", "a-key-of-sixteen-letters", "--max-tokens-per-key", "60")
    with keys as server:
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            client(server.url(), "another").messages.create(**asking())
        known = client(server.url(), "a-key-of-sixteen-letters")
        found = known.messages.create(**asking(max_tokens=4))
        assert found.usage.output_tokens == 4 and found._request_id
        bearer = anthropic.Anthropic(base_url=server.url(), auth_token="a-key-of-sixteen-letters")
        assert bearer.messages.create(**asking(max_tokens=4)).usage.output_tokens == 4


def test_unknown_fields_can_be_ignored_and_prefills_are_continued() -> None:
    body = asking(document(text_source("A."), page=3), thinking={"type": "adaptive"}, n=1)
    found = parse("messages", body, unknown_fields="warn")
    assert set(found.ignored) == {"thinking", "n", "messages[].content[].page"}
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The castle"}]
    assert prompt_of(parse("messages", asking() | {"messages": begun})).endswith("\nThe castle")


def test_a_message_without_blocks_says_nothing() -> None:
    empty = {"role": "assistant", "content": []}
    both = [{"role": "user", "content": "Hi"}, empty]
    found = prompt_of(parse("messages", asking() | {"messages": both}))
    assert found.endswith("user\nHi<|im_end|>\n<|im_start|>assistant\n")
    tool = {"name": "f", "input_schema": {"type": "object"}}
    tool["cache_control"] = {"type": "ephemeral"}
    for tools in ([], [tool]):
        with pytest.raises(RequestError, match="messages must hold at least one message"):
            parse("messages", asking() | {"messages": [empty], "tools": tools})


def parse(
    endpoint: Any, body: dict[str, Any], files: Sequence[Document] = (), **limits: Any
) -> Any:
    known = LIMITS._replace(model="smollm2", **limits)
    return parse_value(endpoint, body, PromptEncoder(smollm2_tokenizer()), known, files)


def prompt_of(request: ParsedRequest) -> str:
    return smollm2_tokenizer().decode(request.prompts[0].tokens.tolist())


def test_documents_are_sent_as_the_page_sends_them() -> None:
    """So what the page or ``razor-dist prefill`` has read is not read again."""
    blocks = [
        document(text_source("\nOne.\n"), title=QUOTED),
        document(content_source("Two.", "Three."), context="A list."),
    ]
    text = prompt_of(parse("messages", asking(*blocks)))
    page = f"Document {json.dumps(QUOTED, ensure_ascii=False)}:\n\nOne.\n\n"
    page += "Document 2:\n\nContext: A list.\n\nTwo.\n\nThree.\n\n"
    assert f"user\n{page}{QUESTION}<|im_end|>" in text


def test_turns_of_one_side_become_one_message() -> None:
    messages = [
        {"role": "user", "content": "One"},
        {"role": "user", "content": [{"type": "text", "text": "two"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Three", "citations": []}]},
        {"role": "user", "content": "Four"},
    ]
    text = prompt_of(parse("messages", asking() | {"messages": messages}))
    assert "user\nOne\n\ntwo<|im_end|>\n<|im_start|>assistant\nThree<|im_end|>" in text


# Tools


def test_tools_are_those_of_a_chat() -> None:
    names = [*NAMES, "mcp__" + "x" * 123]  # as long as Anthropic's may be
    tools = [{"name": name, "input_schema": PARAMETERS} for name in names]
    call = {"type": "tool_use", "id": "c1", "name": NAMES[0], "input": json.loads(PARIS)}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "no rain", "is_error": True}
    messages = [
        {"role": "user", "content": "Paris?"},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    asked = {"model": "m", "max_tokens": 9, "messages": messages, "tools": tools}
    found = parse_value("messages", asked, encoder(HERMES), LIMITS)
    assert found.tools == ToolUse("hermes", names)
    text = prompt_of(found)
    assert "assistant: I look.<tool_call>Paris</tool_call>tool: Error: no rainuser: And" in text
    for choice, use in (
        ({"type": "any"}, ToolUse("required", names)),
        ({"type": "tool", "name": NAMES[1]}, ToolUse("named", NAMES[1:])),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolUse("hermes", names, False)),
        ({"type": "none"}, None),
    ):
        body = asked | {"tool_choice": choice}
        assert parse_value("messages", body, encoder(HERMES), LIMITS).tools == use
    with pytest.raises(RequestError, match="must not end with a tool_use block"):
        parse_value("messages", asked | {"messages": messages[:2]}, encoder(HERMES), LIMITS)


def lines_of(form: Format, pieces: Sequence[TextPiece]) -> str:
    chunks = [*form.opening(), *(chunk for piece in pieces for chunk in form.piece(0, piece))]
    return "".join(map(form.frame, [*chunks, *form.closing(False)])) + form.end


def through_client(form: Any, pieces: Sequence[TextPiece]) -> tuple[Any, Any, list[Any]]:
    """Read an answer by the client, whole and streamed; return both, and the stream's events."""
    whole, lines = form().whole(), lines_of(form(), pieces)

    def answer(request: httpx2.Request) -> httpx2.Response:
        if json.loads(request.content).get("stream"):
            return httpx2.Response(200, headers=SSE, text=lines)
        return httpx2.Response(200, json=whole)

    with httpx2.Client(transport=httpx2.MockTransport(answer)) as http:
        ours = anthropic.Anthropic(base_url="http://m", api_key="none", http_client=http)
        found = ours.messages.create(**asking())
        with ours.messages.stream(**asking()) as events:
            seen = list(events)
            final = events.get_final_message()
    return found, final, seen


@pytest.mark.parametrize("case", [a for a in ANSWERS if a[0] in ("hermes", "named")])
def test_calls_are_blocks_behind_the_text(case: Any) -> None:
    name, answer, text, calls = case
    pieces = letters(answer)
    asked = parse("messages", asking())
    request = ParsedRequest(asked.prompts, tools=ToolUse(name, NAMES), described=asked.described)

    def form() -> Format:
        choice = Choice(np.array([1]), 0, list(pieces))
        return FORMATS["messages"](request, "m", [choice], smollm2_tokenizer())

    whole, final, events = through_client(form, pieces)
    for message in (whole, final):
        assert "".join(b.text for b in message.content if b.type == "text") == text
        used = [(b.name, b.input) for b in message.content if b.type == "tool_use"]
        assert used == [(called, json.loads(arguments)) for called, arguments in calls]
        assert message.stop_reason == ("tool_use" if calls else "end_turn")
        assert len(message.content) == len(calls) + bool(text)
    deltas = [e.delta.type for e in events if e.type == "content_block_delta"]
    assert deltas.count("input_json_delta") == len(calls)


# Citations

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


CASTLE = "The castle says nothing."


@pytest.fixture(scope="module")
def looking() -> Iterator[ServerProcess]:
    """A server whose answers look at " castle", and are the question again and again."""
    with server_on("tests.server.page_rank", "--max-model-len", "128K") as server:
        yield server


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


def test_silence_is_a_ping_and_a_failure_an_event() -> None:
    request = parse("messages", asking())
    form = FORMATS["messages"](request, "m", [Choice(np.array([1]))], smollm2_tokenizer())

    async def events() -> AsyncIterator[ChoiceEvent | None]:
        yield None
        raise RequestError("too late", code="timeout")

    async def lines() -> list[str]:
        return [line async for line in stream(events(), form, include_usage=False)]

    start, ping, failure, end = asyncio.run(lines())
    assert start.startswith("event: message_start\ndata: {")
    assert ping == 'event: ping\ndata: {"type":"ping"}\n\n'
    assert failure.startswith('event: error\ndata: {"type":"error","error":{') and end == ""
    assert '"type":"timeout_error"' in failure
