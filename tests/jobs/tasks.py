"""A task for tests: answers to prompts of token ids, some of which do harm."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from razor_dist import LLM, SamplingParams
from razor_dist.config.errors import EngineError
from razor_dist.config.schema import EngineConfig
from razor_dist.jobs.task import Item

VOCABULARY = 192  # of tests/tiny_models.py


@dataclass(frozen=True)
class Completions:
    """Continues ``count`` random prompts greedily.

    Attributes
    ----------
    configs : dict
        By engine name; every engine gets all prompts.
    count, seed, max_tokens : int
    slow : float
        Seconds that each item takes at least.
    harm : dict
        What befalls an item, by its id: "error" and "nan" are the task's faults, "rank" and
        "frontend" kill a process of the engine. What is written as ``"rank:FILE"`` happens once:
        the first time leaves the file.
    at_once : int
        Items that an engine gets at a time; the first of them waits until all are there.
    meeting : str
        A folder, in which they see each other; needed if ``at_once`` is more than 1.
    """

    configs: dict[str, EngineConfig]
    count: int = 6
    seed: int = 0
    max_tokens: int = 4
    slow: float = 0.0
    harm: dict[str, str] = field(default_factory=dict)
    at_once: int = 1
    meeting: str = ""

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"seed": self.seed, "max_tokens": self.max_tokens}

    @property
    def engines(self) -> Mapping[str, EngineConfig]:
        return self.configs

    def items(self) -> Sequence[Item]:
        draw = random.Random(self.seed)
        prompts = [
            [draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(20, 60))]
            for _ in range(self.count)
        ]
        return [
            Item(f"{name}-{n}", len(prompt), name, {"prompt": prompt})
            for name in self.configs
            for n, prompt in enumerate(prompts)
        ]

    def run(self, llm: LLM, item: Item) -> Mapping[str, Any]:
        llm.stats()  # refused unless the ranks are ready, also after an item that killed one
        time.sleep(self.slow)
        if self.at_once > 1:
            self._meet(item)
        harm, _, once = self.harm.get(item.id, "").partition(":")
        if once and Path(once).exists():
            harm = ""
        elif once:
            Path(once).touch()
        match harm:
            case "error":
                raise KeyError("no such thing")
            case "frontend":
                os.kill(os.getpid(), signal.SIGKILL)
            case "rank":
                kill_rank(llm)
            case "nan":
                return {"loss": float("nan")}
        [output] = llm.generate(
            [item.data["prompt"]], SamplingParams(max_tokens=self.max_tokens, temperature=0)
        )
        [answer] = output.outputs
        return {
            "tokens": answer.token_ids,
            "timing": {"seconds": output.metrics.total_seconds},
        }

    def _meet(self, item: Item) -> None:
        there, end = Path(self.meeting), time.monotonic() + 120
        (there / item.id).touch()
        while len(list(there.iterdir())) < self.at_once:
            assert time.monotonic() < end, "no other item came"
            time.sleep(0.01)


def kill_rank(llm: LLM) -> NoReturn:
    """Kill a rank, and raise what `generate` says then of a request in work."""
    os.kill(llm.pids[-1], signal.SIGKILL)
    while llm.client.status.state == "ready":
        time.sleep(0.01)
    raise EngineError("a rank was killed under this item")
