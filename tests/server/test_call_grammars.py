"""A format of answers beside tools: the grammar of what is JSON or calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from razor_dist.api.parsing import parse_request
from razor_dist.api.request import ParsedRequest
from razor_dist.api.tools import ToolParser
from razor_dist.config.errors import RequestError
from razor_dist.frontend.assembler import TextPiece
from razor_dist.protocol.structured_outputs import StructuredOutputsParams
from tests.server.tool_calls import GLM_0414, HERMES, LIMITS, LLAMA, TOOLS, encoder

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Paris?"}]}
BODY["tools"] = TOOLS


def parse_chat(template: str, **fields: Any) -> ParsedRequest:
    return parse_request("chat", BODY | fields, encoder(template), LIMITS)


PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
JSON: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": PERSON | {"additionalProperties": False}},
}


@pytest.mark.parametrize(("template", "form"), [(HERMES, "hermes"), (LLAMA, "llama")])
@pytest.mark.parametrize("are_tokens", [False, True])
def test_a_format_of_answers_leaves_the_model_its_calls(
    template: str, form: str, are_tokens: bool
) -> None:
    own = encoder(template)
    assert own.tokenizer is not None
    if are_tokens:  # as in Qwen's tokenizers
        own.tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    limits = LIMITS._replace(prompt=LIMITS.prompt._replace(vocab_size=len(own.tokenizer)))
    tokenizer = from_tokenizer(own.tokenizer)
    key = "arguments" if form == "hermes" else "parameters"
    call = json.dumps({"name": "get_time", key: {"of": [1]}})
    other = json.dumps({"name": "get_age", key: {}})
    if form == "hermes":
        call, other = (f"<tool_call>\n{one}\n</tool_call>" for one in (call, other))
    written = {'{"age": 31}': True, call: True, f"{call}\n{call}": form == "hermes"}
    written |= {other: False, '{"age": "old"}': False, "Hello": False, '{"age": 31}' + call: False}
    for parallel in (True, False):
        asked = BODY | {"response_format": JSON, "parallel_tool_calls": parallel}
        [prompt] = (found := parse_request("chat", asked, own, limits)).prompts
        structured = prompt.params.structured_outputs
        assert isinstance(structured, StructuredOutputsParams)
        structured.check()
        for answer, matches in written.items():
            ids = [*own.tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token]
            matcher = LLMatcher(tokenizer, structured.llguidance())
            expected = matches and (parallel or answer != f"{call}\n{call}")
            assert (matcher.validate_tokens(ids) == len(ids)) is expected, answer
            assert not matcher.is_error()
            if expected:
                assert found.tools is not None
                read = ToolParser(found.tools, own.tokenizer).read(
                    TextPiece(5, answer, finish_reason="stop")
                )
                assert (len(read[1]), read[0].text == answer) == (
                    answer.count(key),
                    answer[2] == "a",
                )


def test_constraints_and_free_calls_that_exclude_each_other() -> None:
    for template, name, given in (
        (HERMES, "structured_outputs", {"regex": "a"}),
        (GLM_0414, "response_format", {"type": "json_object"}),
    ):
        fields: dict[str, Any] = {name: given}
        with pytest.raises(RequestError, match=f"{name} keeps .* model from calling") as refused:
            parse_chat(template, **fields)
        assert refused.value.param == name
        parse_chat(template, **fields, tool_choice="none")
    parse_chat(GLM_0414, response_format={"type": "text"})
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"items": deep}
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": deep}}
    with pytest.raises(RequestError, match=r"^response_format: .*nested more than") as refused:
        parse_chat(HERMES, response_format=asked)
    assert refused.value.param == "response_format"


def test_a_forced_call_has_no_text_that_a_format_could_be_of() -> None:
    plain = parse_chat(HERMES, tool_choice="required").prompts[0].params
    assert (
        parse_chat(HERMES, tool_choice="required", response_format=JSON).prompts[0].params == plain
    )
