"""Fields that clients send: what they mean on every route, and what is said of the others."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import ValidationError

from razor_dist.api.parsing import parse_request
from razor_dist.api.request import Limits
from razor_dist.api.responses_format import FORMATS
from razor_dist.api.tokenize import DetokenizeBody
from razor_dist.config.errors import RequestError
from razor_dist.frontend.answers import Choice
from razor_dist.frontend.assembler import TextPiece
from razor_dist.frontend.prompts import PromptEncoder, PromptLimits
from razor_dist.protocol.repetition import LOOPS, RepetitionDetectionParams
from tests import fake_engine
from tests.server.process import ServerProcess, fake_server
from tests.server.tool_calls import CLIENT_BODIES
from tests.tokenizer import smollm2_tokenizer

BODIES = [entry for entry in CLIENT_BODIES if not {"agent", "calls"} & entry.keys()]
MESSAGES = [{"role": "user", "content": "Hello there"}]
BEGUN = [*MESSAGES, {"role": "assistant", "content": "The answer is"}]
GIVEN = {
    "chat": {"messages": MESSAGES},
    "completions": {"prompt": "Hello there"},
    "responses": {"input": "Hello there"},
}
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
PATHS["responses"] = "/v1/responses"
ROUTES = list(GIVEN)
TOKENIZER = smollm2_tokenizer()
ENCODER = PromptEncoder(TOKENIZER)
LIMITS = Limits("smollm2", 8, PromptLimits(512, 49152), {})


def parsed(route: Any, limits: Limits = LIMITS, **fields: Any) -> Any:
    body = {"model": "smollm2", **GIVEN[route], **fields}
    return parse_request(route, body, ENCODER, limits)


def params(route: str, limits: Limits = LIMITS, **fields: Any) -> Any:
    return parsed(route, limits, **fields).prompts[0].params


def prompt(route: str, **fields: Any) -> list[int]:
    return parsed(route, **fields).prompts[0].tokens.tolist()


@pytest.mark.parametrize("entry", BODIES, ids=[entry["client"] for entry in BODIES])
def test_what_clients_send_is_answered(
    url: str, warning: ServerProcess, entry: dict[str, Any]
) -> None:
    body, has_tools = dict(entry["body"]), "tools" in entry["body"]  # that the model knows not
    if "max_tokens" in body:  # within the fake engine's context
        body["max_tokens"] = min(body["max_tokens"], 256)
    answer = httpx.post(f"{warning.url() if has_tools else url}{entry['path']}", json=body)
    assert answer.status_code == 200, answer.text
    if has_tools:
        without = {name: value for name, value in body.items() if name != "tools"}
        assert text_of(answer) == text_of(httpx.post(f"{url}{entry['path']}", json=without))
        assert warning.log.count("unsupported field 'tools', which is ignored") == 1
        forced = httpx.post(
            f"{warning.url()}{entry['path']}", json=body | {"tool_choice": "required"}
        )
        assert "knows no tools" in forced.json()["error"]["message"]


def test_tools_of_other_types_are_refused_by_name_or_left_out(warning: ServerProcess) -> None:
    codex = next(entry["body"] for entry in BODIES if entry["client"].startswith("Codex"))
    with pytest.raises(RequestError, match=r"'web_search' is not supported; turn it off") as error:
        parse_request("responses", codex, ENCODER, LIMITS)
    assert error.value.param == "tools[1].type"
    found = parse_request("responses", codex, ENCODER, LIMITS._replace(unknown_fields="warn"))
    names = ["tools[] of type web_search", "tools"]
    assert found.ignored == names  # the model knows none
    searching = [{"type": "web_search_20250305", "name": "web_search"}]
    for route, path in (("chat", PATHS["chat"]), ("messages", "/v1/messages")):
        body = {"model": "smollm2", "messages": MESSAGES, "max_tokens": 2}
        chosen: Any = "auto" if route == "chat" else {"type": "auto"}
        body |= {"tools": searching, "tool_choice": chosen}
        answer = httpx.post(f"{warning.url()}{path}", json=body)
        assert answer.status_code == 200, answer.text
        with pytest.raises(RequestError, match=r"tools\[0\].type must be '(function|custom)'"):
            parse_request(route, body, ENCODER, LIMITS)  # type: ignore[arg-type]
    assert warning.log.count("'tools[] of type web_search_20250305'") == 1


def test_thoughts_that_come_back_are_left_out() -> None:
    said: dict[str, Any] = {"role": "assistant", "content": "The answer is"}
    after = [said, {"role": "user", "content": "And?"}]
    plain = prompt("chat", messages=[*MESSAGES, *after])
    thinking = [*MESSAGES, said | {"reasoning_content": "Hm.", "reasoning": "Hm."}, after[1]]
    assert prompt("chat", messages=thinking) == plain
    thoughts = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "a"}
    assert prompt("responses", input=[*MESSAGES, thoughts, *after]) == plain


def text_of(answer: httpx.Response) -> str:
    """The text of a streamed chat."""
    return "".join(re.findall('"delta":{"content":"(.*?)"}', answer.text))


@pytest.mark.parametrize("route", ROUTES)
def test_llama_cpps_names(route: str) -> None:
    assert params(route, repeat_penalty=1.5).repetition_penalty == 1.5
    assert params(route, repeat_penalty=1.5, repetition_penalty=1.5).repetition_penalty == 1.5
    with pytest.raises(
        RequestError, match=r"repeat_penalty \(1.5\) and repetition_penalty \(1.2\)"
    ):
        params(route, repeat_penalty=1.5, repetition_penalty=1.2)
    if route != "responses":
        room = 512 - len(prompt(route))
        assert params(route, n_predict=7).max_tokens == 7
        assert params(route, n_predict=-1).max_tokens == room
        with pytest.raises(RequestError, match=r"n_predict \(7\) and max_tokens \(3\) contradict"):
            params(route, n_predict=7, max_tokens=3)
        with pytest.raises(RequestError, match=r"n_predict must be -1 .* or at least 1, got 0"):
            params(route, n_predict=0)
        with pytest.raises(RequestError, match=r"^n_predict must be at most 9223372036854775807"):
            params(route, n_predict=2**63)
        with pytest.raises(RequestError, match=r"^max_tokens must be at least [01], got -1"):
            params(route, n_predict=-1, max_tokens=-1)
    else:
        with pytest.raises(RequestError, match=r"^max_output_tokens must be at most 922"):
            params(route, max_output_tokens=2**63)
    assert parsed(route, cache_prompt=True, cache_salt="a").cache_salt == "a"
    assert [parsed(route, cache_prompt=c).cache_prompt for c in (None, True, False)] == [1, 1, 0]


@pytest.mark.parametrize("route", ROUTES)
def test_truncated_prompts(route: str) -> None:
    whole = prompt(route)
    assert prompt(route, truncate_prompt_tokens=2) == whole[-2:]
    assert prompt(route, truncate_prompt_tokens=1000) == whole

    def of(words: str) -> dict[str, Any]:
        given: dict[str, Any] = {"chat": {"messages": [{"role": "user", "content": words}]}}
        return (given | {"completions": {"prompt": words}, "responses": {"input": words}})[route]

    limit = "max_output_tokens" if route == "responses" else "max_tokens"
    fields = {**of("word " * 600), limit: 12, "truncate_prompt_tokens": -1}
    checked = parsed(route, **fields).prompts[0]
    assert len(checked.tokens) == 500 and checked.params.max_tokens == 12
    unlimited = {"n_predict": -1} if route == "completions" else {}
    for length, default, least, room in (
        *((512, 100, 0, 100), (512, 100, 150, 150), (512, 10_000, 0, 128), (512, None, 0, 128)),
        (8192, 32768, 0, 1024),
    ):
        limits = LIMITS._replace(prompt=PromptLimits(length, 49152, default))
        asked = of("word " * 9000) | {"truncate_prompt_tokens": -1, "min_tokens": least}
        checked = parsed(route, limits, **asked, **unlimited).prompts[0]
        assert (len(checked.tokens), checked.params.max_tokens) == (length - room, room)
    with pytest.raises(RequestError, match="truncate_prompt_tokens must be -1"):
        params(route, truncate_prompt_tokens=0)
    if route != "responses":
        with pytest.raises(RequestError, match="truncate_prompt_tokens excludes return_sources"):
            params(route, truncate_prompt_tokens=3, return_sources=2)


def test_a_message_is_continued(url: str) -> None:
    text = ENCODER.chat_text(BEGUN, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("The answer is")
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert prompt("chat", messages=BEGUN, continue_final_message=True) == ids
    assert prompt("chat", messages=BEGUN, continue_final_message=True, return_sources=1) == ids
    closed = prompt("chat", messages=BEGUN, add_generation_prompt=False)
    assert closed[: len(ids)] == ids and len(closed) > len(ids)
    assert prompt("chat", messages=BEGUN, add_generation_prompt=True) == prompt(
        "chat", messages=BEGUN
    )
    with pytest.raises(RequestError, match="one of them must be false or left out"):
        prompt("chat", continue_final_message=True, add_generation_prompt=True)
    for fields, tokens in (({"continue_final_message": True}, ids), ({}, None)):
        counted = httpx.post(f"{url}/tokenize", json={"messages": BEGUN, **fields}).json()
        assert (counted["tokens"] == ids) == (tokens is not None)
    refused = httpx.post(f"{url}/tokenize", json={"prompt": "a", "continue_final_message": True})
    assert refused.json()["error"]["param"] == "continue_final_message"


def test_a_message_without_content_is_refused_by_tokenize_as_by_chat(url: str) -> None:
    for message in ({"role": "user", "content": None}, {"role": "user"}):
        for path in ("/tokenize", "/v1/chat/completions"):
            body = {"model": "smollm2", "messages": [*MESSAGES, message]}
            answer = httpx.post(f"{url}{path}", json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "messages[1].content"


def test_hints_reach_the_chat_template() -> None:
    template = "{{ reasoning_effort }}/{{ verbosity }}/{{ messages[0].content }}"
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = template
    encoder = PromptEncoder(tokenizer)

    def text(route: Any, **fields: Any) -> str:
        body = {"model": "smollm2", **GIVEN[route], **fields}
        found = parse_request(route, body, encoder, LIMITS)
        return tokenizer.decode(found.prompts[0].tokens)

    both = {"reasoning_effort": "low", "verbosity": "high"}
    assert text("chat") == "//Hello there"
    tokenizer.chat_template = "{{ enable_thinking }}"
    for effort, thinks in (("none", "False"), ("low", "True")):
        assert text("chat", reasoning_effort=effort) == thinks
        assert text("responses", reasoning={"effort": effort}) == thinks
    own = {"chat_template_kwargs": {"enable_thinking": True}}
    assert text("chat", reasoning_effort="none", **own) == "True"
    tokenizer.chat_template = template
    assert text("chat", **both) == "low/high/Hello there"
    own = {"chat_template_kwargs": {"reasoning_effort": "max"}}
    assert text("chat", **both, **own) == "max/high/Hello there"
    shaped = {"reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "high"}}
    assert text("responses", **shaped) == "low/high/Hello there"
    described = parsed("responses", **shaped).described
    assert described["reasoning"] == {"effort": "low", "summary": "auto"}
    assert prompt("completions", **both) == prompt("completions")
    with pytest.raises(RequestError, match="reasoning_effort must be 'none', 'minimal'"):
        text("chat", reasoning_effort="enormous")


def answers(url: str, body: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The choices of a completion by their index, each whole or in its chunks."""
    text = httpx.post(f"{url}/v1/completions", json=body).text
    bodies = re.findall(r"^data: (\{.*)$", text, re.MULTILINE) if body["stream"] else [text]
    found: list[list[dict[str, Any]]] = [[] for _ in range(body["n"])]
    for choice in (choice for each in bodies for choice in json.loads(each)["choices"]):
        found[choice["index"]].append(choice)
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_special_tokens_are_shown_if_asked_for(url: str, stream: bool) -> None:
    """The fake engine answers with the prompt backwards."""
    body = {"model": "smollm2", "prompt": [500, 1, 600], "stream": stream, "n": 2, "max_tokens": 3}
    texts = {}
    for skip in (True, False):
        found = answers(url, body | {"skip_special_tokens": skip})
        one, other = ("".join(chunk["text"] for chunk in chunks) for chunks in found)
        assert one == other
        texts[skip] = one
    first, last = TOKENIZER.decode([600]), TOKENIZER.decode([500])
    assert texts == {True: first + last, False: f"{first}<|im_start|>{last}"}


@pytest.mark.parametrize("route", ROUTES)
def test_limits_of_those_who_name_none(route: str) -> None:
    room = 512 - len(prompt(route))
    limits = LIMITS._replace(prompt=PromptLimits(512, 49152, 20))
    fits = LIMITS._replace(prompt=PromptLimits(512, 49152, 20, fit_max_tokens=True))
    limit = "max_output_tokens" if route == "responses" else "max_tokens"
    if route == "completions":  # OpenAI's own default
        assert params(route).max_tokens == params(route, limits).max_tokens == 16
    else:
        assert params(route).max_tokens == room
        assert params(route, limits).max_tokens == 20
        assert params(route, limits, min_tokens=30).max_tokens == 30
        many = LIMITS._replace(prompt=PromptLimits(512, 49152, 10_000))
        assert params(route, many).max_tokens == room
        assert params(route, fits).fit_max_tokens
    named = params(route, fits, **{limit: 40})
    assert named.max_tokens == 40 and not named.fit_max_tokens


@pytest.mark.parametrize("route", ROUTES)
def test_repetition_detection_of_requests_and_of_the_server(route: str) -> None:
    limits = LIMITS._replace(defaults={"repetition_detection": LOOPS})
    own = {"max_pattern_size": 8, "min_count": 3}
    assert params(route).repetition_detection is None
    assert params(route, limits).repetition_detection == LOOPS
    assert params(route, limits, ignore_eos=True).repetition_detection is None
    for fields in ({}, {"ignore_eos": True}):
        found = params(route, limits, repetition_detection=own, **fields)
        assert found.repetition_detection == RepetitionDetectionParams(8, 0, 3, 0)
    off = params(route, limits, repetition_detection={"max_pattern_size": 0})
    assert off.repetition_detection.max_pattern_size == 0
    with pytest.raises(RequestError, match=r"^repetition_detection.min_count must be") as error:
        params(route, repetition_detection={"max_pattern_size": 8, "min_count": 1})
    assert error.value.param == "repetition_detection"


# An answer that says one token again and again.
ENDLESS = [fake_engine.ENDLESS, 900]
SHORT = {"max_pattern_size": 4, "min_count": 3, "min_length": 9}
LOOP = {"model": "smollm2", "prompt": ENDLESS, "max_tokens": 60, "repetition_detection": SHORT}


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_ends_every_answer(url: str, stream: bool) -> None:
    found = answers(url, LOOP | {"stream": stream, "n": 2})
    assert len(found) == 2
    for chunks in found:
        *before, last = (chunk["finish_reason"] for chunk in chunks)
        assert last == "repetition" and bool(before) is stream and not any(before)
        assert "".join(chunk["text"] for chunk in chunks) == TOKENIZER.decode([900]) * 9


def test_a_stop_string_comes_first(url: str) -> None:
    text = TOKENIZER.decode([900])
    for times, reason in ((5, "stop"), (9, "stop"), (10, "repetition")):
        fields = {"stop": [text * times]}
        [choice] = httpx.post(f"{url}/v1/completions", json=LOOP | fields).json()["choices"]
        assert choice["finish_reason"] == reason, times


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_that_only_the_server_looks_for_is_an_end_that_clients_know(
    asked: bool, stream: bool
) -> None:
    found = parsed("chat", **({"repetition_detection": SHORT} if asked else {}))
    pieces = [TextPiece(5, "no"), TextPiece(5, "no", finish_reason="repetition")]
    form = FORMATS["chat"](found, "m", [Choice(found.prompts[0].tokens, 0, pieces)], TOKENIZER)
    whole = form.piece(0, pieces[1])[-1] if stream else form.whole()
    choice = whole["choices"][0]
    assert choice["finish_reason"] == ("repetition" if asked else "length")
    assert choice.get("stop_reason") == (None if asked else "repetition")
    if not asked:
        (ChatCompletionChunk if stream else ChatCompletion).model_validate(whole)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({}, "max_output_tokens"), ({"repetition_detection": {"max_pattern_size": 4}}, "repetition")],
)
def test_responses_that_loop_are_incomplete(fields: dict[str, Any], reason: str) -> None:
    found = parsed("responses", **fields)
    pieces = [TextPiece(5, "no"), TextPiece(5, "no", finish_reason="repetition")]
    choice = Choice(found.prompts[0].tokens, 0, pieces)
    whole = FORMATS["responses"](found, "m", [choice], TOKENIZER).whole()
    assert (whole["status"], whole["incomplete_details"]) == (
        "incomplete",
        {"reason": reason},
    )


@pytest.fixture(scope="module")
def warning() -> Iterator[ServerProcess]:
    with fake_server("--unknown-fields", "warn") as server:
        server.url()
        yield server


def test_unknown_fields_may_be_ignored(warning: ServerProcess) -> None:
    url = warning.url()
    odd = {"keep_alive": 5, "think": False, "store": True, "best_of": 3, "audio": None}
    nested = [{"role": "assistant", "content": "a", "mood": "hm"}, *MESSAGES]
    nested.append({"role": "user", "content": [{"type": "text", "text": "a", "tone": 1}]})
    for _ in range(2):
        for route in ROUTES:
            body = {"model": "smollm2", **GIVEN[route], **odd}
            answer = httpx.post(f"{url}{PATHS[route]}", json=body)
            assert answer.status_code == 200, answer.text
        body = {"model": "smollm2", "messages": nested, "stream_options": None, "keep_alive": 1}
        assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 200
    assert httpx.post(f"{url}/tokenize", json={"prompt": "a", "odd": 1}).status_code == 200
    long = {"model": "smollm2", "prompt": "a", "filler": "x" * 300_000}  # another process reads it
    assert httpx.post(f"{url}/v1/completions", json=long, timeout=60).status_code == 200
    names = ["keep_alive", "think", "store", "best_of", "odd"]
    for name in (*names, "messages[].mood", "messages[].content[].tone"):
        assert warning.log.count(f"unsupported field {name!r}, which is ignored") == 1
    assert "unsupported field 'filler'" in warning.log
    assert "'audio'" not in warning.log
    wrong = httpx.post(f"{url}/v1/completions", json={"model": "smollm2", "prompt": 7, "odd": 1})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "prompt"


def test_tools_that_are_ignored_contradict_nothing() -> None:
    """A model that knows no tools, asked by a client that always sends some."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    fields: Any = {"tools": [tool], "response_format": {"type": "json_object"}}
    found = parsed("chat", LIMITS._replace(unknown_fields="warn"), **fields)
    assert found.ignored == ["tools"] and found.tools is None
    assert found.prompts[0].params.structured_outputs is not None


@pytest.mark.parametrize("field", ["tools", "stop_token_ids", "messages", "logit_bias", "metadata"])
def test_a_body_may_not_hold_more_wrong_values_than_can_be_told(field: str) -> None:
    many = dict.fromkeys(map(str, range(2**18)), "")
    given = {"messages": [MESSAGES[0] | many], "logit_bias": many, "metadata": many}
    with pytest.raises(RequestError, match="more than 262144 values") as refused:
        parsed("chat", **{field: given.get(field, [""] * 2**18)})
    assert refused.value.code == "body_too_large"


def test_of_tokens_only_the_first_that_is_none_is_told() -> None:
    with pytest.raises(ValidationError) as refused:
        DetokenizeBody(tokens=[5, "a", "b"])
    assert [error["loc"] for error in refused.value.errors()] == [("tokens", 1)]
    limits = LIMITS._replace(prompt=PromptLimits(10**6, 49152))
    assert parse_request("detokenize", {"tokens": [5] * 300_000}, ENCODER, limits).answer
