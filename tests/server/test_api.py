"""The API as clients see it: the official client, streams, counts, log-probabilities."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

import razor_dist
from razor_dist.api.formats import ChatFormat, CompletionFormat
from razor_dist.api.parsing import parse_value
from razor_dist.api.request import Limits, ParsedRequest
from razor_dist.api.responses import ResponsesBody
from razor_dist.api.validate import validated
from razor_dist.config.errors import RequestError
from razor_dist.config.schema import ServerConfig
from razor_dist.frontend.answers import Choice
from razor_dist.frontend.assembler import TextPiece
from razor_dist.frontend.client import EngineClient
from razor_dist.frontend.outputs import AnswerSentence, Source
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.protocol.messages import EngineInfo, Ready, encode
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.server.app import build_app
from razor_dist.server.parsing_process import ParsingProcess
from razor_dist.server.service import RequestReader, Service
from tests import fake_engine
from tests.server.process import fake_server, wait_until
from tests.tokenizer import smollm2_tokenizer

HELLO = [{"role": "user", "content": "Say héllo 😀 to 世界"}]
TOKENIZER = smollm2_tokenizer()


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def answer_to(prompt: list[int]) -> tuple[str, int]:
    """The fake engine's answer: the prompt's tokens backwards, up to the first EOS."""
    tokens = [*reversed(prompt), fake_engine.EOS]
    count = tokens.index(fake_engine.EOS) + 1
    return TOKENIZER.decode(tokens[:count], skip_special_tokens=True), count


def events(url: str, path: str, body: dict[str, Any]) -> list[str]:
    """The lines of a stream."""
    body = {"model": "smollm2", "stream": True, **body}
    with httpx.stream("POST", f"{url}{path}", json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return [line for line in response.iter_lines() if line]


def test_a_chat_is_answered_with_exact_counts(client: openai.OpenAI) -> None:
    prompt = PromptEncoder(TOKENIZER).chat(HELLO)
    text, count = answer_to(prompt)
    answer = client.chat.completions.create(model="smollm2", messages=HELLO)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == count
    assert answer.usage.total_tokens == len(prompt) + count


def test_an_answer_of_the_official_client_goes_into_the_next_prompt(client: openai.OpenAI) -> None:
    messages: list[Any] = list(HELLO)
    message = client.chat.completions.create(model="smollm2", messages=messages).choices[0].message
    # What other servers put beside it: the client keeps fields that it does not know.
    message = type(message)(**message.to_dict(), reasoning_content=None)
    dumped = message.model_dump() | {"annotations": []}
    assert dumped["refusal"] is None and "reasoning_content" in dumped
    messages += [dumped, {"role": "user", "content": "Again"}]
    plain = [
        HELLO[0],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": "Again"},
    ]
    text, _ = answer_to(PromptEncoder(TOKENIZER).chat(plain))
    for history in (messages, [HELLO[0], message, messages[-1]]):
        answer = client.chat.completions.create(model="smollm2", messages=history)
        assert answer.choices[0].message.content == text


def test_the_official_client_streams_a_chat(client: openai.OpenAI) -> None:
    text, count = answer_to(PromptEncoder(TOKENIZER).chat(HELLO))
    chunks = list(
        client.chat.completions.create(
            model="smollm2", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    *contents, last = chunks
    assert contents[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in contents) == text
    assert [c.choices[0].finish_reason for c in contents[-2:]] == [None, "stop"]
    assert all(chunk.usage is None for chunk in contents)
    assert last.choices == [] and last.usage is not None
    assert last.usage.completion_tokens == count
    assert len({chunk.id for chunk in chunks}) == 1
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    told = client.chat.completions.create(
        model="smollm2", messages=HELLO, stream=True, stream_options=options
    )
    *counts, end = [chunk.usage.completion_tokens for chunk in told if chunk.usage]
    assert counts[0] == 0 and sorted(counts) == counts and counts[-1] == end == count
    assert len(counts) == len(contents)


def test_the_template_is_tokenised_once() -> None:
    prompt = PromptEncoder(TOKENIZER).chat([{"role": "user", "content": "Hello"}])
    text = TOKENIZER.decode(prompt)
    assert text.count("<|im_start|>user") == 1
    assert not text.startswith("<|im_start|><|im_start|>")


def test_what_a_response_repeats_is_bounded() -> None:
    long = "word " * 14_000
    body = {"model": "smollm2", "input": "Hi", "instructions": long, "tool_choice": "none"}
    body["tools"] = [{"type": "function", "name": "find", "description": long}]
    with fake_server("--max-model-len", "20000") as server:
        answer = httpx.post(f"{server.url()}/v1/responses", json=body, timeout=60)
    whole = answer.json()
    assert answer.status_code == 200 and len(answer.content) < 100_000
    assert whole["instructions"] == long[: 2**16 - 1] + "\N{HORIZONTAL ELLIPSIS}"
    [named] = whole["tools"]
    assert (named["name"], named["description"], named["parameters"]) == ("find", None, None)


def test_what_a_response_repeats_is_bounded_whatever_was_asked() -> None:
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
    long = "word " * 100_000
    schema = {"type": "json_schema", "name": long, "description": long, "schema": {"a": long}}
    told = described(tools=tools(100_000), instructions=long, text={"format": schema})
    assert told["tools"] == [] and len(told["instructions"]) == 2**16
    form = told["text"]["format"]
    assert form == {
        "type": "json_schema",
        "name": f"{long[:63]}\N{HORIZONTAL ELLIPSIS}",
        "schema": {},
    }


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_one_slash_more_is_an_unknown_path(url: str, method: str) -> None:
    answer = httpx.request(method, f"{url}/v1/chat/completions/")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith(f"{method} /v1/chat/completions/: ")


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


def test_texts_and_tokens(url: str) -> None:
    def post(path: str, **body: Any) -> dict[str, Any]:
        response = httpx.post(f"{url}{path}", json=body)
        return {"status": response.status_code, **response.json()}

    for text in ("naïve 😀 world", "<|im_start|>", ""):
        told = post("/tokenize", prompt=text, model="smollm2", return_token_strs=True)
        assert told["tokens"] == TOKENIZER.encode(text)
        assert told["token_strs"] == TOKENIZER.convert_ids_to_tokens(told["tokens"])
        assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 512)
        assert post("/detokenize", tokens=told["tokens"])["prompt"] == text
    chat = post("/tokenize", messages=HELLO)
    assert chat["tokens"] == PromptEncoder(TOKENIZER).chat(HELLO) and chat["token_strs"] is None
    bare = post("/tokenize", messages=HELLO, add_generation_prompt=False)["tokens"]
    assert bare == chat["tokens"][: len(bare)] and len(bare) < chat["count"]
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/detokenize", {"tokens": [49152]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ):
        refusal = post(path, **body)
        assert refusal["status"] in (400, 404) and refusal["error"]["param"] == param


def test_small_routes(url: str) -> None:
    assert httpx.get(f"{url}/version").json() == {"version": razor_dist.__version__}
    head = httpx.head(f"{url}/health")
    assert (head.status_code, head.content) == (200, b"")
    assert httpx.get(f"{url}/ping").status_code == httpx.post(f"{url}/ping").status_code == 200
    named = httpx.get(f"{url}/nothing", headers={"X-Request-Id": "abc-1.2:3"})
    assert named.headers["x-request-id"] == "abc-1.2:3"
    for bad in ("", "a b", "x" * 129, "é".encode()):
        given = httpx.get(f"{url}/version", headers=[(b"X-Request-Id", bad)])  # type: ignore[list-item]
        assert re.fullmatch("[0-9a-f]{32}", given.headers["x-request-id"])


def test_a_character_in_several_tokens_is_never_split(url: str) -> None:
    emoji = TOKENIZER.encode("😀世é", add_special_tokens=False)
    lines = events(url, "/v1/completions", {"prompt": emoji[::-1], "max_tokens": len(emoji)})
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert texts == ["😀", "世", "é"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert lines[-1] == "data: [DONE]"


def test_a_character_cut_off_by_the_limit_is_told_as_it_is(client: openai.OpenAI) -> None:
    emoji = TOKENIZER.encode("😀", add_special_tokens=False)
    answer = client.completions.create(model="smollm2", prompt=emoji[::-1], max_tokens=1)
    assert answer.choices[0].text == "\ufffd"
    assert answer.choices[0].finish_reason == "length"


def test_a_stop_string_across_tokens_ends_the_answer(client: openai.OpenAI) -> None:
    words = TOKENIZER.encode(" one two three four", add_special_tokens=False)
    for stream in (False, True):
        got = client.completions.create(
            model="smollm2", prompt=words[::-1], stop=["two thr"], stream=stream, max_tokens=50
        )
        chunks = list(got) if stream else [got]
        assert "".join(chunk.choices[0].text for chunk in chunks) == " one "
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_several_prompts_make_several_choices(client: openai.OpenAI) -> None:
    prompts = ["first prompt", "second", "and the third"]
    encoded = [TOKENIZER.encode(prompt) for prompt in prompts]
    texts = [answer_to(ids)[0] for ids in encoded]
    whole = client.completions.create(model="smollm2", prompt=prompts)
    assert [choice.text for choice in whole.choices] == texts
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == sum(map(len, encoded))
    assert whole.usage.completion_tokens == sum(answer_to(ids)[1] for ids in encoded)
    streamed = ["", "", ""]
    for chunk in client.completions.create(model="smollm2", prompt=encoded, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


def test_n_answers_are_as_many_choices_and_one_prompt(client: openai.OpenAI) -> None:
    text, count = answer_to(PromptEncoder(TOKENIZER).chat(HELLO))
    asked: Any = {"model": "smollm2", "messages": HELLO, "n": 3, "presence_penalty": 0.5}
    whole = client.chat.completions.create(**asked, logit_bias={"5": -100}, frequency_penalty=1)
    assert [(c.index, c.message.content) for c in whole.choices] == [(i, text) for i in range(3)]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(PromptEncoder(TOKENIZER).chat(HELLO))
    assert whole.usage.completion_tokens == 3 * count
    roles, texts = set(), ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles |= {choice.index} if choice.delta.role else set()
    assert texts == [text] * 3 and roles == {0, 1, 2}
    prompts = [[5, 6], [7, 8]]
    several = client.completions.create(model="smollm2", prompt=prompts, n=2)
    assert [c.text for c in several.choices] == [answer_to(p)[0] for p in prompts for _ in "ab"]
    assert several.usage is not None and several.usage.prompt_tokens == 4


def test_chat_logprobs_have_the_bytes_of_partial_characters(client: openai.OpenAI) -> None:
    emoji = TOKENIZER.encode("😀", add_special_tokens=False)
    messages = [{"role": "user", "content": "😀"}]
    answer = client.chat.completions.create(
        model="smollm2", messages=messages, logprobs=True, top_logprobs=2, max_tokens=40
    )
    content = answer.choices[0].logprobs.content
    assert answer.usage.completion_tokens == len(content)
    assert all(entry.logprob == -0.5 and len(entry.top_logprobs) == 2 for entry in content)
    stream = client.completions.create(
        model="smollm2", prompt=emoji[::-1], max_tokens=len(emoji), logprobs=1, stream=True
    )
    assert sum(len(chunk.choices[0].logprobs.tokens) for chunk in stream) == len(emoji)


def test_the_bytes_of_every_token_join_to_the_text() -> None:
    from razor_dist.api.logprobs import token_bytes
    from razor_dist.frontend.assembler import decode_one

    text = "naïve 😀 世界 \n\t done"
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    spelt = [token_bytes(TOKENIZER, i, decode_one(TOKENIZER, i) or "") or [] for i in ids]
    assert b"".join(map(bytes, spelt)) == text.encode()


def test_legacy_logprobs_tell_offsets(client: openai.OpenAI) -> None:
    words = TOKENIZER.encode(" one two", add_special_tokens=False)
    answer = client.completions.create(model="smollm2", prompt=words[::-1], logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == [" one", " two", "<|im_end|>"]
    assert logprobs.text_offset == [0, 4, 8]
    assert logprobs.token_logprobs == [-0.5, -0.5, -0.5]
    assert [len(top) for top in logprobs.top_logprobs] == [2, 2, 2]


def test_a_prompt_is_echoed_with_its_logprobs(client: openai.OpenAI) -> None:
    prompt = TOKENIZER.encode(" one two", add_special_tokens=False)
    asked: Any = {"model": "smollm2", "prompt": " one two", "echo": True, "logprobs": 1, "n": 2}
    whole = client.completions.create(**asked)
    for choice in whole.choices:
        assert choice.text == " one two two one"
        found = choice.logprobs
        assert found is not None
        assert found.tokens == [" one", " two", " two", " one", "<|im_end|>"]
        assert found.token_logprobs == [None, -1.0, -0.5, -0.5, -0.5]
        assert found.text_offset == [0, 4, 8, 12, 16]
        assert found.top_logprobs is not None
        assert found.top_logprobs[:2] == [None, {" two": -1.0}]
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (2, 6)
    texts, offsets = ["", ""], [[], []]
    for chunk in client.completions.create(**asked, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        offsets[choice.index] += choice.logprobs.text_offset
    assert texts == [" one two two one"] * 2 and offsets == [[0, 4, 8, 12, 16]] * 2
    for stream in (False, True):
        got = client.completions.create(
            model="smollm2", prompt=[prompt, prompt[:1]], echo=True, max_tokens=0, stream=stream
        )
        chunks = list(got) if stream else [got]
        choices = sorted((c for chunk in chunks for c in chunk.choices), key=lambda c: c.index)
        assert [(c.text, c.finish_reason) for c in choices] == [
            (" one two", "length"),
            (" one", "length"),
        ]
        if not stream:
            assert got.usage.model_dump(include={"completion_tokens", "total_tokens"}) == {
                "completion_tokens": 0,
                "total_tokens": 3,
            }


def test_progress_of_a_long_prompt_is_told_on_request(url: str) -> None:
    prompt = [fake_engine.SLOW_PREFILL, *range(20, 27)]
    lines = events(url, "/v1/completions", {"prompt": prompt, "return_progress": True})
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    # As llama.cpp's server tells it, whose first one says that nothing is read yet.
    assert [p["processed"] for p in progress] == [0, 2, 4, 6, 8]
    assert all(p["total"] == 8 and p["cache"] == 0 for p in progress)
    assert progress[-1]["time_ms"] == 1200
    silent = events(url, "/v1/completions", {"prompt": prompt})
    assert not any("prompt_progress" in line for line in silent)


def test_the_official_client_survives_progress(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "smollm2", "messages": HELLO}
    more = {"return_progress": True}
    text, _ = answer_to(PromptEncoder(TOKENIZER).chat(HELLO))
    chunks = list(client.chat.completions.create(**asked, stream=True, extra_body=more))
    progress = [chunk.model_extra["prompt_progress"] for chunk in chunks if chunk.model_extra]
    total = len(PromptEncoder(TOKENIZER).chat(HELLO))
    assert [(p["processed"], p["total"]) for p in progress] == [(0, total), (total, total)]
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text
    with client.chat.completions.stream(**asked, extra_body=more) as stream:
        assert stream.get_final_completion().choices[0].message.content == text
    prompt = TOKENIZER.encode(" one two three")
    pieces = client.completions.create(model="smollm2", prompt=prompt, stream=True, extra_body=more)
    assert "".join(piece.choices[0].text for piece in pieces) == answer_to(prompt)[0]


def test_a_silent_stream_has_a_heartbeat(url: str) -> None:
    body = {"model": "smollm2", "prompt": [fake_engine.HANG], "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=10) as response:
        assert next(line for line in response.iter_lines()) == ": heartbeat"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_vanishes_in_mid_prefill_is_forgotten(url: str, stream: bool) -> None:
    def counts() -> tuple[int, int]:
        stats = httpx.get(f"{url}/stats").json()
        return stats["running"], stats["aborted"]

    assert wait_until(lambda: counts()[0] == 0, 20)
    _, aborted = counts()
    body = {"model": "smollm2", "prompt": [fake_engine.HANG], "stream": stream}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=body, timeout=0.5)
    assert wait_until(lambda: counts() == (0, aborted + 1), 20), counts()


def test_a_full_queue_refuses_with_429(url: str) -> None:
    body = {"model": "smollm2", "prompt": [[fake_engine.HANG]] * 4, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=10):

        def refused() -> httpx.Response:
            full = httpx.post(f"{url}/v1/completions", json={**body, "prompt": "Hello"})
            assert full.status_code == 429
            return full

        # The engine's estimate, for one of the four: it comes with the next heartbeat.
        assert wait_until(lambda: refused().headers["retry-after"] == "8", 20)
        full = refused()
        assert full.json()["error"]["code"] == "queue_full"
        assert "at most 4 may be" in full.json()["error"]["message"]
        assert httpx.get(f"{url}/health").status_code == 200
    free = {"model": "smollm2", "prompt": "Hello"}
    assert wait_until(lambda: httpx.post(f"{url}/v1/completions", json=free).status_code == 200, 20)


def test_prompts_for_which_the_queue_has_no_room_are_not_tokenised() -> None:
    class Untouched(PromptEncoder):
        def text(self, text: str, *, special_tokens: bool = True) -> list[int]:
            raise AssertionError("tokenised")

    limits = Limits("smollm2", 4, 100, 100, {}, room=1)
    body = {"model": "smollm2", "prompt": ["a", "b"]}
    with pytest.raises(RequestError, match="the queue has room for 1 prompts now") as refused:
        parse_value("completions", body, Untouched(None), limits)
    assert refused.value.code == "queue_full"


def test_a_request_that_is_late_ends_and_frees_the_engine(url: str) -> None:
    def counts() -> tuple[int, int]:
        stats = httpx.get(f"{url}/stats").json()
        return stats["running"], stats["aborted"]

    assert wait_until(lambda: counts()[0] == 0, 20)
    _, aborted = counts()
    body = {"model": "smollm2", "prompt": [fake_engine.HANG], "timeout": 0.2}
    for stream in (False, True):  # before a stream has begun, it is an HTTP error as well
        late = httpx.post(f"{url}/v1/completions", json=body | {"stream": stream}, timeout=30)
        assert (late.status_code, late.headers["x-should-retry"]) == (408, "false")
        assert late.json()["error"] == {
            "message": "the request was not answered within 0.2 s",
            "type": "timeout_error",
            "param": None,
            "code": "timeout",
        }
    eager = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2)
    with pytest.raises(openai.APIStatusError, match="not answered within") as error:
        eager.completions.create(**body | {"timeout": None}, extra_body={"timeout": 0.2})
    assert error.value.status_code == 408
    assert wait_until(lambda: counts() == (0, aborted + 3), 20), counts()  # asked once each
    endless = {"prompt": [fake_engine.ENDLESS, 20], "max_tokens": 400, "timeout": 0.7}
    *texts, failure, done = events(url, "/v1/completions", endless)
    assert len(texts) > 1 and all("choices" in text for text in texts)
    assert json.loads(failure.removeprefix("data: "))["error"]["code"] == "timeout"
    assert done == "data: [DONE]"
    assert wait_until(lambda: counts() == (0, aborted + 4), 20), counts()


def test_counters_that_take_too_long_get_503(tmp_path: Path) -> None:
    """Rank 0 is in the midst of a chunk: it lives, and answers nothing."""
    service = Service(ServerConfig(), EngineClient(tmp_path / "engine"))
    process = ParsingProcess(tmp_path, trust_remote_code=False)
    service.reader = RequestReader(PromptEncoder(None), process, {})

    async def main() -> httpx.Response:
        await service.client.rank0.listen()
        _, writer = await asyncio.open_unix_connection(service.client.rank0.path)
        writer.write(encode(Ready(EngineInfo(8, 9))))
        await service.client.ready()
        transport = httpx.ASGITransport(build_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            answer = await http.get("/stats")
            assert (await http.get("/health")).json()["status"] == "ready"
        writer.close()
        await service.client.close()
        return answer

    service.stats_patience = 0.1
    answer = asyncio.run(main())
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("engine_busy", "service_unavailable_error")
    assert "did not answer within" in error["message"]


def test_models_lists_the_served_one(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").id == "smollm2"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_health_and_stats(url: str) -> None:
    health = httpx.get(f"{url}/health")
    assert (health.status_code, health.json()) == (200, {"status": "ready", "reason": ""})
    stats = httpx.get(f"{url}/stats").json()
    assert stats["world_size"] == 2
    assert stats["bytes_sent"] == {"ring": 10}
    # What is used does not hide what is reserved.
    assert (stats["kv_reserved_bytes_per_rank"], stats["kv_bytes_per_rank"]) == (1000, [0, 0])


def test_names_and_settings_of_a_chat_reach_the_template() -> None:
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = (
        "{{ mode }}{% for m in messages %} {{ m.name or m.role }}: {{ m.content }}{% endfor %}"
    )
    body = {"model": "m", "messages": [HELLO[0] | {"name": "Ada"}, *HELLO]}
    body["chat_template_kwargs"] = {"mode": "brief"}
    text = f"brief Ada: {HELLO[0]['content']} user: {HELLO[0]['content']}"
    limits, encoder = Limits("m", 4, 4096, 49152, {}), PromptEncoder(tokenizer)
    found = parse_value("chat", body, encoder, limits).prompts[0].tokens
    assert tokenizer.decode(found) == text
    counted = parse_value("tokenize", body, encoder, limits).answer
    assert counted is not None and json.loads(counted)["tokens"] == found.tolist()


@pytest.mark.parametrize("kind", [ChatFormat, CompletionFormat])
def test_a_sentence_is_told_with_its_sources_once_it_has_ended(
    kind: type[ChatFormat] | type[CompletionFormat],
) -> None:
    source = Source(4, 9, 0.5, "green", message=None)
    told = [AnswerSentence(0, 4, [source], 0.5), AnswerSentence(5, 8, [], None)]
    pieces = [
        TextPiece(5, "One."),
        TextPiece(6, " Tw", offset=4, sentences=told[:1]),
        TextPiece(7, "o", None, "stop", offset=7, sentences=told[1:]),
    ]
    choice = Choice(np.array([1]), 0, pieces, sources=[source], grounded=0.5)
    form = kind(ParsedRequest([]), "m", [choice], smollm2_tokenizer())
    as_json = {"start": 4, "end": 9, "weight": 0.5, "text": "green"}
    first = {"start": 0, "end": 4, "sources": [as_json], "grounded": 0.5}
    second = {"start": 5, "end": 8, "sources": [], "grounded": None}
    [whole] = form.whole()["choices"]
    assert whole["sentences"] == [first, second] and whole["sources"] == [as_json]
    chunks = [chunk["choices"][0] for piece in pieces for chunk in form.piece(0, piece)]
    with_sentences = [chunk["sentences"] for chunk in chunks if "sentences" in chunk]
    assert with_sentences == [[first], [second]]
    assert [chunk for chunk in chunks if "sources" in chunk] == chunks[-1:]
    assert chunks[-1]["finish_reason"] == "stop" and chunks[-1]["grounded"] == 0.5
