"""Calls of tools, as each model family writes them, however an answer is cut into tokens."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from pydantic import BaseModel

from razor_dist.api.formats import ChatFormat
from razor_dist.api.parsing import parse_request
from razor_dist.api.request import Endpoint, ParsedRequest
from razor_dist.api.responses_format import FORMATS, ResponsesFormat
from razor_dist.api.tools import ToolParser, ToolUse
from razor_dist.config.errors import RequestError
from razor_dist.frontend.answers import Choice, ChoiceEvent
from razor_dist.frontend.assembler import Assembler, TextPiece
from razor_dist.frontend.outputs import AnswerSentence, Source
from razor_dist.frontend.passages import sentences
from razor_dist.frontend.prompts import Checked
from razor_dist.protocol.messages import Token
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.server.sse import stream
from tests.server.tool_calls import (
    ANSWERS,
    HERMES,
    LIMITS,
    NAMES,
    PARIS,
    TOOLS,
    encoder,
    letters,
    parsed,
)
from tests.tokenizer import smollm2_tokenizer


@pytest.mark.parametrize("case", ANSWERS, ids=lambda case: f"{case[0]}-{case[1][:12]!r}")
@settings(deadline=None)
@given(data=st.data())
def test_calls_are_found_however_the_answer_is_cut(case: Any, data: st.DataObject) -> None:
    form, answer, text, calls = case
    cuts = sorted(data.draw(st.sets(st.integers(0, len(answer)))) | {0, len(answer)})
    texts = [answer[a:b] for a, b in itertools.pairwise(cuts)]
    pieces = [TextPiece(5, part) for part in texts]
    last = TextPiece(5, "", finish_reason="stop")
    assert parsed(form, [*pieces, last]) == (text, calls)


def test_a_forced_call_of_mistrals_models_has_a_short_id_too() -> None:
    mistral = encoder("{{ tools }} [TOOL_CALLS] [/INST]").tokenizer
    for use, answer in (
        (ToolUse("named", NAMES), PARIS),
        (ToolUse("required", NAMES), f'[{{"name": "get_time", "parameters": {PARIS}}}]'),
    ):
        [call] = ToolParser(use, mistral).read(TextPiece(5, answer, finish_reason="stop"))[1]
        assert len(call["id"]) == 9 and call["id"].isalnum()


def test_the_vocabulary_is_read_once_and_not_for_each_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dictionary of 150,000 tokens takes a tenth of a second, and all requests wait for it."""
    tokenizer, use = copy.deepcopy(smollm2_tokenizer()), ToolUse("mistral", NAMES)
    ToolParser(use, tokenizer)
    monkeypatch.setattr(tokenizer, "get_vocab", lambda: pytest.fail("the vocabulary is read again"))
    ToolParser(use, tokenizer)


@pytest.mark.parametrize("before", ["", "Sure#", "Sure##", "#"])
def test_what_may_begin_a_stop_string_stays_before_the_marker(before: str) -> None:
    tokenizer = copy.deepcopy(smollm2_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    call = f'[{{"name": "get_weather", "arguments": {PARIS}}}]'
    ids = tokenizer.encode(f"{before}[TOOL_CALLS]{call}", add_special_tokens=False)
    assembler = Assembler(tokenizer, SamplingParams(stop=("###", '#["')))
    pieces = [assembler.push(Token("a", token)) for token in ids]
    pieces.append(assembler.push(Token("a", 2, finish="stop")))
    parser = ToolParser(ToolUse("mistral", NAMES), tokenizer)
    *_, (last, [found]) = read = [parser.read(piece) for piece in pieces]
    assert "".join(piece.text for piece, _ in read) == before
    assert last.finish_reason == "tool_calls"
    assert found["function"] == {"name": "get_weather", "arguments": PARIS}
    assert len(found["id"]) == 9 and found["id"].isalnum()


def test_markers_within_a_call_may_be_special_tokens() -> None:
    tokenizer = copy.deepcopy(smollm2_tokenizer())
    markers = ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"]
    tokenizer.add_special_tokens({"additional_special_tokens": markers})
    written = f"I look. [TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{PARIS}"
    written += "[TOOL_CALLS]get_time[ARGS]{}"
    assembler = Assembler(tokenizer, SamplingParams())
    ids = tokenizer.encode(written, add_special_tokens=False)
    pieces = [assembler.push(Token("a", token)) for token in ids]
    pieces.append(assembler.push(Token("a", 2, finish="stop")))
    assert "[" not in "".join(piece.text for piece in pieces)
    parser = ToolParser(ToolUse("mistral", NAMES), tokenizer)
    *_, (last, calls) = read = [parser.read(piece) for piece in pieces]
    assert "".join(piece.text for piece, _ in read) == "I look. "
    assert last.finish_reason == "tool_calls"
    assert [call["function"] for call in calls] == [
        {"name": "get_weather", "arguments": PARIS},
        {"name": "get_time", "arguments": "{}"},
    ]


@pytest.mark.parametrize("special", [False, True])
def test_a_marker_that_is_in_the_text_is_there_once(special: bool) -> None:
    """Also while its end is held back, since a stop string may begin there."""
    tokenizer = copy.deepcopy(smollm2_tokenizer())
    tokenizer.add_tokens(["[TOOL_CALLS]"], special_tokens=special)
    call = f'[{{"name": "get_weather", "arguments": {PARIS}}}]'
    ids = tokenizer.encode(f"[TOOL_CALLS]{call}", add_special_tokens=False)
    params = SamplingParams(stop=("]]",), skip_special_tokens=not special)
    assembler = Assembler(tokenizer, params)
    pieces = [assembler.push(Token("a", token)) for token in ids]
    pieces.append(assembler.push(Token("a", 2, finish="stop")))
    request = ParsedRequest([Checked(np.array([1]), params)], tools=ToolUse("mistral", NAMES))
    answer = ChatFormat(request, "m", [Choice(np.array([1]), 0, pieces)], tokenizer).whole()
    [choice] = answer["choices"]
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == PARIS


def test_a_call_that_cannot_be_read_is_the_same_text_whole_and_streamed() -> None:
    tokenizer = copy.deepcopy(smollm2_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    ids = tokenizer.encode("Sure. [TOOL_CALLS]no JSON", add_special_tokens=False)
    assembler = Assembler(tokenizer, SamplingParams())
    pieces = [assembler.push(Token("a", token)) for token in ids]
    pieces.append(assembler.push(Token("a", 2, finish="stop")))
    checked = Checked(np.array([1]), SamplingParams())
    request = ParsedRequest([checked], tools=ToolUse("mistral", NAMES))
    form = ChatFormat(request, "m", [Choice(np.array([1]), 0, pieces)], tokenizer)
    chunks = [chunk["choices"][0] for piece in pieces for chunk in form.piece(0, piece)]
    streamed = "".join(chunk["delta"].get("content", "") for chunk in chunks)
    [choice] = form.whole()["choices"]
    assert choice["message"]["content"] == streamed == "Sure. [TOOL_CALLS]no JSON"
    assert "tool_calls" not in choice["message"]


def test_nothing_is_cited_behind_a_token_that_became_text() -> None:
    """An unreadable call's marker is part of the text, but not of the answer's characters."""
    tokenizer = copy.deepcopy(smollm2_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})
    tag, sources = tokenizer.get_vocab()["<|python_tag|>"], [Source(0, 5, 0.9, "Fact.", 0)]
    own = [AnswerSentence(*place, sources, 0.9) for place in sentences("Sure. Well.")]
    pieces = [
        TextPiece(5, "Sure. "), TextPiece(tag, "", sentences=own[:1]), TextPiece(5, "Well."),
        TextPiece(5, "", finish_reason="stop", sentences=own[1:]),
    ]  # fmt: skip
    request = ParsedRequest(
        [Checked(np.array([1]), SamplingParams())], tools=ToolUse("llama", NAMES),
        titles=[(0, 0, "a.txt")], return_sources=False,
    )  # fmt: skip
    form = ChatFormat(request, "m", [Choice(np.array([1]), 0, pieces)], tokenizer)
    message = form.whole()["choices"][0]["message"]
    assert message["content"] == "Sure. <|python_tag|>Well."
    found = [annotation["url_citation"] for annotation in message["annotations"]]
    assert [(one["start_index"], one["end_index"]) for one in found] == [(0, 5)]
    chunks = [chunk["choices"][0] for piece in pieces for chunk in form.piece(0, piece)]
    streamed = [a["url_citation"] for c in chunks for a in c["delta"].get("annotations", ())]
    assert streamed == found


@pytest.mark.parametrize("case", ANSWERS, ids=lambda case: f"{case[0]}-{case[1][:12]!r}")
def test_a_stream_cites_what_the_whole_answer_does(case: Any) -> None:
    form, answer, text, _ = case
    sources = [Source(0, 5, 0.9, "Fact.", 0)]
    pieces = letters(answer)
    for begin, end in sentences(answer):
        at = min(end, len(answer) - 1)  # when the next one begins
        own = AnswerSentence(begin, end, sources, 0.9)
        pieces[at] = replace(pieces[at], sentences=[*pieces[at].sentences, own])
    request = ParsedRequest(
        [], tools=ToolUse(form, NAMES), titles=[(0, 0, "a.txt")], return_sources=False
    )
    choices = [Choice(np.array([1]), 0, pieces)]
    shape = ChatFormat(request, "m", choices, None)
    whole = shape.whole()["choices"][0]["message"]["annotations"]
    # What is cited is where the answer has it, as what stands behind a call is not.
    for place in (annotation["url_citation"] for annotation in whole):
        part = slice(place["start_index"], place["end_index"])
        assert text[part] == answer[part] != ""
    assert bool(whole) == (text[:1] == answer[:1] and text != "")
    chunks = [chunk["choices"][0] for piece in pieces for chunk in shape.piece(0, piece)]
    assert [a for chunk in chunks for a in chunk["delta"].get("annotations", ())] == whole
    items = ResponsesFormat(request, "m", choices, None).whole()["output"]
    told = [a for item in items for part in item.get("content", ()) for a in part["annotations"]]
    assert told == [{"type": a["type"], **a["url_citation"]} for a in whole]


def test_a_second_call_that_is_cut_stays_text() -> None:
    parser = ToolParser(ToolUse("hermes", NAMES), None)
    call = f'<tool_call>{{"name": "get_time", "arguments": {PARIS}}}</tool_call>'
    cut = TextPiece(5, call + '\n<tool_call>{"name": "get_', finish_reason="length")
    last, [found] = parser.read(cut)
    assert (last.text, last.finish_reason) == ('<tool_call>{"name": "get_', "length")
    assert found["function"] == {"name": "get_time", "arguments": PARIS}
    piece = TextPiece(5, call + "<tool_call>{", finish_reason="length")
    asked = ParsedRequest([], tools=ToolUse("hermes", NAMES))
    answer = FORMATS["messages"](asked, "m", [Choice(np.array([1]), 0, [piece])], None).whole()
    assert [block["type"] for block in answer["content"]] == ["text", "tool_use"]
    assert answer["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("form", ["hermes", "named"])
def test_an_answer_has_openais_shape(form: str) -> None:
    answer = next(a for name, a, _, calls in ANSWERS if name == form and calls)
    pieces = letters(answer)
    request = ParsedRequest([], tools=ToolUse(form, NAMES))
    shape = ChatFormat(request, "m", [Choice(np.array([1]), 0, pieces)], smollm2_tokenizer())
    whole = ChatCompletion.model_validate(shape.whole(), strict=True)
    [choice] = whole.choices
    assert choice.finish_reason == ("stop" if form == "named" else "tool_calls")
    assert choice.message.tool_calls is not None
    chunks = [chunk for piece in pieces for chunk in shape.piece(0, piece)]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    text = "".join(delta.get("content", "") for delta in deltas)
    assert (text or None) == choice.message.content
    [calls] = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [
        json.loads(call.function.arguments)
        for call in choice.message.tool_calls
        if call.type == "function"
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == choice.finish_reason


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        ("named", '{"city": "Par'),
        ("required", '[{"name": "get_time", "parameters": {"city": "Par'),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": {"city": "Par'),
        # A blank that JSON does not know.
        ("hermes", '<tool_call>{"name": "get_time", "arguments": "\u00a0{}"}</tool_call>'),
    ],
)
def test_a_call_that_is_cut_or_no_json_is_no_call(form: str, answer: str) -> None:
    request = ParsedRequest([], tools=ToolUse(form, NAMES), described={})
    choice = Choice(np.array([1]), 0, [TextPiece(5, answer, None, "length")])
    chat = ChatFormat(request, "m", [choice], smollm2_tokenizer())
    [whole] = ChatCompletion.model_validate(chat.whole(), strict=True).choices
    assert (whole.finish_reason, whole.message.content) == ("length", answer)
    assert whole.message.tool_calls is None
    news = [chunk["choices"][0] for chunk in chat.piece(0, choice.pieces[0])]
    assert "".join(new["delta"].get("content", "") for new in news) == answer
    assert news[-1]["finish_reason"] == "length"
    response = ResponsesFormat(request, "m", [choice], smollm2_tokenizer()).whole()
    assert (response["status"], response["output"][0]["status"]) == ("incomplete", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["content"][0]["text"] == answer


class City(BaseModel):
    """Arguments of a tool, and the format of an answer."""

    city: str


def serving(answer: str) -> openai.OpenAI:
    """OpenAI's client of a model with Hermes' tools, whose answers are all the same."""

    def respond(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        endpoint = "chat" if "messages" in body else "responses"
        try:
            parsed = parse_request(endpoint, body, encoder(HERMES), LIMITS)
        except RequestError as error:
            return httpx.Response(400, json={"error": {"message": str(error)}})
        choice = Choice(parsed.prompts[0].tokens, 0, letters(answer))
        form = FORMATS[endpoint](parsed, "m", [choice], smollm2_tokenizer())
        if not body.get("stream"):
            return httpx.Response(200, json=form.whole())
        chunks = form.opening()
        for piece in choice.pieces:
            chunks += form.piece(0, piece)
        chunks += form.closing(False)
        text = "".join(map(form.frame, chunks)) + form.end
        return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, text=text)

    http = httpx.Client(transport=httpx.MockTransport(respond))
    return openai.OpenAI(base_url="http://m/v1", api_key="none", max_retries=0, http_client=http)


@pytest.mark.parametrize(
    ("form", "answer"), [("hermes", ANSWERS[0][1]), ("named", PARIS), ("hermes", "It rains.")]
)
def test_a_response_has_openais_shape(form: str, answer: str) -> None:
    text, calls = parsed(form, letters(answer))
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    asked: Any = {"model": "m", "input": "Paris?", "tools": tools}
    asked["tool_choice"] = {"type": "function", "name": NAMES[0]} if form == "named" else "auto"
    client = serving(answer)
    whole = Response.model_validate(client.responses.create(**asked).to_dict())
    events: list[Any] = list(client.responses.create(**asked, stream=True))
    with client.responses.stream(**asked) as stream:
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for response in (whole, final):
        assert response.output_text == text and response.status == "completed"
        found = [item for item in response.output if item.type == "function_call"]
        assert [(item.name, item.arguments) for item in found] == calls
        assert len(response.output) == len(calls) + bool(text)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output


@pytest.mark.parametrize("endpoint", ["chat", "responses", "messages"])
@pytest.mark.parametrize("heartbeat", [0.0, math.inf])
def test_a_call_that_is_being_written_has_heartbeats(endpoint: Endpoint, heartbeat: float) -> None:
    choice = Choice(np.array([1]), 0, letters(PARIS))
    request = ParsedRequest([], tools=ToolUse("named", NAMES[:1]))

    async def streamed() -> list[str]:
        form = FORMATS[endpoint](request, "m", [choice], None)
        lines = stream(events(), form, include_usage=False, heartbeat=heartbeat)
        return [line async for line in lines if line == form.heartbeat]

    async def events() -> AsyncIterator[ChoiceEvent]:
        for piece in choice.pieces:
            yield ChoiceEvent(0, piece)

    found = len(asyncio.run(streamed()))
    # A chat opens with the first piece.
    assert found >= len(PARIS) - 2 if heartbeat == 0 else not found


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's own
@pytest.mark.parametrize("dumped", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_what_the_clients_helpers_return_can_be_put_back(streamed: bool, dumped: bool) -> None:
    """They add the parsed arguments and texts, and each call's index."""
    user: Any = {"role": "user", "content": "Paris?"}
    tool: Any = openai.pydantic_function_tool(City, name="get_time")
    flat = {"type": "function", **tool["function"]}
    for answer in (f'<tool_call>{{"name": "get_time", "arguments": {PARIS}}}</tool_call>', PARIS):
        client = serving(answer)
        chat: Any = {"model": "m", "messages": [user]}
        chat |= {"response_format": City} if answer == PARIS else {"tools": [tool]}
        response: Any = {"model": "m", "input": [user]}
        response |= {"text_format": City} if answer == PARIS else {"tools": [flat]}
        if streamed:
            with client.chat.completions.stream(**chat) as chunks:
                message: Any = chunks.get_final_completion().choices[0].message
            with client.responses.stream(**response) as events:
                items: Any = events.get_final_response().output
        else:
            message = client.chat.completions.parse(**chat).choices[0].message
            items = client.responses.parse(**response).output
        if dumped:
            message, *items = (m.model_dump() for m in (message, *items))
        client.chat.completions.create(model="m", messages=[user, message, user])
        client.responses.create(model="m", input=[user, *items, user])
