"""The process that reads long bodies: it reads as the frontend does, and is replaced if it dies."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from razor_dist.api.errors import Failure
from razor_dist.api.parsing import parse_request
from razor_dist.api.request import Endpoint, Limits, ParsedRequest
from razor_dist.config.errors import EngineError, ProcessKilledError, RequestError
from razor_dist.frontend.child_process import CLOSED
from razor_dist.frontend.prompts import PromptLimits
from razor_dist.models.registry import resolve_model
from razor_dist.protocol.messages import HEADER_SIZE, Failed, decoder, encode
from razor_dist.server import parsing_process as parsing
from razor_dist.server.parsing_process import ParsingProcess
from tests import fake_engine
from tests.server.long_bodies import ENCODER, MILLION, body, ids, words
from tests.server.message_bodies import asking, document, pdf_source, text_source
from tests.server.tool_calls import HERMES
from tests.server.tool_calls import encoder as with_template

pytestmark = pytest.mark.anyio
SIZES = PromptLimits(2 * MILLION, fake_engine.VOCAB_SIZE)
LIMITS = Limits("smollm2", 4, SIZES, {}, pins=True)


SAID = [{"role": "user", "content": 'Document "a.pdf":\n\nThe castle.\n\nWhy?'}]
GOOD: list[tuple[Endpoint, dict[str, Any]]] = [
    ("completions", {"prompt": "Hello, world", "stop": ["x", "y"], "temperature": 0.5, "seed": 3}),
    ("completions", {"prompt": [[5, 6], [7]], "logprobs": 2, "ignore_eos": True}),
    (
        "chat",
        {
            "messages": [{"role": "user", "content": "Say héllo 😀 to 世界"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_progress": True,
        },
    ),
    (
        "chat",
        {
            "messages": SAID,
            "n": 3,
            "seed": -1,
            "timeout": 5,
            "temperature": 1,
            "logit_bias": {"5": 1},
            "structured_outputs": {"choice": ["a", "b"]},
            "repetition_detection": {"max_pattern_size": 9, "min_length": 30},
            "return_annotations": True,
        },
    ),
    ("responses", {"input": SAID, "metadata": {"a": "b"}, "return_annotations": True}),
    ("completions", {"prompt": "Hello", "echo": True, "max_tokens": 0, "cache_salt": "mine"}),
    ("messages", asking(document(pdf_source(b"%PDF-")))),
    ("messages", asking(document(text_source("Red.")) | {"cache_control": {"type": "ephemeral"}})),
    ("tokenize", {"prompt": "Hello"}),
]
CALLS: tuple[Endpoint, dict[str, Any]] = (
    "chat",
    {"messages": SAID, "tools": [{"type": "function", "function": {"name": "f"}}]},
)
BAD: list[tuple[Endpoint, bytes]] = [
    ("completions", b"{"),
    ("completions", body(prompt=[1, 10**30])),
    ("completions", body(prompt=["a"] * 5)),
    ("chat", body(messages=[], temprature=1)),
    ("chat", body(messages=[{"role": "user", "content": "Hi"}], max_tokens=3 * MILLION)),
    ("chat", body(messages=[{"role": "user", "content": "Hi"}], model="gpt-4o")),
]


def written(fields: dict[str, Any]) -> bytes:
    return json.dumps({"model": "smollm2", **fields}).encode()


def told(parsed: ParsedRequest) -> Any:
    """A request as plain values, to compare."""
    prompts = [(p.tokens.tolist(), p.params, encode(p.text)) for p in parsed.prompts]
    others = {name: value or None for name, value in vars(parsed).items()}
    return others | {"prompts": prompts, "described": json.dumps(parsed.described)}


def refusal(error: RequestError) -> tuple[str, str | None, str | None]:
    return str(error), error.param, error.code


@contextlib.asynccontextmanager
async def reading() -> AsyncIterator[ParsingProcess]:
    process = ParsingProcess(resolve_model("smollm2"), trust_remote_code=False)
    try:
        yield process
    finally:
        await process.aclose()


def ask(process: ParsingProcess, prompt: Any) -> asyncio.Task[ParsedRequest]:
    return asyncio.create_task(process.parse_request("completions", body(prompt=prompt), LIMITS))


def tokens(parsed: ParsedRequest) -> list[int]:
    return parsed.prompts[0].tokens.tolist()


@pytest.mark.parametrize(("endpoint", "fields"), [*GOOD, CALLS])
def test_all_of_a_request_comes_back(endpoint: Endpoint, fields: dict[str, Any]) -> None:
    raw, encoder = written(fields), with_template(HERMES)
    asked = parsing.Question(endpoint, LIMITS, [], None, len(raw))
    asked = decoder(parsing.Question)(encode(asked)[HEADER_SIZE:])
    answered = decoder(parsing.Parsed)(parsing.answer(asked, raw, encoder)[HEADER_SIZE:])
    assert told(answered.whole) == told(parse_request(endpoint, raw, encoder, LIMITS))


def test_what_the_other_process_could_nest_and_this_one_cannot_is_refused() -> None:
    levels = 2000
    answered = parsing.Parsed(ParsedRequest([]), "[" * levels + "]" * levels)
    with pytest.raises(RequestError, match="nested too deeply"):
        _ = answered.whole


@pytest.mark.long
async def test_another_process_reads_bodies_as_this_one_does() -> None:
    async with reading() as process:
        for endpoint, fields in GOOD:
            raw = written(fields)
            parsed = await process.parse_request(endpoint, raw, LIMITS)
            assert told(parsed) == told(parse_request(endpoint, raw, ENCODER, LIMITS))
            assert all(prompt.tokens.dtype == np.int32 for prompt in parsed.prompts)
        for endpoint, raw in BAD:
            with pytest.raises(RequestError) as here:
                parse_request(endpoint, raw, ENCODER, LIMITS)
            with pytest.raises(RequestError) as there:
                await process.parse_request(endpoint, raw, LIMITS)
            assert refusal(there.value) == refusal(here.value)


@pytest.mark.long
async def test_clients_that_hang_up_leave_the_others_their_answers() -> None:
    """One while its body is read, and one that waits; the process lives."""

    async with reading() as process:
        await ask(process, [1])
        child = process.pid
        assert Path(f"/proc/{child}/oom_score_adj").read_text() == "1000\n"
        prompts: list[Any] = [words(20_000), [8, 9], [7], [6, 5]]
        tasks = [ask(process, prompt) for prompt in prompts]
        while not process.is_busy:
            await asyncio.sleep(0)
        ended: list[int] = []
        for index, task in enumerate(tasks):
            task.add_done_callback(lambda _, index=index: ended.append(index))
        for gone in (0, 2):
            tasks[gone].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        for index, answer in enumerate(answers):
            if index in (0, 2):
                assert isinstance(answer, asyncio.CancelledError)
            else:
                assert isinstance(answer, ParsedRequest) and tokens(answer) == prompts[index]
        assert sorted(ended[:2]) == [0, 2] and ended[2:] == [1, 3]
        assert child is not None and process.pid == child


@pytest.mark.long
async def test_a_process_that_is_killed_or_stuck_is_replaced() -> None:
    async with reading() as process:
        await ask(process, [1])
        killed = ask(process, ids(3))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ProcessKilledError, match="has died; send the request again"):
            await killed
        assert tokens(await ask(process, [8, 9])) == [8, 9]
        # One that is stuck is given up, and does not hold up those that wait for it.
        stuck = psutil.Process(process.pid)
        stuck.suspend()
        process.patience = 1.0
        given_up, waiting = ask(process, [5]), ask(process, [4])
        await asyncio.sleep(0.1)
        process.patience = 120.0  # the first has begun; the second waits for a new process
        with pytest.raises(EngineError, match="was not read within 1 s and is given up"):
            await given_up
        while stuck.is_running() and stuck.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.01)
        assert tokens(await waiting) == [4]


async def test_what_waits_when_the_server_ends_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """It starts no other process, and nothing is heard of a client that has gone."""

    async with reading() as process:
        await ask(process, [1])
        tasks = [ask(process, prompt) for prompt in (words(20_000), [5], [4])]
        while not process.is_busy:
            await asyncio.sleep(0)
        tasks[0].cancel()
        await process.aclose()
        gone, *refused = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(gone, asyncio.CancelledError)
        assert [str(error) for error in refused] == [CLOSED] * 2
        assert all(Failure.of(e).status == 503 for e in refused if isinstance(e, Exception))
        assert process.pid is None
        gc.collect()
        assert not caplog.records


def test_a_request_that_no_message_holds_leaves_the_process_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parsing, "parse_request", lambda *_: ParsedRequest([], timeout=2**64))
    frame = parsing.answer(parsing.Question("chat", LIMITS, [], None, 2), b"{}", ENCODER)
    failed = decoder(Failed)(frame[HEADER_SIZE:])
    assert (failed.code, failed.message) == (
        "engine_error",
        "the request could not be read; see the server's log",
    )
