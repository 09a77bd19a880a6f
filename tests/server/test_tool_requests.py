"""Requests with tools: what reaches the template, and the grammars of calls that are forced."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from razor_dist.api.call_grammars import forced
from razor_dist.api.parsing import parse_request
from razor_dist.api.request import Endpoint, ParsedRequest
from razor_dist.api.tools import ToolParser, ToolUse, tool_use
from razor_dist.config.errors import RequestError
from razor_dist.frontend.assembler import TextPiece
from razor_dist.protocol.vocabulary import load_vocabulary, serialized, vocabulary_of
from tests.server.message_bodies import prompt_of
from tests.server.tool_calls import (
    ANSWERS,
    CLIENT_BODIES,
    GLM_0414,
    HERMES,
    LIMITS,
    LLAMA,
    NAMES,
    PARAMETERS,
    PARIS,
    TOOLS,
    encoder,
)
from tests.tokenizer import GLM_TEMPLATE, smollm2_tokenizer


def parse_chat(template: str | dict[str, str] | None, **fields: Any) -> ParsedRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "Paris?"}], "tools": TOOLS}
    return parse_request("chat", body | fields, encoder(template), LIMITS)


def schema_of(structured: Any) -> Any:
    return json.loads(structured.json)


def test_tokenize_leaves_out_the_tools_that_a_chat_leaves_out() -> None:
    said, searching = [{"role": "user", "content": "Paris?"}], [{"type": "web_search"}]
    body: dict[str, Any] = {"messages": said, "tools": searching}
    with pytest.raises(RequestError, match=r"tools\[0\].type .*; turn it off in the client"):
        parse_request("tokenize", body, encoder(HERMES), LIMITS)
    limits = LIMITS._replace(unknown_fields="warn")
    found = parse_request("tokenize", body, encoder(HERMES), limits)
    assert found.ignored == ["tools[] of type web_search"]
    del body["tools"]
    assert found.answer == parse_request("tokenize", body, encoder(HERMES), LIMITS).answer


@pytest.mark.parametrize(
    ("endpoint", "choice", "others"),
    [
        ("chat", "required", []),
        ("responses", {"type": "function", "name": "search"}, []),
        ("responses", {"type": "web_search"}, []),
        ("responses", {"type": "web_search_preview"}, []),
        ("responses", {"type": "web_search"}, [{"type": "function", "name": "f"}]),
        ("messages", {"type": "tool", "name": "search"}, [{"name": "f", "input_schema": {}}]),
    ],
)
def test_a_tool_that_is_left_out_cannot_be_forced(
    endpoint: Endpoint, choice: object, others: list[dict[str, Any]]
) -> None:
    said = [{"role": "user", "content": "Paris?"}]
    searching = {"type": "web_search", "name": "search"}
    body = {"model": "m", "tools": [searching, *others], "tool_choice": choice}
    body |= {"input": said} if endpoint == "responses" else {"messages": said, "max_tokens": 5}
    limits = LIMITS._replace(unknown_fields="warn")
    with pytest.raises(RequestError, match="does not have and leaves out: web_search") as refused:
        parse_request(endpoint, body, encoder(HERMES), limits)
    assert refused.value.param == "tool_choice"


def test_a_choice_of_none_or_any_of_the_tools_that_are_left_out_is_left_out_too() -> None:
    said = [{"role": "user", "content": "Paris?"}]
    choice = {"type": "auto", "name": None, "disable_parallel_tool_use": True}
    body = {"model": "m", "max_tokens": 5, "messages": said, "tool_choice": choice}
    body["tools"] = [{"type": "web_search_20250305", "name": "web_search"}]
    limits = LIMITS._replace(unknown_fields="warn")
    found = parse_request("messages", body, encoder(HERMES), limits)
    assert found.tools is None and found.ignored == ["tools[] of type web_search_20250305"]


def test_the_format_is_that_of_the_models_template() -> None:
    templates = {
        "hermes": HERMES,
        "mistral": "{{ tools }} [TOOL_CALLS] [/INST]",
        "llama": LLAMA,
        "glm": GLM_0414,
    }
    for name, template in templates.items():
        assert tool_use(encoder(template), NAMES, None) == ToolUse(name, NAMES)
    assert tool_use(encoder(GLM_TEMPLATE), NAMES, None) == ToolUse("glm", NAMES)
    bare = "{% for message in messages %}{{ message.content }}{% endfor %}"
    for template in (None, bare, bare + "{% if tools %}{% endif %}"):
        for choice in (None, "required", NAMES[0]):
            with pytest.raises(RequestError, match="knows no tools"):
                tool_use(encoder(template), NAMES, choice)
    with pytest.raises(RequestError, match="in a format that is not known here") as refused:
        tool_use(encoder("{{ tools }} <tool_call> <function="), NAMES, None)
    assert refused.value.param == "tools"


def test_tools_and_their_results_reach_the_template() -> None:
    request = parse_chat(HERMES)
    assert request.tools == ToolUse("hermes", NAMES)
    assert prompt_of(request).count('"get_weather"') == 1
    call = {"id": "c1", "type": "function", "function": {"name": NAMES[0], "arguments": PARIS}}
    history = [
        {"role": "user", "content": "Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    text = prompt_of(parse_chat(HERMES, messages=history))
    assert "assistant: <tool_call>Paris</tool_call>tool: rain" in text
    deep = {**call, "function": {"name": NAMES[0], "arguments": "[" * 100_000}}
    broken = parse_chat(HERMES, messages=[{"role": "assistant", "tool_calls": [deep]}])
    assert "assistant: <tool_call></tool_call>" in prompt_of(broken)
    none = parse_chat(HERMES, tool_choice="none")  # after calls, say, whose prompt is cached
    assert none.tools is None and prompt_of(none) == prompt_of(request)


@pytest.mark.parametrize("arguments", ["", " ", "null", "{}"])
def test_calls_without_arguments_have_an_object_of_none(arguments: str) -> None:
    template = HERMES.replace("arguments.city", "arguments.items() | list")
    function = {"name": NAMES[0], "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function}
    request = parse_chat(template, messages=[{"role": "assistant", "tool_calls": [call]}])
    assert "assistant: <tool_call>[]</tool_call>" in prompt_of(request)


def _history(*calls: str) -> list[dict[str, Any]]:
    called = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": PARIS}}
        for n, name in enumerate(calls)
    ]
    returned = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"rain {n}"}
        for n, call in enumerate(called)
    ]
    asked = {"role": "user", "content": "Paris?"}
    return [asked, {"role": "assistant", "content": "I look.", "tool_calls": called}, *returned]


@pytest.mark.parametrize("template", [GLM_TEMPLATE, GLM_0414])
def test_glms_templates_have_calls_as_messages_of_their_own(template: str) -> None:
    """They leave out ``tool_calls`` and the role ``tool`` without an error."""
    text = prompt_of(parse_chat(template, messages=_history(*NAMES)))
    begin, _, conversation = text.partition("<|user|>")
    assert begin.startswith("[gMASK]<sop><|system|>") and all(name in begin for name in NAMES)
    assert conversation == (
        f"\nParis?<|assistant|>\nI look.<|assistant|>get_weather\n{PARIS}"
        f"<|assistant|>get_time\n{PARIS}<|observation|>\nrain 0<|observation|>\nrain 1<|assistant|>"
    )
    # Sources know each content's place in the text that the template wrote.
    [prompt] = parse_chat(template, messages=_history(NAMES[0]), return_sources=2).prompts
    assert prompt.text is not None
    assert [part.text for part in prompt.text.parts] == ["Paris?", "I look.", "rain 0"]


def test_what_the_template_leaves_out_is_refused() -> None:
    silent = HERMES.replace(
        "{% for message in messages %}", "{% for message in messages if message.role != 'tool' %}"
    )
    parse_chat(silent)
    with pytest.raises(RequestError, match="leaves out what tools return") as refused:
        parse_chat(silent, messages=_history(NAMES[0]))
    assert refused.value.param == "messages"
    for template in (smollm2_tokenizer().chat_template, HERMES.replace("message.tool_calls", "[]")):
        with pytest.raises(RequestError, match="leaves out calls of tools"):
            parse_chat(template, messages=_history(NAMES[0]), tools=None)


def test_a_template_in_parts_is_judged_by_the_part_with_tools() -> None:
    """transformers renders ``tool_use`` where a request has tools; some list them in the system."""
    plain = "{% for message in messages %}{% if message.role in ('user', 'assistant') %}"
    parts = {"default": plain + "{{ message.content }}{% endif %}{% endfor %}", "tool_use": HERMES}
    assert "rain 0" in prompt_of(parse_chat(parts, messages=_history(NAMES[0])))
    inside = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}"
        "{% if message.role == 'system' and tools %}{{ tools }}{% endif %}{% endfor %}"
    )
    assert encoder(inside).tools.shows_tools


def test_tokens_of_a_chat_with_tools_are_counted_with_them() -> None:
    body = {"messages": [{"role": "user", "content": "Paris?"}], "tools": TOOLS}
    found = parse_request("tokenize", body, encoder(HERMES), LIMITS)
    asked = parse_request("chat", {"model": "m", **body}, encoder(HERMES), LIMITS)
    assert found.answer is not None
    assert json.loads(found.answer)["tokens"] == asked.prompts[0].tokens.tolist()


def test_a_call_without_a_name_is_refused() -> None:
    """As `LLM.chat` may get one."""
    broken = {"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}
    with pytest.raises(RequestError, match="refuses these messages"):
        encoder(GLM_0414).chat_text([{"role": "user", "content": "a"}, broken])


def test_an_answer_has_one_call_where_the_template_takes_no_more() -> None:
    """Llama 3.1's refuses two in a message, and so all that follows on such an answer."""
    assert parse_chat(LLAMA).tools == ToolUse("llama", NAMES, parallel=False)
    [prompt] = parse_chat(LLAMA, tool_choice="required").prompts
    assert schema_of(prompt.params.structured_outputs)["maxItems"] == 1
    assert "rain 0" in prompt_of(parse_chat(LLAMA, messages=_history(NAMES[0])))
    with pytest.raises(RequestError, match="only supports single tool-calls"):
        parse_chat(LLAMA, messages=_history(*NAMES))


def test_a_forced_choice_is_a_grammar() -> None:
    named = {"type": "function", "function": {"name": "get_time"}}
    request = parse_chat(HERMES, tool_choice=named)
    [structured] = [prompt.params.structured_outputs for prompt in request.prompts]
    assert schema_of(structured) == PARAMETERS
    assert request.tools == ToolUse("named", ["get_time"])
    assert request.names["structured_outputs"] == "tools"  # which errors name
    bare = TOOLS[1] | {"function": {"name": "get_time", "parameters": {"properties": {}}}}
    [prompt] = parse_chat(HERMES, tools=[bare], tool_choice=named).prompts
    assert schema_of(prompt.params.structured_outputs) == {"type": "object", "properties": {}}
    request = parse_chat(HERMES, tool_choice="required")
    assert request.names["structured_outputs"] == "tools"
    schema: dict[str, Any] = {}
    for _ in range(450):
        schema = {"anyOf": [schema]}
    deep = TOOLS[0] | {"function": {"name": "deep", "parameters": schema}}
    with pytest.raises(RequestError, match="nested too deeply"):
        parse_chat(HERMES, tools=[deep], tool_choice="required")
    [structured] = [prompt.params.structured_outputs for prompt in request.prompts]
    kinds = schema_of(structured)["items"]["anyOf"]
    assert [kind["properties"]["name"]["const"] for kind in kinds] == NAMES


def test_each_tools_references_begin_at_its_own_schema() -> None:
    def tool(*places: str) -> dict[str, Any]:
        properties = {"place": {"$ref": "#/$defs/Place"}, "inner": {"$ref": "#"}}
        defs = {"Place": {"enum": list(places)}}
        return {"type": "object", "properties": properties, "$defs": defs}

    structured = forced({"a": tool("here"), "b": tool("there")}, "required")
    structured.check()
    structured.compiled(load_vocabulary(vocabulary_of(serialized(smollm2_tokenizer()), 49152, [2])))
    call = {"name": "a", "parameters": {"inner": {"place": "here"}}}
    jsonschema.validate([call], schema_of(structured))
    call["parameters"] = {"inner": {"place": "there"}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([call], schema_of(structured))


@pytest.mark.parametrize("choice", ["a", "required"])
def test_a_schema_that_holds_itself_can_be_forced(choice: str) -> None:
    node: dict[str, Any] = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "default": {"$ref": "#"},  # a property of that name
            "children": {"type": "array", "items": {"$ref": "#"}},
        },
        "required": ["name"],
        "additionalProperties": False,
        "default": {"$ref": "#"},  # a value that looks like a reference
    }
    structured = forced({"a": node, "b": {"type": "object"}}, choice, parallel=False)
    structured.check()
    tree = {"name": "x", "children": [{"name": "y", "default": {"name": "z", "children": []}}]}
    answer = tree if choice == "a" else [{"name": "a", "parameters": tree}]
    tokenizer = from_tokenizer(smollm2_tokenizer())
    tokens = tokenizer.tokenize_str(json.dumps(answer))
    wrong = tokenizer.tokenize_str(json.dumps(answer).replace('"y"', "7"))
    for written, accepted in ((tokens, True), (wrong, False)):
        matcher = LLMatcher(tokenizer, structured.llguidance())
        assert (matcher.validate_tokens(written) == len(written)) is accepted
    if choice == "required":
        assert schema_of(structured)["maxItems"] == 1
        assert schema_of(structured)["$defs"]["a"]["default"] == {"$ref": "#"}


def test_one_call_at_most_unless_parallel() -> None:
    answer = next(a for name, a, _, calls in ANSWERS if name == "hermes" and len(calls) == 2)
    for parallel, names in ((True, NAMES), (False, NAMES[:1])):
        parser = ToolParser(ToolUse("hermes", NAMES, parallel), None)
        last, calls = parser.read(TextPiece(5, answer, finish_reason="stop"))
        assert [call["function"]["name"] for call in calls] == names
        assert last.finish_reason == "tool_calls"
    assert parse_chat(HERMES, parallel_tool_calls=False).tools == ToolUse("hermes", NAMES, False)


CONVERSATIONS = [entry for entry in CLIENT_BODIES if "calls" in entry]


@pytest.mark.parametrize("entry", CONVERSATIONS, ids=[entry["client"] for entry in CONVERSATIONS])
def test_conversations_with_tools_are_taken_as_agents_send_them(entry: dict[str, Any]) -> None:
    endpoint: Endpoint = "responses" if "input" in entry["body"] else "chat"
    template = (
        "{% for tool in tools %}{{ tool | tojson }} <tool_call> arguments\n{% endfor %}"
        "{% for message in messages %}[{{ message.role }}] {{ message.content }}"
        "{% for call in message.tool_calls %}<{{ call.function.name }}>{% endfor %}{% endfor %}"
    )
    limits = LIMITS._replace(model="smollm2")
    text = prompt_of(parse_request(endpoint, entry["body"], encoder(template), limits))
    assert text.rpartition("arguments\n")[2] == entry["calls"]


def test_items_of_an_answer_that_is_not_kept_are_refused_with_the_remedy() -> None:
    """The AI SDK sends them unless its ``store`` is false."""
    items = [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": "msg_1"}]
    with pytest.raises(RequestError, match=r"keeps no answers: .* store: false") as refused:
        parse_request("responses", {"model": "m", "input": items}, encoder(HERMES), LIMITS)
    assert refused.value.param == "input[1]"


def test_what_agents_send_of_tools_reaches_the_model() -> None:
    template = HERMES.replace("call.function.arguments.city", "call.function | tojson")
    limits = LIMITS._replace(model="smollm2", unknown_fields="warn")

    def read(entry: dict[str, Any]) -> ParsedRequest:
        endpoint: Any = entry["path"].removeprefix("/v1/")
        with pytest.raises(RequestError):  # each has something that this server cannot do
            parse_request(endpoint, entry["body"], encoder(None), LIMITS._replace(model="smollm2"))
        return parse_request(endpoint, entry["body"], encoder(template), limits)

    claude, codex, patch = [read(entry) for entry in CLIENT_BODIES if "agent" in entry]
    image = "[an image, which this model cannot see]"
    assert f"tool: {image}" in prompt_of(claude) and "images" in claude.ignored
    said = prompt_of(codex)
    assert codex.ignored == ["images"] and f"tool: {image}" in said
    shown = '{"type": "function", "function": {"name": "mcp__weather__get_weather"'
    call = '<tool_call>{"name": "mcp__weather__get_weather", "arguments": {"city": "Rome"}}'
    assert said.count(shown) == 1 and call in said and "Output:rain in Rome" in said
    assert codex.called["multi_agent_v1__close_agent"] == {
        "type": "function_call",
        "name": "close_agent",
        "namespace": "multi_agent_v1",
    }
    said = prompt_of(patch)
    assert patch.called == {"apply_patch": {"type": "custom_tool_call", "name": "apply_patch"}}
    assert said.count("The grammar of its input:") == 1 and patch.ignored == []
    assert '{"input": "*** Begin Patch' in said and "tool: Exit code: 0" in said


def test_a_mark_on_calls_without_content_keeps_nothing_and_is_told() -> None:
    history = _history(NAMES[0])
    history[1] |= {"content": None, "cache_control": {"type": "ephemeral"}}
    body = {"model": "m", "messages": history}
    found = parse_request("chat", body, encoder(HERMES), LIMITS._replace(pins=True))
    assert (found.contexts, found.ignored) == ([], ["messages[].cache_control"])


def test_responses_say_the_same_as_a_chat() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": NAMES[0], "arguments": PARIS}}
    chat = parse_chat(
        HERMES,
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Paris?"},
            {"role": "assistant", "content": "I look.", "tool_calls": [call, call | {"id": "c2"}]},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ],
        tool_choice="required",
    )
    item = {"type": "function_call", "name": NAMES[0], "arguments": PARIS, "status": "completed"}
    body = {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": "Paris?"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {**item, "call_id": "c1", "id": "fc_1"},
            {**item, "call_id": "c2"},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        ],
        "tools": [{"type": "function", **tool["function"]} for tool in TOOLS],
        "tool_choice": "required",
        "temperature": 0.25,
    }
    found = parse_request("responses", body, encoder(HERMES), LIMITS)
    assert prompt_of(found) == prompt_of(chat) and found.tools == chat.tools
    own, theirs = found.prompts[0].params, chat.prompts[0].params
    assert own.structured_outputs == theirs.structured_outputs
    assert found.described is not None
    assert (found.described["temperature"], found.described["top_p"]) == (0.25, 1.0)
    assert (found.described["tool_choice"], len(found.described["tools"])) == ("required", 2)
    with pytest.raises(RequestError, match=r"tools\[0\]\.type must be 'function'"):
        parse_request(
            "responses", body | {"tools": [{"type": "web_search"}]}, encoder(HERMES), LIMITS
        )
    with pytest.raises(RequestError, match=r"missing required field 'input\[0\]\.call_id'"):
        parse_request("responses", body | {"input": [item]}, encoder(HERMES), LIMITS)
