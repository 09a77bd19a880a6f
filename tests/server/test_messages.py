"""Anthropic's ``/v1/messages`` through its official client, with tools and documents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import numpy as np
import pytest

from razor_dist.api.formats import Format
from razor_dist.api.parsing import ParsedRequest, parse_request
from razor_dist.api.responses_format import FORMATS
from razor_dist.api.tools import ToolUse
from razor_dist.config.errors import RequestError
from razor_dist.frontend.answers import Choice, ChoiceEvent
from razor_dist.server.sse import stream
from tests.server.message_bodies import (
    QUESTION,
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
from tests.server.process import fake_server
from tests.server.tool_calls import (
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

QUOTED = 'the "é" \\ law.txt'  # as JSON it is another text


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


def test_an_answer_matches_the_schema_of_its_output_format() -> None:
    """Claude Code asks so for a conversation's title."""
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    form = {"type": "json_schema", "schema": schema}
    [prompt] = parse("messages", asking(output_config={"format": form})).prompts
    assert prompt.params.structured_outputs is not None
    assert json.loads(prompt.params.structured_outputs.json) == schema


BAD: list[tuple[dict[str, Any], str]] = [
    ({"output_config": {"effort": "low"}}, "unsupported field 'output_config.effort'"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type must be 'json"),
    ({"n": 2}, "unsupported field 'n'"),
    ({"max_tokens": None}, "max_tokens must be a valid integer"),
    ({"temperature": 3}, "temperature must be"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "unsupported field 'thinking'"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"messages": []}, "messages must have at least 1 item"),
    ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\] must be an object whose"),
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
        r"messages\[0\].content\[0\].source.data: could not process PDF: the file cannot be",
    ),
    ({"tools": [{"name": "a", "input_schema": {}}]}, "chat template knows no tools"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice must have a name if its type is tool"),
    # Claude Code takes the numbers from these words, and asks again for less.
    (
        {"max_tokens": 600},
        r"input length and `max_tokens` exceed context limit: \d+ \+ 600 > 512, decrease input",
    ),
    (asking(document(text_source("a " * 600))), r"prompt is too long: \d{3} tokens > 512 maximum"),
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


def test_documents_may_leave_open_whether_they_are_cited() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "A castle."}
    document = {"type": "document", "source": source}
    plain, empty = (
        parse("messages", asking(messages=[{"role": "user", "content": [one]}]))
        for one in (document, document | {"citations": {}})
    )
    assert prompt_of(empty) == prompt_of(plain)
    assert empty.prompts[0].params.return_sources == 0


def test_turns_of_one_side_become_one_message() -> None:
    messages = [
        {"role": "user", "content": "One"},
        {"role": "user", "content": [{"type": "text", "text": "two"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Three", "citations": []}]},
        {"role": "user", "content": "Four"},
    ]
    text = prompt_of(parse("messages", asking() | {"messages": messages}))
    assert "user\nOne\n\ntwo<|im_end|>\n<|im_start|>assistant\nThree<|im_end|>" in text


NOTE = {"role": "system", "content": "Remember the castle."}


def test_notes_between_the_turns_are_said_where_they_stand() -> None:
    """Claude Code sends them with almost every request."""

    def text(*messages: dict[str, Any]) -> str:
        return prompt_of(parse("messages", asking() | {"messages": list(messages)}))

    user, said = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}
    first = text(user, NOTE)
    assert "user\nHi\n\nRemember the castle.<|im_end|>" in first
    longer = text(user, NOTE, said, user | {"content": [{"type": "text", "text": "And?"}]}, NOTE)
    assert longer.startswith(first) and longer.count("Remember the castle.<|im_end|>") == 2
    assert "user\nRemember the castle.\n\nHi<|im_end|>" in text(NOTE, user)
    assert "user\nRemember the castle.<|im_end|>\n" in text(user, said, NOTE)
    counted = {k: v for k, v in asking().items() if k != "max_tokens"}
    answer = json.loads(parse("count_tokens", counted | {"messages": [user, NOTE]}).answer)
    whole = parse("messages", asking() | {"messages": [user, NOTE]}).prompts[0].tokens
    assert answer == {"input_tokens": len(whole)}


@pytest.mark.parametrize("notes", [[NOTE], [NOTE, NOTE]])
def test_a_note_behind_the_question_is_neither_question_nor_source(notes: list[Any]) -> None:
    body = asking(document(text_source("The castle is red.")))
    [asked] = parse("messages", body).prompts
    body["messages"] += notes
    [noted] = parse("messages", body).prompts
    assert noted.text.parts == asked.text.parts and asked.text.parts[-1].searched == 0
    answered = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}]
    [longer] = parse("messages", body | {"messages": body["messages"] + answered}).prompts
    *_, note, _, question = longer.text.parts
    assert note.searched == len(note.text) and question.searched == 0


def test_what_claude_code_writes_anew_in_each_request_is_left_out() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={};"
    prompts = []
    for hash_ in ("a5145", "71fea"):
        blocks = [line.format(hash_), "You are Claude Code.", "Be brief."]
        parts: list[dict[str, Any]] = [{"type": "text", "text": text} for text in blocks]
        parts[0]["cache_control"] = {"type": "ephemeral", "scope": "global"}
        for system in (parts, "\n".join(blocks)):
            prompts.append(prompt_of(parse("messages", asking() | {"system": system}, pins=True)))
        only = parse("messages", asking() | {"system": parts[:1]}, pins=True)
        assert only.contexts == [] and prompt_of(only) == prompt_of(parse("messages", asking()))
    assert prompts[:2] == prompts[2:] and "system\nYou are Claude Code." in prompts[0]


def test_thoughts_of_earlier_answers_ask_for_nothing() -> None:
    thoughts = [
        {"type": "thinking", "thinking": "Hm.", "signature": "a"},
        {"type": "redacted_thinking", "data": "b"},
    ]
    text = {"type": "text", "text": "Yes."}
    user = {"role": "user", "content": "Hi"}

    def prompt(*blocks: dict[str, Any]) -> str:
        messages = [user, {"role": "assistant", "content": list(blocks)}, user]
        return prompt_of(parse("messages", asking() | {"messages": messages}))

    assert prompt(*thoughts, text) == prompt(text)
    assert "user\nHi\n\nHi<|im_end|>" in prompt(*thoughts)
    alone = {"messages": [{"role": "assistant", "content": thoughts[:1]}]}
    with pytest.raises(RequestError, match="messages must hold at least one message"):
        parse("messages", asking(cache_control={"type": "ephemeral"}) | alone, pins=True)
    # A chat's answer that has ended in its thoughts: some templates want turns to alternate.
    said: dict[str, Any] = {"role": "assistant", "reasoning_content": "Hm."}
    chats = [
        prompt_of(parse("chat", {"model": "smollm2", "messages": [user, answer, user]}))
        for answer in (said, said | {"content": None}, {"role": "assistant", "content": ""})
    ]
    assert chats[0] == chats[1] == chats[2]


# Tools


def test_tools_are_those_of_a_chat() -> None:
    names = [*NAMES, "mcp__" + "x" * 123]  # as long as Anthropic's may be
    hints = {"eager_input_streaming": True, "defer_loading": False, "input_examples": [{}]}
    tools = [{"name": name, "input_schema": PARAMETERS, **hints} for name in names]
    call = {"type": "tool_use", "id": "c1", "name": NAMES[0], "input": json.loads(PARIS)}
    call["caller"] = {"type": "direct"}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "no rain", "is_error": True}
    result["toolset_name"] = "weather"
    messages = [
        {"role": "user", "content": "Paris?"},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    asked = {"model": "m", "max_tokens": 9, "messages": messages, "tools": tools}
    found = parse_request("messages", asked, encoder(HERMES), LIMITS)
    assert found.tools == ToolUse("hermes", names)
    text = prompt_of(found)
    assert "assistant: I look.<tool_call>Paris</tool_call>tool: Error: no rainuser: And" in text
    asked["messages"] = [*messages[:2], {"role": "user", "content": [result]}, NOTE]
    noted = parse_request("messages", asked, encoder(HERMES), LIMITS)
    asked["messages"] = messages
    assert "tool: Error: no rain\n\nRemember the castle." in prompt_of(noted)
    result["content"] = [{"type": "tool_reference", "tool_name": name} for name in NAMES[:2]]
    found = parse_request("messages", asked, encoder(HERMES), LIMITS)
    assert f"tool: Error: {NAMES[0]}\n{NAMES[1]}\n" in prompt_of(found)
    for choice, use in (
        ({"type": "any"}, ToolUse("required", names)),
        ({"type": "tool", "name": NAMES[1]}, ToolUse("named", NAMES[1:])),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolUse("hermes", names, False)),
        ({"type": "none"}, None),
    ):
        body = asked | {"tool_choice": choice}
        assert parse_request("messages", body, encoder(HERMES), LIMITS).tools == use
    with pytest.raises(RequestError, match="must not end with a tool_use block"):
        parse_request("messages", asked | {"messages": messages[:2]}, encoder(HERMES), LIMITS)


@pytest.mark.parametrize("stop", [None, "\n\nHuman:"])
@pytest.mark.parametrize("case", [a for a in ANSWERS if a[0] in ("hermes", "named")])
def test_calls_are_blocks_behind_the_text(case: Any, stop: str | None) -> None:
    name, answer, text, calls = case
    *pieces, last = letters(answer)
    pieces.append(replace(last, stop_reason=stop))
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
        found = message.stop_reason, message.stop_sequence
        plain = ("stop_sequence", stop) if stop else ("end_turn", None)
        assert found == (("tool_use", None) if calls else plain)
        assert len(message.content) == len(calls) + bool(text)
    deltas = [e.delta.type for e in events if e.type == "content_block_delta"]
    assert deltas.count("input_json_delta") == len(calls)


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
