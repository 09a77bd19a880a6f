"""A stand-in for the rank process: speaks the protocol, computes nothing.

Rank 0 answers each prompt with its own tokens in reverse order, then with the end-of-sequence
token. Prompts of one or two tokens whose first is one of `COMMANDS` make it misbehave instead.
Faults at start are chosen by the configuration's model name (see `_fail_at_start`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from razor_dist.protocol.counters import Counters, PrefixCounters, StepSeconds
from razor_dist.protocol.messages import (
    Abort,
    Add,
    Alive,
    EngineInfo,
    Failed,
    Progress,
    PromptLogprobs,
    Ready,
    Shutdown,
    Stats,
    ToEngine,
    ToFrontend,
    Token,
    answer_ids,
    decode_to_engine,
    encode,
    read_frame,
)
from razor_dist.protocol.repetition import RepetitionDetector
from razor_dist.protocol.sampling_params import SamplingParams

MAX_MODEL_LEN = 512
VOCAB_SIZE = 49152
EOS = 2
# First tokens of a prompt, far up in the vocabulary, and what they make the engine do.
SLOW_PREFILL, HANG, DIE, REFUSE, ENDLESS = 49001, 49002, 49003, 49004, 49005
# A file of the model's folder; no rank starts while it is there.
WAIT = "wait"
# A file of the model's folder; while it is there, starts fail by a mistake of the user's.
BAD = "bad"


def _fail_at_start(model: str, rank: int) -> str | None:
    """Return what is wrong with a model by its name, or crash."""
    if "crash-at-start" in model:
        sys.exit(1)
    if "bad-head-map" in model or Path(model, BAD).exists():
        return "the head map belongs to another model"
    while Path(model, WAIT).exists():
        time.sleep(0.02)
    return None


def told(reason: str) -> dict[str, Any]:
    """The process id and the environment of a fake rank 0, from its `EngineInfo.decode_reason`."""
    return dict(json.loads(reason))


class FakeEngine:
    """Rank 0's end of the socket."""

    pause = 0.0  # seconds after each token of an answer

    def __init__(self, config: dict[str, Any], world_size: int) -> None:
        self.config, self.world_size = config, world_size
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.aborted: list[str] = []

    async def run(self, socket_path: str) -> None:
        """Serve until the frontend hangs up or says shutdown."""
        reader, self.writer = await asyncio.open_unix_connection(socket_path)
        self.beating = asyncio.create_task(self.beat())
        problem = _fail_at_start(self.config["model"], rank=0)
        if problem:
            self.send(Failed("", problem))
            await self.writer.drain()
            self.writer.close()
            sys.exit(3)
        self.send(Ready(self.info()))
        while True:
            try:
                message = decode_to_engine(await read_frame(reader))
            except asyncio.IncompleteReadError:
                return
            if isinstance(message, Shutdown):
                return
            self.handle(message)

    async def beat(self) -> None:
        while True:
            self.send(Alive(os.getpid(), self.seconds_left()))
            await asyncio.sleep(0.2)

    def seconds_left(self) -> dict[str, float]:
        """The first request ends after 7.5 s, and each other one 7.5 s later."""
        return {id_: 7.5 * n for n, id_ in enumerate(self.tasks, start=1)}

    def info(self) -> EngineInfo:
        return EngineInfo(
            max_model_len=self.config["max_model_len"] or MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            world_size=self.world_size,
            model=self.config["model"],
            eos_token_ids=(EOS,),
            attention=self.config["attention"],
            prefill=self.config["prefill"],
            kv_dtype="int8",
            retrieval_fraction=0.15,
            kv_reserved_bytes_per_rank=1000,
            page_size=64,
            num_pages=50,
            decode_reason=json.dumps({"pid": os.getpid(), "env": dict(os.environ)}),
        )

    def handle(self, message: ToEngine) -> None:
        if isinstance(message, Add):
            prompt, params = message.prompt.tolist(), message.checked_params()
            for id_ in answer_ids(message.id, params.n):
                task = asyncio.create_task(self.answer(id_, prompt, params))
                self.tasks[id_] = task
        elif isinstance(message, Abort):
            self.aborted.append(message.id)
            # The request may have ended while the abort was on its way.
            if task := self.tasks.pop(message.id, None):
                task.cancel()
        else:
            assert not isinstance(message, Shutdown)
            self.send(Stats(message.tag, self.counters()))

    def counters(self) -> Counters:
        return Counters(
            running=len(self.tasks),
            # Beside a purpose, what only tests ask.
            bytes_sent={"ring": 10, "aborted": len(self.aborted)},
            kv_bytes_per_rank=[100 * bool(self.tasks)] * self.world_size,
            retrieval_kv_bytes_per_rank=[64 * bool(self.tasks)] * self.world_size,
            prefix_cache=PrefixCounters(bytes_per_rank=[8]),
            rss_per_rank=[4096] * self.world_size,
            cpu_us_per_rank=[1500] * self.world_size,
            step_seconds={"prefill": StepSeconds((0.1, 1.0), [2, 1, 0], 0.75)},
        )

    async def answer(self, id: str, prompt: list[int], params: SamplingParams) -> None:
        await self.prefill(id, prompt, params)
        limit = params.max_tokens
        tokens = self.reply(prompt)
        if prompt[0] == ENDLESS:
            tokens = [prompt[-1]] * limit
        repetition = params.repetition_detection
        detector = repetition and RepetitionDetector(repetition)
        tokens = [*tokens, EOS][:limit]
        for n, token in enumerate(tokens, start=1):
            is_end = token == EOS and not params.ignore_eos
            stops = is_end or token in params.stop_token_ids
            finish = "stop" if stops else "length" if n == len(tokens) else None
            if not stops and detector and detector.push(token):
                finish = "repetition"
            top = [(token, -0.5), (token ^ 1, -1.5)][: params.logprobs or 0]
            logprob = None if params.logprobs is None else -0.5
            if finish:
                del self.tasks[id]
            self.send(Token(id, token, logprob, top, finish))
            if finish:
                return
            await asyncio.sleep(0.02 if prompt[0] == ENDLESS else self.pause)

    def reply(self, prompt: list[int]) -> list[int]:
        return list(reversed(prompt))

    async def prefill(self, id: str, prompt: list[int], params: SamplingParams) -> None:
        if prompt[0] == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        if prompt[0] == HANG:
            await asyncio.sleep(3600)
        if prompt[0] == REFUSE:
            del self.tasks[id]
            problem = "the prompt needs more pages than the pool has"
            self.send(Failed(id, problem, "messages", "context_length_exceeded"))
            await asyncio.sleep(3600)
        if params.return_sources and self.config["attention"] == "streaming":
            del self.tasks[id]
            self.send(Failed(id, "return_sources asks heads that are not there", "return_sources"))
            await asyncio.sleep(3600)
        if params.prompt_logprobs is not None and "/" not in id:
            self.send(PromptLogprobs(id, [None, *((-1.0, 1, [(t, -1.0)]) for t in prompt[1:])]))
        steps = 4 if prompt[0] == SLOW_PREFILL else 1
        for step in range(steps + 1):
            if step and steps > 1:
                await asyncio.sleep(0.3)
            done = len(prompt) * step // steps
            self.send(Progress(id, done, len(prompt), prefix=0, cached=0, seconds=0.3 * step))

    def send(self, message: ToFrontend) -> None:
        self.writer.write(encode(message))


def main(engine: type[FakeEngine] = FakeEngine) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-json", type=Path, required=True)
    parser.add_argument("--socket")
    arguments = parser.parse_args()
    config = json.loads(arguments.config_json.read_text())
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        if "connects-late" in config["model"]:
            time.sleep(2.0)
        asyncio.run(engine(config, world_size).run(arguments.socket))
    else:
        problem = _fail_at_start(config["model"], rank)
        if problem:
            sys.exit(3)
        signal.pause()  # ends with the launcher


if __name__ == "__main__":
    main()
