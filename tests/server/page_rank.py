"""A fake engine at a pace that a page can be watched at, which knows what it has read before."""

from __future__ import annotations

import asyncio
import os
from itertools import takewhile
from typing import Any

from msgspec.structs import replace

from razor_dist.protocol.messages import EngineInfo, Progress, ToFrontend, Token
from razor_dist.protocol.sampling_params import SamplingParams
from tests.fake_engine import EOS, FakeEngine, main

# New tokens from which on a prompt is read in steps, their number, and the seconds of each.
LONG, STEPS, SECONDS = 256, 8, 0.25
# A variable with a file's path: while the file is there, no prompt of several steps is read whole.
HOLD = "PAGE_HOLD"
# The token that begins a message, and tokens of a question that are its answer.
START, TAIL = 1, 36
# " castle", which all answers come from.
CASTLE = 13592


class PageEngine(FakeEngine):
    pause = 0.01

    def __init__(self, config: dict[str, Any], world_size: int) -> None:
        super().__init__(config, world_size)
        self.known: list[list[int]] = []
        self.looks: dict[str, list[tuple[int, float]]] = {}  # by answer, where its tokens look

    def info(self) -> EngineInfo:
        return replace(super().info(), source_heads=4)

    def send(self, message: ToFrontend) -> None:
        if isinstance(message, Token):
            message.sources = self.looks.get(message.id, [])
        super().send(message)

    def seconds_left(self) -> dict[str, float]:
        return dict.fromkeys(self.tasks, 1.0)

    def reply(self, prompt: list[int]) -> list[int]:
        """The end of what the user has said last, over and over."""
        if len(prompt) < 3:
            return super().reply(prompt)
        *_, start, _ = [at for at, token in enumerate(prompt) if token == START]
        said = prompt[start + 3 : prompt.index(EOS, start)]
        return said[-TAIL:] * 200

    async def prefill(self, id: str, prompt: list[int], params: SamplingParams) -> None:
        if len(prompt) < 3:
            await super().prefill(id, prompt, params)
            return
        self.looks[id] = [(at, 0.8) for at, token in enumerate(prompt) if token == CASTLE]
        cached = max((_common(prompt, other) for other in self.known), default=0)
        new = len(prompt) - cached
        steps = STEPS if new > LONG else 1
        for step in range(steps + 1):
            if step and steps > 1:
                await asyncio.sleep(SECONDS)
            while 1 < steps == step and os.path.exists(os.environ.get(HOLD, "")):
                await asyncio.sleep(0.02)
            done = cached + new * step // steps
            self.send(Progress(id, done, len(prompt), 0, cached, SECONDS * step))
        self.known.append(prompt)


def _common(one: list[int], other: list[int]) -> int:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in same)


if __name__ == "__main__":
    main(PageEngine)
