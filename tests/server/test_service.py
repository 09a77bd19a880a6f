"""A request's bounds in the server's memory and in its loop's time; requests as it shuts down."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from razor_dist.api.answer_json import ESCAPED, PLAIN, dumped
from razor_dist.api.errors import Failure
from razor_dist.api.formats import ChatFormat, CompletionFormat
from razor_dist.api.parsing import parse_request
from razor_dist.api.request import Limits, ParsedRequest
from razor_dist.api.tokenize import DetokenizeBody
from razor_dist.config.errors import RazorError, RequestError
from razor_dist.config.schema import ServerConfig
from razor_dist.documents.read import Document
from razor_dist.frontend.answers import Choice, ChoiceEvent
from razor_dist.frontend.assembler import TextPiece
from razor_dist.frontend.outputs import Logprob
from razor_dist.frontend.prompts import PromptEncoder, PromptLimits
from razor_dist.server import reading
from razor_dist.server.app import build_app
from razor_dist.server.bodies import Body, BodyReader
from razor_dist.server.service import Service
from razor_dist.server.sse import stream
from tests.server.fake_client import FakeClient
from tests.tokenizer import sentencepiece_tokenizer, smollm2_tokenizer

ENCODER = PromptEncoder(smollm2_tokenizer())


def service(process: Any = None, **settings: Any) -> Service:
    made = Service(ServerConfig(**settings), FakeClient())
    made.load(ENCODER, process, {})
    return made


def asking(files: int) -> bytes:
    data = base64.b64encode(b"%PDF-1.4").decode()
    source = {"type": "base64", "media_type": "application/pdf", "data": data}
    content = [{"type": "document", "source": source}] * files
    fields = {"model": "smollm2", "messages": [{"role": "user", "content": content}]}
    return json.dumps(fields).encode()


async def respond(made: Service, endpoint: Any, raw: bytes, reader: BodyReader) -> Any:
    """The response, or the failure."""
    body = Body(reader)
    body.grow(raw)
    try:
        return await made.respond(endpoint, body, asyncio.get_running_loop().time())
    except RazorError as error:
        return Failure.of(error)


@pytest.mark.parametrize("dies_in", ["compile", "submit"])
def test_a_request_that_the_engine_never_had_may_come_again(
    dies_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, reader = service(), BodyReader(ServerConfig())

    async def compiled(prompts: Any, *_: Any) -> Any:
        made.client.lost("killed")
        if dies_in == "compile":
            made.client.require_ready()
        return prompts

    monkeypatch.setattr(made.client, "compiled", compiled)
    asked = {"model": "smollm2", "prompt": "a", "structured_outputs": {"regex": "a"}}
    failed = asyncio.run(respond(made, "completions", json.dumps(asked).encode(), reader))
    assert (failed.status, failed.code) == (503, "engine_restarting")


def test_the_texts_of_files_count_as_their_body_does(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["word " * 60_000, "\N{CASTLE} " * 60_000]
    seen: list[tuple[int, Sequence[Document]]] = []

    class Process:
        async def parse_request(self, *given: Any) -> ParsedRequest:
            seen.append((reader.used, given[-2]))
            return ParsedRequest([], answer=b"{}")

    made, reader = service(Process()), BodyReader(ServerConfig())
    left = list(texts)

    async def read(*_: Any) -> Document:
        return Document(left.pop(0))

    monkeypatch.setattr(made.documents, "read", read)
    asyncio.run(respond(made, "count_tokens", asking(2), reader))
    assert reader.used == 0
    # By another process, although the body is short.
    [(used, files)] = seen
    assert [file.text for file in files] == texts
    assert used == len(asking(2)) + sum(map(sys.getsizeof, texts))


def test_the_texts_of_files_have_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    made, reader = service(max_body_mb=0.5), BodyReader(ServerConfig())

    async def read(*_: Any) -> Document:
        return Document("word " * 60_000)

    monkeypatch.setattr(made.documents, "read", read)
    failure = asyncio.run(respond(made, "count_tokens", asking(3), reader))
    assert (failure.status, failure.code) == (413, "body_too_large")
    assert failure.param == "messages[0].content[1].source.data"
    assert "more than 0.5 MiB of characters" in failure.message
    assert reader.used == made.client.unfinished == 0


def test_the_messages_of_a_context_count_as_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kept:
        length = 200_000

        def content(self) -> Any:
            return {"messages": [{"role": "user", "content": "\N{CASTLE}" * self.length}]}

    made = service(max_body_mb=0.1, max_total_body_mb=0.1)

    async def find(*_: Any) -> Any:
        return SimpleNamespace(kept=Kept())

    monkeypatch.setattr(made.contexts, "find", find)

    transport = httpx.ASGITransport(build_app(made))

    async def get() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.get("/v1/contexts/ctx_1/messages")

    refused = asyncio.run(get())
    assert refused.status_code == 413
    assert refused.json()["error"]["code"] == "answer_too_large"
    Kept.length = 10
    found = asyncio.run(get()).json()
    assert (found["id"], found["messages"][0]["content"]) == ("ctx_1", "\N{CASTLE}" * 10)


def test_the_log_probabilities_of_prompts_have_a_bound() -> None:
    limits = Limits("smollm2", 4, PromptLimits(512, 49152), {}, most_logprobs=240)
    asked = {"model": "smollm2", "prompt": [[5] * 10, [6] * 10], "echo": True, "n": 2}
    parse_request("completions", {**asked, "logprobs": 5}, ENCODER, limits)
    parse_request("completions", {**asked, "echo": False, "logprobs": 20}, ENCODER, limits)
    with pytest.raises(RequestError, match=r"280 log-probabilities .* may ask for 240") as error:
        parse_request("completions", {**asked, "logprobs": 6}, ENCODER, limits)
    assert (error.value.code, error.value.param) == ("answer_too_large", "logprobs")
    # A million tokens and the likeliest of each are served with the settings' defaults.
    made = service()
    assert made.reader is not None and made.client.info is not None
    assert made.reader.limits(made.client.info).most_logprobs == 2 * 2**20


def echoed(answers: int) -> tuple[CompletionFormat, Choice]:
    """Answers to a prompt of three tokens, with log-probabilities; and the first of them."""
    entries: list[Any] = [None, (-1.0, 1, [(6, -1.0)]), (-2.0, 2, [(9, -0.5)])]
    found = [
        Choice(
            np.array([5, 6, 7]),
            answer,
            [TextPiece(8, "a", {8: Logprob(-3.0, 1, "a")}, "stop")],
            prompt_entries=entries,
        )
        for answer in range(answers)
    ]
    request = ParsedRequest([], echo=True)
    return CompletionFormat(request, "m", found, smollm2_tokenizer()), found[0]


def test_an_echoed_prompt_begins_as_it_was_sent() -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = PromptEncoder(tokenizer).text("the time a")
    entries: list[Any] = [None, *((-1.0, 1, [(token, -1.0)]) for token in ids[1:])]
    chosen = {ids[-1]: Logprob(-3.0, 1, " a")}
    answer = TextPiece(ids[-1], " a", chosen, "stop")
    choice = Choice(np.array(ids), 0, [answer], prompt_entries=entries)
    [found] = CompletionFormat(ParsedRequest([], echo=True), "m", [choice], tokenizer).whole()[
        "choices"
    ]
    assert found["text"] == "the time a a"
    assert found["logprobs"]["text_offset"][-4:] == [0, 3, 8, 10]
    limits = Limits("m", 1, PromptLimits(100, len(tokenizer)), {})
    body = DetokenizeBody(tokens=PromptEncoder(tokenizer).text("the time", special_tokens=False))
    assert body.answer(PromptEncoder(tokenizer), limits) == {"prompt": "the time"}


@pytest.mark.parametrize("whole", [True, False])
def test_the_engines_log_probabilities_go_when_the_last_answer_has_them(whole: bool) -> None:
    form, choice = echoed(2)
    [piece], entries = choice.pieces, choice.prompt_entries
    if whole:
        choices = form.whole()["choices"]
    else:
        [first] = form.piece(1, piece)
        assert entries[1] is not None
        choices = [form.piece(0, piece)[0]["choices"][0], *first["choices"]]
    assert [c["logprobs"]["token_logprobs"] for c in choices] == [[None, -1.0, -2.0, -3.0]] * 2
    assert entries == [None] * 3


def test_an_echoed_prompt_is_shaped_and_framed_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    framed_by: list[threading.Thread] = []
    frame = CompletionFormat.frame

    def noted(form: CompletionFormat, chunk: Any) -> str:
        framed_by.append(threading.current_thread())
        return frame(form, chunk)

    monkeypatch.setattr(CompletionFormat, "frame", noted)
    form, choice = echoed(1)

    async def events() -> AsyncIterator[ChoiceEvent]:
        yield ChoiceEvent(0, choice.pieces[0])

    async def read() -> list[str]:
        return [line async for line in stream(events(), form, include_usage=False)]

    line, done = asyncio.run(read())
    told = json.loads(line.removeprefix("data: "))["choices"][0]
    assert len(told["logprobs"]["tokens"]) == 4 and done == "data: [DONE]\n\n"
    assert framed_by and threading.main_thread() not in framed_by


@pytest.mark.parametrize("encode", [PLAIN, ESCAPED])
@pytest.mark.parametrize("kind", [ChatFormat, CompletionFormat])
def test_answers_are_written_a_token_at_a_time(kind: Any, encode: Any) -> None:
    """One call for all would hold the interpreter's lock, and so the loop, for seconds."""
    top = {token: Logprob(-0.5, 1, f"\N{CASTLE}{token}\u2028") for token in range(5, 25)}
    pieces = [TextPiece(5, "", top) for _ in range(200)]
    whole = kind(ParsedRequest([]), "m", [Choice(np.array([5]), 0, pieces)], None).whole()
    longest = 0

    def noted(value: Any) -> str:
        nonlocal longest
        text: str = encode(value)
        longest = max(longest, len(text))
        return text

    found = dumped(whole, noted)
    assert found == encode(whole).encode()
    assert 100 * longest < len(found)


@pytest.mark.anyio
async def test_what_is_being_read_when_the_server_ends_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, reader = service(), BodyReader(ServerConfig())
    client = made.client
    assert isinstance(client, FakeClient)

    def parse(*given: Any) -> ParsedRequest:
        made.draining = True  # SIGTERM comes meanwhile
        return parse_request(*given)

    async def read(*_: Any) -> Document:
        made.draining = True
        return Document("word")

    monkeypatch.setattr(made.documents, "read", read)
    chat = {"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}]}

    counted = await respond(made, "count_tokens", asking(1), reader)
    assert counted.status_code == 200
    refused = await respond(made, "count_tokens", asking(1), reader)
    assert (refused.status, refused.code) == (503, "engine_draining")
    made.draining = False
    monkeypatch.setattr(reading, "parse_request", parse)
    asked = asyncio.create_task(respond(made, "chat", json.dumps(chat).encode(), reader))
    while not client.adds and not asked.done():
        await asyncio.sleep(0.001)
    assert client.adds and made.draining
    asked.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asked
