"""The process that compiles structured outputs: replaced when it dies, bounded, shared in turns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import Process
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from razor_dist.api.errors import Failure
from razor_dist.config.errors import EngineError, ProcessKilledError, RequestError
from razor_dist.frontend.child_process import Turns
from razor_dist.frontend.grammar_process import MOST_WAITING, GrammarProcess
from razor_dist.jobs.task import RETRYABLE
from razor_dist.protocol.messages import EngineInfo
from razor_dist.protocol.structured_outputs import GrammarText, StructuredOutputsParams
from tests import fake_engine, hostile_grammars
from tests.tokenizer import smollm2_tokenizer

pytestmark = pytest.mark.anyio


def process(**bounds: Any) -> GrammarProcess:
    info = EngineInfo(512, fake_engine.VOCAB_SIZE, eos_token_ids=(2,))
    return GrammarProcess(smollm2_tokenizer(), lambda: info, **bounds)


def good(name: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(choice=[name])


def slow(number: int) -> StructuredOutputsParams:
    grammar = hostile_grammars.doubling_terminals(16)
    return StructuredOutputsParams(grammar=f"{grammar}// {number}\n")


@pytest.mark.long
async def test_what_was_compiled_is_known_and_the_process_is_replaced() -> None:
    grammars = process()
    text = await grammars.compile(good("a"))
    assert isinstance(text, GrammarText) and text.llguidance()
    child = grammars.pid
    assert child is not None
    os.kill(child, signal.SIGKILL)
    while grammars.pid is not None:
        await asyncio.sleep(0.01)
    assert await grammars.compile(good("a")) == text  # without the process
    assert grammars.pid is None
    await grammars.compile(good("b"))
    assert grammars.pid not in (None, child)
    with pytest.raises(RequestError, match=r"crashed; make it simpler") as crashed:
        await grammars.compile(StructuredOutputsParams(grammar=hostile_grammars.CRASHES))
    assert crashed.value.param == "structured_outputs"
    await grammars.compile(good("c"))
    grammars.seconds = 0.2
    with pytest.raises(RequestError, match=r"took longer than 0.2 s"):
        await grammars.compile(slow(0))
    grammars.seconds = 3.0
    # It is replaced when it has grown.
    await grammars.compile(good("d"))
    grammars.largest = 1
    await grammars.compile(good("e"))
    assert grammars.pid is None
    await grammars.compile(good("f"))
    waiting = asyncio.create_task(grammars.compile(slow(1)))
    while not grammars.is_busy:
        await asyncio.sleep(0)
    await grammars.aclose()
    with pytest.raises((RequestError, EngineError)):
        await waiting
    with pytest.raises(EngineError, match="is being closed"):
        await grammars.compile(good("g"))


@pytest.mark.long
async def test_memory_is_bounded() -> None:
    """The child may take so much more than it has after it has loaded the vocabulary."""
    grammars = process(memory=1 << 30)
    await grammars.compile(good("a"))
    child = psutil.Process(grammars.pid)
    bound, _ = child.rlimit(psutil.RLIMIT_AS)
    assert 0 < bound - child.memory_info().vms < 2 << 30
    assert child.rlimit(psutil.RLIMIT_CORE) == (0, 0)
    await grammars.aclose()


async def test_what_takes_more_memory_is_refused_and_the_next_is_served() -> None:
    grammars = process(memory=24 << 20, seconds=60.0)
    for _ in range(2):
        with pytest.raises(RequestError, match=r"crashed|more than 24 MiB") as refused:
            await grammars.compile(slow(0))
        assert refused.value.param == "structured_outputs"
        await grammars.compile(good("a"))
    await grammars.aclose()


class Killed(GrammarProcess):
    """One whose first ``times`` questions find a process that a signal has just ended."""

    number, times = signal.SIGKILL, 0

    async def ask(self, seconds: float, *parts: bytes | bytearray) -> bytes:
        if self.times:
            self.times -= 1
            process = await self._running()
            process.send_signal(self.number)
            # A thread may handle the signal (pytest's faulthandler prints a traceback first) while
            # the main one still answers. asyncio hears of the end only after this call.
            with contextlib.suppress(ChildProcessError):  # its thread waits for it as well
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return await super().ask(seconds, *parts)


def killed() -> Killed:
    info = EngineInfo(512, fake_engine.VOCAB_SIZE, eos_token_ids=(2,))
    return Killed(smollm2_tokenizer(), lambda: info)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_process_that_is_killed_from_outside_does_not_blame_the_constraint(
    number: signal.Signals,
) -> None:
    grammars = killed()
    grammars.number, grammars.times = number, 1
    await grammars.compile(good("a"))
    grammars.times = 2
    with pytest.raises(ProcessKilledError, match=f"ended by {number.name}") as refused:
        await grammars.compile(good("b"))
    assert Failure.of(refused.value).status == 503
    await grammars.compile(good("b"))
    await grammars.aclose()


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS])
async def test_a_process_that_crashes_blames_the_constraint(number: signal.Signals) -> None:
    grammars = killed()
    grammars.number, grammars.times = number, 1
    with pytest.raises(RequestError, match="crashed; make it simpler"):
        await grammars.compile(good("a"))
    await grammars.aclose()


async def test_a_time_out_is_kept() -> None:
    grammars = process(seconds=0.2)
    for _ in range(2):
        with pytest.raises(RequestError, match=r"took longer than 0.2 s"):
            await grammars.compile(slow(0))
        grammars.seconds = 60.0  # the second time nothing is compiled
    assert grammars.pid is None
    await grammars.aclose()


async def test_a_time_out_is_kept_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = 1000.0, 0
    grammars = process(clock=lambda: now)

    async def ask(*_: Any) -> bytes:
        nonlocal asked
        asked += 1
        raise TimeoutError

    monkeypatch.setattr(grammars, "ask", ask)
    for later, times in ((0.0, 1), (59.0, 1), (61.0, 2), (120.0, 2)):
        now = 1000.0 + later
        with pytest.raises(RequestError, match="took longer than 3 s") as error:
            await grammars.compile(good("a"))
        assert error.value.code in RETRYABLE, "a job tries it again"
        assert asked == times


class Counted(Killed):
    """One that counts the processes that it has started."""

    started = 0

    async def _prepare(self, process: Process) -> None:
        self.started += 1
        await super()._prepare(process)


@pytest.mark.parametrize("has_tokenizer", [False, True])
async def test_a_vocabulary_that_cannot_be_used_starts_one_process_at_most(
    has_tokenizer: bool,
) -> None:
    info = EngineInfo(512, 5, eos_token_ids=(2,))  # fewer than the tokenizer has
    grammars = Counted(smollm2_tokenizer() if has_tokenizer else None, lambda: info)
    for name in "aab":
        with pytest.raises(RequestError, match="tokenizer"):
            await grammars.compile(good(name))
        assert (grammars.pid, grammars.started) == (None, int(has_tokenizer))
    await grammars.aclose()


async def test_few_constraints_of_a_key_may_wait() -> None:
    grammars = process()
    end, most = asyncio.Event(), MOST_WAITING
    asked: list[asyncio.Task[Any]] = [asyncio.create_task(grammars.in_turn(end.wait, "before"))]
    asked += [asyncio.create_task(grammars.compile(good(f"{n}"), "a")) for n in range(most)]
    while grammars.waiting < most:
        await asyncio.sleep(0)
    with pytest.raises(RequestError, match=f"{most} other constraints") as refused:
        await grammars.compile(good("x"), "a")
    assert Failure.of(refused.value).response(2).headers["Retry-After"] == "2"
    assert Failure.of(refused.value).status == 429
    # The same as one that waits, another key's, and those of a batch.
    others = [("0", "a"), ("x", "b"), *((f"{n}", None) for n in range(most + 1))]
    asked += [asyncio.create_task(grammars.compile(good(name), key)) for name, key in others]
    while grammars.waiting < len(asked) - 1:
        await asyncio.sleep(0)
    end.set()
    await asyncio.gather(*asked)
    assert not grammars.waiting
    await grammars.aclose()


async def test_a_key_that_floods_delays_another_by_one_constraint() -> None:
    grammars = process()
    await grammars.compile(good("a"))
    ended: list[str] = []

    async def ask(key: str, structured: StructuredOutputsParams) -> None:
        try:
            await grammars.compile(structured, key)
        except RequestError:
            pass
        finally:
            ended.append(key)

    grammars.seconds = 0.3
    flood = [asyncio.create_task(ask("flood", slow(n))) for n in range(12)]
    while not grammars.waiting:
        await asyncio.sleep(0)
    other = asyncio.create_task(ask("other", good("b")))
    gone = asyncio.create_task(ask("gone", good("c")))
    await asyncio.sleep(0)
    gone.cancel()
    await other
    assert ended.count("flood") <= 2
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, gone, return_exceptions=True)
    await grammars.aclose()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.data())
def test_keys_take_turns(keys: list[int], data: st.DataObject) -> None:
    """Between a request's arrival and its turn no other key has two turns."""
    cancelled = data.draw(st.sets(st.integers(0, len(keys) - 1)))

    async def main() -> list[int]:
        turns, served = Turns(), list[int]()
        await turns.acquire(0)

        async def wait(index: int) -> None:
            await turns.acquire(keys[index])
            served.append(index)
            await asyncio.sleep(0)
            turns.release()

        tasks = [asyncio.create_task(wait(index)) for index in range(len(keys))]
        await asyncio.sleep(0)
        for index in cancelled:
            tasks[index].cancel()
        await asyncio.sleep(0)
        turns.release()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait_for(turns.acquire(), 10)  # nobody has kept it
        return served

    served = asyncio.run(main())
    assert sorted(served) == [index for index in range(len(keys)) if index not in cancelled]
    for key in set(keys):
        own = [index for index in served if keys[index] == key]
        assert own == sorted(own)
        first = [keys[index] for index in served].index(key) if own else 0
        before = [keys[index] for index in served[:first]]
        assert len(before) == len(set(before))
