"""Bad input is refused by name, in OpenAI's error shape."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from razor_dist.api.schema import ChatBody
from tests import fake_engine

JSON = {"Content-Type": "application/json"}
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CHAT = {"model": "smollm2", "messages": HELLO}
TEXT = {"model": "smollm2", "prompt": "Hello"}
LIMIT = fake_engine.MAX_MODEL_LEN


def refused(url: str, path: str, **post: Any) -> tuple[int, str | None, str | None, str]:
    """Status, param, code and message of a refusal; checks its shape."""
    response = httpx.post(f"{url}{path}", **post)
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if response.status_code in (400, 404, 413):
        assert error["type"] == "invalid_request_error"
    return response.status_code, error["param"], error["code"], error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "messages must hold at least one message"),
        ({"messages": "Hello"}, "messages", "messages must be a valid list"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing required field"),
        ({"messages": [{"role": "bot", "content": ""}]}, "messages[0].role", "must be 'system'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "messages[0].content",
            "must be a string or a list of",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "tone": 1}]}]},
            "messages[0].content[0].tone",
            "unsupported field 'messages[0].content[0].tone'",
        ),
        ({"messages": [HELLO[0] | {"name": 7}]}, "messages[0].name", "must be a valid string"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}]},
            "messages[0].tool_calls[0].function",
            "missing required field",
        ),
        (
            {"messages": [{"role": "assistant", "content": None}]},
            "messages[0].content",
            "must be a string or a list of",
        ),
        ({"messages": ["Hello"]}, "messages[0]", "must be a valid dictionary"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens must be at least 1, got -1"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0"),
        ({"max_tokens": "5"}, "max_tokens", "max_tokens must be a valid integer"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "must be at least 1, got -1"),
        (
            {"max_completion_tokens": 2**63},
            "max_completion_tokens",
            "max_completion_tokens must be at most 9223372036854775807",
        ),
        ({"n_predict": 2**63}, "n_predict", "n_predict must be at most 9223372036854775807"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "contradict"),
        ({"temperature": 3}, "temperature", "temperature must be at most 2, got 3"),
        ({"top_p": 0}, "top_p", "top_p must be greater than 0, got 0"),
        ({"timeout": 0}, "timeout", "timeout must be greater than 0"),
        ({"timeout": "5"}, "timeout", "timeout must be a valid number"),
        ({"timeout": True}, "timeout", "timeout must be a valid number"),
        ({"top_k": -2}, "top_k", "top_k must be at least -1, got -2"),
        ({"seed": 2**64}, "seed", "seed must be less than"),
        ({"stop": [""]}, "stop", "stop must be a non-empty string"),
        ({"stop": 5}, "stop", "stop must be a string or a list of strings"),
        ({"stop": ["x"] * 65}, "stop", "stop must be a list of at most 64, got 65"),
        ({"stop": "x" * 1001}, "stop", "stop must be a string of at most 1000 characters"),
        (
            {"stop_token_ids": [5] * 1025},
            "stop_token_ids",
            "a list of at most 1024, got 1025",
        ),
        ({"stop_token_ids": [10**6]}, "stop_token_ids", "is not in [0, 49152)"),
        ({"top_logprobs": 2}, "top_logprobs", "only allowed with logprobs: true"),
        (
            {"logprobs": True, "top_logprobs": 21},
            "top_logprobs",
            "must be at most 20, got 21",
        ),
        ({"stream_options": {"include_usage": True}}, "stream_options", "with stream: true"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": 0.0}},
            "stream_options.include_obfuscation",
            "stream_options.include_obfuscation must be false",
        ),
        ({"return_progress": True}, "return_progress", "with stream: true"),
        ({"return_sources": -1}, "return_sources", "must be at least 0, got -1"),
        ({"return_sources": 101}, "return_sources", "must be at most 100, got 101"),
        ({"return_sources": True}, "return_sources", "must be a valid integer"),
        ({"return_source": 3}, "return_source", "did you mean 'return_sources'?"),
        ({"temprature": 1}, "temprature", "unsupported field 'temprature'; did you mean 'temper"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing required field"),
        ({"tools": [TOOL]}, "tools", "the model's chat template knows no tools"),
        ({"tools": [TOOL, TOOL]}, "tools", "two tools have the same name"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice is only allowed with tools"),
        (
            {"tool_choice": "any"},
            "tool_choice",
            "tool_choice must be 'none', 'auto', 'required' or an object that names a tool",
        ),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.type", "type must be 'function'"),
        (
            {"tool_choice": {"type": "function", "name": "weather"}},
            "tool_choice.function",
            "missing required field 'tool_choice.function'",
        ),
        ({"n": 2, "best_of": 3}, "best_of", "unsupported field 'best_of'"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "other"}},
            },
            "tool_choice",
            "there is no tool 'other'",
        ),
        (
            {
                "tools": [TOOL],
                "tool_choice": "required",
                "structured_outputs": {"regex": "a"},
            },
            "tool_choice",
            "a forced tool_choice excludes structured_outputs",
        ),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages[0]",
            "must have tool_call_id if its role is tool",
        ),
        ({"presence_penalty": 2.5}, "presence_penalty", "must be at most 2, got 2.5"),
        ({"repetition_penalty": 0}, "repetition_penalty", "must be at least 0.01, got 0"),
        ({"min_p": "a"}, "min_p", "min_p must be a valid number"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "must have token ids for keys, got 'x'"),
        (
            {"logit_bias": dict.fromkeys(map(str, range(1025)), 1)},
            "logit_bias",
            "must have at most 1024 token ids, got 1025",
        ),
        ({"logit_bias": {"5": 101}}, "logit_bias", "logit_bias[5] must be at most 100, got 101"),
        ({"logit_bias": {"49152": 1}}, "logit_bias", "token id 49152 in logit_bias is not in"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be 'text', 'json_ob"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must have json_schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "foo"}},
                }
            },
            "response_format",
            "response_format: json cannot be used: Invalid type: foo",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of json, json_object"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex cannot be used"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "exclude each other",
        ),
        ({"guided_regex": "a"}, "guided_regex", 'did you mean \'structured_outputs: {"regex"'),
        ({"cache_salt": "x" * 1025}, "cache_salt", "must have at most 1024 characters"),
        ({"n": 129}, "n", "n must be at most 128, got 129"),
        ({"n": 5}, "n", "n must ask for at most 4 answers, got 5"),
        ({"store": 0}, "store", "store must be a valid boolean"),
        ({"store": True}, "store", "this server keeps no answers"),
        ({"messages": [HELLO[0] | {"tone": 1}]}, "messages[0].tone", "unsupported field"),
        ({"metadata": {"a": 1}}, "metadata.a", "must be a valid string"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a", "at most 512 characters"),
        ({"metadata": {"x" * 65: "a"}}, f"metadata.{'x' * 65}.[key]", "at most 64 characters"),
        ({"metadata": {f"{n}": "" for n in range(17)}}, "metadata", "at most 16 items"),
        ({"user": "x" * 513}, "user", "at most 512 characters"),
        ({"chat_template_kwargs": {"tokenize": 0}}, "chat_template_kwargs", "not hold 'tokenize'"),
        ({"min_tokens": -1}, "min_tokens", "min_tokens must be at least 0, got -1"),
        *(
            ({"min_tokens": 9, name: 8}, name, f"{name} must be at least min_tokens (9), got 8")
            for name in ("max_tokens", "max_completion_tokens", "n_predict")
        ),
        *(
            ({"min_tokens": 1, name: given}, name, f"{name} excludes min_tokens")
            for name, given in (
                ("structured_outputs", {"regex": "a"}),
                ("response_format", {"type": "json_object"}),
            )
        ),
        (
            {"min_tokens": 1, "tools": [TOOL], "tool_choice": "required"},
            "tool_choice",
            "a forced tool_choice excludes min_tokens",
        ),
    ],
)
def test_a_chat_field_is_refused_by_name(
    url: str, fields: dict[str, Any], param: str, message: str
) -> None:
    refusal = refused(url, "/v1/chat/completions", json=CHAT | fields)
    assert refusal[:3] == (400, param, None)
    assert message in refusal[3]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 8}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
    ],
)
def test_what_min_tokens_excludes_has_the_name_of_a_responses_field(
    url: str, fields: dict[str, Any], param: str
) -> None:
    asked = {"model": "smollm2", "input": "Hello", "min_tokens": 9, **fields}
    refusal = refused(url, "/v1/responses", json=asked)
    assert refusal[:2] == (400, param) and refusal[3].startswith(param)


MALFORMED: list[Any] = [[], {}, None, [1, "a"], [[]], [[1], [True]], [1.5], [[1], "a"]]
FORMS = "prompt must be a string, a list of strings, a list of token ids"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        *((prompt, FORMS) for prompt in MALFORMED),
        *((prompt, "the prompt is empty") for prompt in ("", [""], ["a", ""])),
        *(([1, t], f"token id {t} in prompt is not in [0, 49152)") for t in (-1, 49152, 10**30)),
    ],
)
def test_a_prompt_that_cannot_be_read_is_refused(url: str, prompt: object, message: str) -> None:
    refusal = refused(url, "/v1/completions", json=TEXT | {"prompt": prompt})
    assert refusal[:3] == (400, "prompt", None)
    assert message in refusal[3]


def test_fields_that_ask_for_nothing_are_accepted(url: str) -> None:
    nothing = {name: values[0] for name, values in ChatBody.neutral.items() if values}
    nulls = dict.fromkeys([*ChatBody.neutral, "extra", "guided_json"])
    hints = {
        "metadata": {"a": "b"},
        "prompt_cache_key": "a",
        "prompt_cache_retention": "24h",
        "safety_identifier": "somebody",
        "prompt_cache_options": {"mode": "explicit", "ttl": "1h"},
        "client_metadata": {"session": "a"},
        "service_tier": "fast",
        "parallel_tool_calls": False,
        "store": False,
    }
    best = {"n": 2, "best_of": 2}
    part = {"type": "text", "text": "Hi", "prompt_cache_breakpoint": {}}
    part |= {"cache_control": {"type": "ephemeral", "scope": "global"}}
    parts = {"messages": [{"role": "user", "content": [part]}]}
    other = {"n": 1, "user": "somebody", "stop": None, "logprobs": False, "top_logprobs": 0}
    for fields in (nothing, nulls, hints, best, parts, other):
        response = httpx.post(f"{url}/v1/chat/completions", json=CHAT | fields)
        assert response.status_code == 200, response.text
    said = {"type": "message", "role": "assistant", "phase": "final_answer", "content": "Hi"}
    fields = {"input": [said], "reasoning": {"context": "all_turns"}}
    response = httpx.post(f"{url}/v1/responses", json={"model": CHAT["model"], **fields})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"model": "\xff"}', "the body is not valid UTF-8: byte 11 is 0xff"),
        (b"{", "the body is not valid JSON"),
        (b"", "the body is not valid JSON"),
        (b"[]", "the body must be a JSON object"),
        (b'{"temperature": NaN}', "NaN is not a JSON number"),
        (b'{"tools": [1, -1e999]}', "the number -1e999 is out of range"),
        (b'{"model": "\\ud800"}', "lone surrogate"),
        (b'{"model": "a", "model": "b"}', "the key 'model' is given twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "the body is not valid JSON"),
    ],
)
def test_a_malformed_body_is_refused(url: str, body: bytes, message: str) -> None:
    refusal = refused(url, "/v1/chat/completions", content=body, headers=JSON)
    assert refusal[:3] == (400, None, None)
    assert message in refusal[3]


def test_an_error_does_not_repeat_all_that_was_sent(url: str) -> None:
    for body in (CHAT | {"x" * 200_000: 1}, CHAT | {"model": "x" * 200_000}):
        response = httpx.post(f"{url}/v1/chat/completions", json=body)
        assert response.status_code in (400, 404)
        assert len(response.content) < 2000


def test_whole_numbers_may_be_written_with_a_point(url: str) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 2.0, "seed": 1.0, "top_k": 3.0, "n": 1.0}
    answer = httpx.post(f"{url}/v1/completions", json=TEXT | body)
    assert answer.json()["usage"]["completion_tokens"] == 2
    refusal = refused(url, "/v1/completions", json=TEXT | {"max_tokens": 2.5})
    assert refusal[:2] == (400, "max_tokens")


@pytest.mark.parametrize("blanks", [0, 2**18], ids=["short", "long"])
def test_a_schema_may_hold_integers_of_any_size(url: str, blanks: int) -> None:
    """In a body that this process reads, and in one that another does."""
    amount = {"type": "integer", "maximum": 10**30, "default": -(2**63) - 1, "title": 10**40}
    schema = {"type": "object", "properties": {"amount": amount, "id": {"const": 2**64}}}

    def ask(path: str, fields: dict[str, Any]) -> dict[str, Any]:
        content = json.dumps(fields) + " " * blanks
        answer = httpx.post(f"{url}{path}", content=content, headers=JSON)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    structured = {"structured_outputs": {"json": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for fields in (structured, {"response_format": form}):
        assert ask("/v1/chat/completions", CHAT | fields)["choices"]
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    tool = {"type": "function", "name": "x", "parameters": schema}
    asked = {"model": "smollm2", "input": "Hello", "text": text}
    response = ask("/v1/responses", asked | {"tools": [tool], "tool_choice": "none"})
    assert response["text"] == text
    assert response["tools"][0]["parameters"] == schema


def test_another_method_is_refused_with_those_allowed(url: str) -> None:
    response = httpx.get(f"{url}/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


def test_a_body_above_the_limit_is_refused(url: str) -> None:
    large = b" " * (2**20 + 1)
    for content in (large, iter([large[:10], large[10:]])):  # with and without Content-Length
        refusal = refused(url, "/v1/chat/completions", content=content, headers=JSON)
        assert refusal[:3] == (413, None, "body_too_large")
        assert "larger than 1048576 bytes" in refusal[3]


def test_another_model_is_not_found(url: str) -> None:
    refusal = refused(url, "/v1/chat/completions", json=CHAT | {"model": "gpt-4o"})
    assert refusal[:3] == (404, "model", "model_not_found")
    assert "'gpt-4o' does not exist; this server serves 'smollm2'" in refusal[3]


def test_an_unknown_route_has_the_error_shape(url: str) -> None:
    assert refused(url, "/v1/embeddings", json={})[0] == 404


def test_a_context_that_does_not_fit_is_refused_with_both_numbers(url: str) -> None:
    for prompt, max_tokens in ([5] * 500, 13), ([5] * LIMIT, 1), ([5] * 600, 16):
        body = TEXT | {"prompt": prompt, "max_tokens": max_tokens}
        refusal = refused(url, "/v1/completions", json=body)
        assert refusal[:3] == (400, "prompt", "context_length_exceeded")
        total = len(prompt) + max_tokens
        assert f"{LIMIT} tokens, but {total} were asked for" in refusal[3]
        assert f"{len(prompt)} in the prompt and {max_tokens} for the answer" in refusal[3]
    fits = httpx.post(f"{url}/v1/completions", json=TEXT | {"prompt": [5] * 500, "max_tokens": 12})
    assert fits.json()["usage"]["completion_tokens"] == 12
    refusal = refused(url, "/v1/chat/completions", json=CHAT | {"max_tokens": LIMIT})
    assert refusal[:3] == (400, "messages", "context_length_exceeded")


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_the_clients_error(url: str, stream: bool) -> None:
    body = TEXT | {"prompt": [fake_engine.REFUSE, 5], "stream": stream}
    refusal = refused(url, "/v1/completions", json=body)
    assert refusal[::2] == (400, "context_length_exceeded")
    assert "more pages than the pool has" in refusal[3]


def test_more_prompts_than_the_queue_holds_are_refused(url: str) -> None:
    refusal = refused(url, "/v1/completions", json=TEXT | {"prompt": ["a"] * 5})
    assert refusal[:3] == (400, "prompt", None)
    assert "at most 4 prompts, got 5" in refusal[3]
