"""The API as clients see it: the official client, streams, counts, log-probabilities."""

from __future__ import annotations

import copy
import json
import re
from typing import Any
from unittest import mock

import httpx
import numpy as np
import openai
import pytest

import razor_dist
from razor_dist.api.formats import ChatFormat, CompletionFormat
from razor_dist.api.logprobs import legacy_logprobs
from razor_dist.api.parsing import parse_request
from razor_dist.api.request import Limits, ParsedRequest
from razor_dist.frontend.answers import Choice
from razor_dist.frontend.assembler import TextPiece
from razor_dist.frontend.outputs import AnswerSentence, Logprob, Source
from razor_dist.frontend.prompts import PromptEncoder, PromptLimits
from tests import fake_engine
from tests.tokenizer import smollm2_tokenizer

HELLO = [{"role": "user", "content": "Say héllo 😀 to 世界"}]
TOKENIZER = smollm2_tokenizer()


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


def test_usage_so_far_says_nothing_of_drafts_that_come_later() -> None:
    """A step's tokens are known together, and sent one after the other."""
    pieces = [TextPiece(7, "a"), TextPiece(8, "b", accepted=True), TextPiece(9, "c", rejected=2)]
    choice = Choice(np.arange(5, dtype=np.int32), pieces=pieces)
    form = ChatFormat(mock.Mock(tools=None), "smollm2", [choice], None)
    assert form.usage(1)["completion_tokens"] == 1
    assert "completion_tokens_details" not in form.usage(1)
    assert form.usage()["completion_tokens_details"] == {
        "accepted_prediction_tokens": 1,
        "rejected_prediction_tokens": 2,
    }


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_one_slash_more_is_an_unknown_path(url: str, method: str) -> None:
    answer = httpx.request(method, f"{url}/v1/chat/completions/")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith(f"{method} /v1/chat/completions/: ")


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
    assert post("/tokenize", messages=HELLO, add_special_tokens=False) == chat
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


def test_legacy_logprobs_tell_parts_of_characters_apart() -> None:
    likelier, chosen = TOKENIZER.encode("😀", add_special_tokens=False)[:2]
    logprobs = {likelier: Logprob(-0.1, 1, "\ufffd"), chosen: Logprob(-3.0, None, "\ufffd")}
    found = legacy_logprobs(TOKENIZER, [TextPiece(chosen, "", logprobs)])
    assert found is not None
    [spelt], [top] = found["tokens"], found["top_logprobs"]
    assert list(top.values()) == [-0.1, -3.0] and list(top)[1] == spelt
    assert re.fullmatch(r"bytes:(\\x[0-9a-f]{2})+", spelt)
    alike = {1: Logprob(-0.1, 1, "a"), 2: Logprob(-3.0, None, "a")}
    found = legacy_logprobs(TOKENIZER, [TextPiece(2, "a", alike)])
    assert found is not None and found["top_logprobs"] == [{"a": -0.1}]


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


def test_models_lists_the_served_one(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").id == "smollm2"
    [card] = client.models.list()
    assert card.model_extra is not None
    # `vllm bench serve` without --model loads the tokenizer that it names.
    assert (card.model_extra["root"], card.model_extra["parent"]) == ("smollm2", None)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_health_and_stats(url: str) -> None:
    health = httpx.get(f"{url}/health")
    assert (health.status_code, health.json()) == (200, {"status": "ready", "reason": ""})
    stats = httpx.get(f"{url}/stats").json()
    assert stats["world_size"] == 2
    assert stats["bytes_sent"]["ring"] == 10
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
    limits, encoder = Limits("m", 4, PromptLimits(4096, 49152), {}), PromptEncoder(tokenizer)
    found = parse_request("chat", body, encoder, limits).prompts[0].tokens
    assert tokenizer.decode(found) == text
    counted = parse_request("tokenize", body, encoder, limits).answer
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
    choice.question_match = 0.25
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
    assert chunks[-1]["question_match"] == whole["question_match"] == 0.25


def test_sentences_are_in_characters_of_a_text_that_begins_with_its_prompt() -> None:
    told = [AnswerSentence(0, 4, [], None), AnswerSentence(5, 9, [], None)]
    pieces = [
        TextPiece(5, "One."),
        TextPiece(6, " Two.", None, "stop", offset=4, sentences=told),
    ]
    choice = Choice(np.array(TOKENIZER.encode("Hello world. ")), 0, pieces, sources=[])

    form, whole = (
        CompletionFormat(ParsedRequest([], echo=True), "m", [choice], TOKENIZER) for _ in range(2)
    )
    chunks = [chunk["choices"][0] for piece in pieces for chunk in form.piece(0, piece)]
    for choices in (whole.whole()["choices"], chunks):
        text = "".join(found["text"] for found in choices)
        spans = [(s["start"], s["end"]) for s in choices[-1]["sentences"]]
        assert text.startswith("Hello world. ")
        assert [text[start:end] for start, end in spans] == ["One.", "Two."]
