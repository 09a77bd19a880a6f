"""Engines that die or are closed, and what is told of them."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from razor_dist import LLM, SamplingParams
from razor_dist.config.errors import EngineError
from razor_dist.frontend.grammar_process import GrammarProcess
from razor_dist.llm.loop_thread import LoopThread
from tests import fake_engine
from tests.fake_llm import FakeAsyncLLM, FakeLLM
from tests.hostile_grammars import doubling_terminals
from tests.server.process import wait_until

pytestmark = pytest.mark.anyio
EOS = fake_engine.EOS


def test_a_dead_engine_is_an_error_and_comes_back() -> None:
    with FakeLLM(world_size=2) as llm:
        with pytest.raises(EngineError, match="the engine failed"):
            llm.generate([[fake_engine.HANG], [fake_engine.DIE]])
        [output] = llm.generate([[5]])
        assert output.outputs[0].token_ids == [5, EOS]


def test_a_closed_llm_has_no_ranks() -> None:
    llm = FakeLLM(world_size=2)
    pids = llm.pids
    llm.close()
    llm.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    dropped = FakeLLM()
    pids = dropped.pids
    del dropped
    gc.collect()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.filterwarnings("error")  # a coroutine that nobody runs is one
def test_a_closed_llm_says_so() -> None:
    llm = FakeLLM()
    prefix = llm.prefill([5])
    endless = [fake_engine.ENDLESS, 20], SamplingParams(max_tokens=400)
    begun, left = llm.stream(*endless), llm.stream(*endless)
    assert next(begun) and next(left)
    llm.close()
    left.close()
    calls: list[Callable[[], object]] = [
        lambda: llm.generate([[5]]),
        lambda: llm.generate([[5]], prefix=prefix),
        lambda: llm.generate([]),
        lambda: llm.chat([{"role": "user", "content": "Hello"}]),
        lambda: llm.prefill([5]),
        llm.stats,
        lambda: next(begun),
    ]
    for call in calls:
        with pytest.raises(EngineError, match="the LLM was closed"):
            call()
    prefix.release()
    assert llm.get_tokenizer() is not None
    gc.collect()


_FORKS = """
import os, signal, sys
from razor_dist import SamplingParams
from razor_dist.config.errors import EngineError
from tests import fake_engine
from tests.fake_llm import FakeLLM

llm = FakeLLM()
begun = llm.stream([fake_engine.ENDLESS, 20], SamplingParams(max_tokens=400))
next(begun)
if not (child := os.fork()):
    signal.alarm(60)  # else it would wait for ever
    for call in (lambda: llm.generate([[5]]), llm.stats, lambda: next(begun)):
        try:
            call()
        except EngineError as error:
            print(error)
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(llm.generate([[5, 6]])[0].outputs[0].token_ids[0])
"""


@pytest.mark.long
def test_a_forked_child_says_so_and_ends() -> None:
    command = [sys.executable, "-c", _FORKS]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout.split("\n")
    assert [line[:23] for line in said[:3]] == ["this process was forked"] * 3
    assert said[3:5] == ["0", "6"]


async def test_an_asynchronous_engine_that_was_closed_says_so() -> None:
    engine = FakeAsyncLLM()
    endless = [fake_engine.ENDLESS, 20], SamplingParams(max_tokens=400)
    begun, left = engine.generate(*endless), engine.generate(*endless)
    assert await anext(begun) and await anext(left)
    engine.close()
    await left.aclose()
    with pytest.raises(EngineError, match="the LLM was closed"):
        await anext(begun)


@pytest.mark.long
def test_a_stream_that_the_engines_own_thread_collects_as_garbage_is_aborted() -> None:
    code = """
import gc
from tests import fake_engine
from razor_dist import SamplingParams
from tests.fake_llm import FakeLLM

async def collect():
    gc.collect()

with FakeLLM() as llm:
    gc.disable()
    cycle = [llm.stream([fake_engine.ENDLESS, 20], SamplingParams(max_tokens=400))]
    cycle.append(cycle)
    next(cycle[0])
    del cycle
    llm.loop.run(collect())
    print(llm.stats()["bytes_sent"]["aborted"], llm.stats()["running"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["1", "0"]


@pytest.mark.long
def test_an_llm_that_is_never_closed_does_not_hold_up_the_interpreter() -> None:
    code = "from tests.fake_llm import FakeLLM\nllm = FakeLLM()\nprint(*llm.pids, flush=True)\n{}"
    for end, status in (("", 0), ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL)):
        done = subprocess.run(
            [sys.executable, "-c", code.format(end)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == status, done.stderr
        pids = [int(pid) for pid in done.stdout.split()]
        assert wait_until(lambda pids=pids: not any(map(_runs, pids)), 20)


def _runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


# Longer than anybody waits here.
SLOW = [
    SamplingParams(structured_outputs={"grammar": f"{doubling_terminals(15)}// {n}\n"})
    for n in range(2)
]


GOOD = SamplingParams(structured_outputs={"choice": ["a"]})


def slow_grammars(llm: LLM) -> GrammarProcess:
    grammars = llm.client.grammars
    assert grammars is not None
    grammars.seconds = 60.0
    return grammars


def test_closing_fails_what_is_being_compiled() -> None:
    llm = FakeLLM()
    grammars = slow_grammars(llm)
    llm.generate([[5]], GOOD)  # starts the process
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(llm.generate, [[5]], params) for params in SLOW]
        assert wait_until(lambda: grammars.waiting, 60)
        llm.close()
        for future in asked:
            with pytest.raises(EngineError, match="the LLM was closed"):
                future.result(60)


async def test_closing_fails_what_is_being_compiled_for_tasks() -> None:
    engine = FakeAsyncLLM()
    grammars = slow_grammars(engine.llm)

    async def answer(params: SamplingParams) -> None:
        async for _ in engine.generate([5], params):
            pass

    await answer(GOOD)
    tasks = [asyncio.create_task(answer(params)) for params in SLOW]
    while not grammars.waiting:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(engine.close)
    for task in tasks:
        with pytest.raises(EngineError, match="the LLM was closed"):
            await asyncio.wait_for(task, 60)


def test_nobody_waits_for_a_loop_that_has_ended() -> None:
    loop, begun = LoopThread(), threading.Event()

    async def endless() -> None:
        begun.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(loop.run, endless())
        assert begun.wait(60)
        loop.finish(asyncio.sleep(0))
        with pytest.raises(EngineError, match="the LLM was closed"):
            waiting.result(60)
