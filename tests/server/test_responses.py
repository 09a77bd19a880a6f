"""OpenAI's ``/v1/responses`` as its client sees it, and what it repeats of a request."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from razor_dist.api.errors import Failure
from razor_dist.api.parsing import parse_request
from razor_dist.api.request import ParsedRequest
from razor_dist.api.responses import ResponsesBody
from razor_dist.api.responses_format import FORMATS
from razor_dist.api.tools import ToolUse
from razor_dist.api.validate import validated
from razor_dist.frontend.answers import Choice
from razor_dist.frontend.assembler import TextPiece
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.protocol.sampling_params import SamplingParams
from tests.server.message_bodies import parse, prompt_of
from tests.server.test_api import HELLO, TOKENIZER, answer_to
from tests.server.tool_calls import LIMITS, NAMES, PARIS, encoder


@pytest.mark.long
def test_what_a_response_repeats_is_bounded() -> None:
    def described(**fields: Any) -> dict[str, Any]:
        body = validated(ResponsesBody, {"model": "smollm2", "input": "Hi"} | fields)
        told = body.described(SamplingParams())
        assert len(json.dumps(told)) < 4 * 2**16
        return told

    def tools(count: int, **fields: Any) -> list[dict[str, Any]]:
        names = [f"{index:064}" for index in range(count)]
        return [{"type": "function", "name": name} | fields for name in names]

    few = described(tools=tools(128, description="word " * 1000))["tools"]
    assert [tool["name"] for tool in few] == [tool["name"] for tool in tools(128)]
    assert {(tool["description"], tool["parameters"]) for tool in few} == {(None, None)}
    long = "word " * 100_000
    schema = {"type": "json_schema", "name": long, "description": long, "schema": {"a": long}}
    told = described(tools=tools(100_000), instructions=long, text={"format": schema})
    assert told["tools"] == []
    assert told["instructions"] == long[: 2**16 - 1] + "\N{HORIZONTAL ELLIPSIS}"
    form = told["text"]["format"]
    assert form == {
        "type": "json_schema",
        "name": f"{long[:63]}\N{HORIZONTAL ELLIPSIS}",
        "schema": {},
    }


def test_the_official_client_gets_responses(client: openai.OpenAI) -> None:
    text, count = answer_to(PromptEncoder(TOKENIZER).chat(HELLO))
    whole = client.responses.create(
        model="smollm2",
        input=HELLO[0]["content"],
        metadata={"a": "b"},
        tool_choice="auto",
        parallel_tool_calls=False,
        temperature=0.5,
        max_output_tokens=400,
        prompt_cache_key="a",
        include=["reasoning.encrypted_content"],
        extra_body={"stream_options": {"include_obfuscation": False}},
    )
    assert whole.output_text == text and whole.status == "completed"
    assert whole.metadata == {"a": "b"} and whole.parallel_tool_calls is False
    assert (whole.temperature, whole.top_p, whole.max_output_tokens) == (0.5, 1.0, 400)
    assert (whole.tool_choice, whole.tools) == ("auto", [])
    assert whole.usage is not None
    assert whole.usage.output_tokens == count
    assert whole.usage.input_tokens == len(PromptEncoder(TOKENIZER).chat(HELLO))
    # As a conversation: the answer goes back in.
    history: list[Any] = [*HELLO, *(item.model_dump() for item in whole.output)]
    history.append({"role": "user", "content": [{"type": "input_text", "text": "Again"}]})
    again = client.responses.create(model="smollm2", instructions="Be brief.", input=history)
    plain = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {"role": "assistant", "content": text},
        {"role": "user", "content": "Again"},
    ]
    assert again.output_text == answer_to(PromptEncoder(TOKENIZER).chat(plain))[0]
    with client.responses.stream(model="smollm2", input=HELLO) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == text and final.usage == whole.usage
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    cut = client.responses.create(model="smollm2", input=HELLO, max_output_tokens=2)
    assert cut.status == "incomplete" and cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_a_stream_that_fails_ends_with_the_failed_response() -> None:
    request = parse("responses", {"model": "smollm2", "input": "Hi"})
    form = FORMATS["responses"](request, "m", [Choice(np.array([1]))], TOKENIZER)
    created, begun = form.opening()
    error, failed = form.failure(Failure(408, "too late", code="timeout"))
    about = {"code": "timeout", "message": "too late", "param": None}
    assert error == {"type": "error", "sequence_number": 2, **about}
    assert (failed["type"], failed["sequence_number"]) == ("response.failed", 3)
    assert failed["response"] == begun["response"] | {"status": "failed", "error": about}
    assert created["response"] == begun["response"]


@pytest.mark.parametrize(
    ("arguments", "item"),
    [
        (PARIS, {"type": "function_call", "name": "weather", "namespace": "m", "arguments": PARIS}),
        ('{"input": "a\\nb"}', {"type": "custom_tool_call", "name": "weather", "input": "a\nb"}),
        # An argument of another name.
        (PARIS, {"type": "custom_tool_call", "name": "weather", "input": PARIS}),
    ],
)
def test_a_response_calls_a_tool_as_its_kind_of_tool_is_called(
    arguments: str, item: dict[str, str]
) -> None:
    answer = f'<tool_call>{{"name": "get_time", "arguments": {arguments}}}</tool_call>'
    own = {name: value for name, value in item.items() if name not in ("arguments", "input")}
    request = ParsedRequest(
        [], tools=ToolUse("hermes", NAMES), called={"get_time": own}, described={}
    )
    pieces = [TextPiece(5, answer, finish_reason="stop")]
    form = FORMATS["responses"](request, "m", [Choice(np.array([1]), 0, pieces)], None)
    events = [*form.opening(), *form.piece(0, pieces[0]), *form.closing(include_usage=False)]
    [found] = events[-1]["response"]["output"]
    assert found.items() >= item.items()
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    added, delta, done, ended = map(adapter.validate_python, events[-5:-1])
    given = "input" if "input" in item else "arguments"
    assert added.item.model_dump()[given] == ""
    assert ended.item.model_dump(exclude_none=True) == found
    assert delta.type == f"response.{item['type']}_{given}.delta" and delta.delta == item[given]
    assert getattr(done, given) == item[given] and done.item_id == found["id"]


def test_messages_of_one_side_that_follow_each_other_are_one_turn() -> None:
    """Mistral's template refuses the two questions that Codex begins with."""
    template = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    said = [("developer", "A."), ("user", "B."), ("user", "C."), ("assistant", "D.")]
    items = [{"role": role, "content": text} for role, text in [*said, ("assistant", "E.")]]
    body = {"model": "m", "instructions": "Be brief.", "input": items}
    text = prompt_of(parse_request("responses", body, encoder(template), LIMITS))
    assert text == "[system]Be brief.\n\nA.[user]B.\n\nC.[assistant]D.\n\nE."


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": []}, "input", "input must hold at least one message"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be at least 1"),
        ({"input": "a " * 600}, "input", "maximum context length"),
        ({"store": True}, "store", "store must be false or left out: this server keeps no"),
        ({"previous_response_id": "x"}, "previous_response_id", "unsupported field"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "must have a name and a sc"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
    ],
)
def test_what_responses_cannot_do_is_refused_by_its_name(
    url: str, fields: dict[str, Any], param: str, message: str
) -> None:
    body = {"model": "smollm2", "input": "Hello"} | fields
    refusal = httpx.post(f"{url}/v1/responses", json=body)
    assert refusal.status_code == 400
    assert refusal.json()["error"]["param"] == param
    assert message in refusal.json()["error"]["message"]
