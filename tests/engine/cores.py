"""Engines in process, prompts for them, and what they answer."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from razor_dist.config.schema import EngineConfig
from razor_dist.engine.build import build_engine
from razor_dist.engine.core import EngineCore
from razor_dist.parallel.comm import Communicator
from razor_dist.protocol.messages import Token
from razor_dist.protocol.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def make_core(path: Path, **settings: Any) -> EngineCore:
    values: dict[str, Any] = {
        "attention": "streaming",
        "window_min": 24,
        "block": 8,
        "chunked_prefill_size": 40,
        "max_step_ms": 1e6,  # else a slow machine cuts chunks
    }
    # What prompts find in the cache is in tests/prefix/test_answers.py.
    values |= {"max_model_len": 400, "page_size": 8, "prefix_cache": False, **settings}
    config = EngineConfig(model=str(path), **values)
    return build_engine(config, Communicator(None), torch.device("cpu")).core


def run(core: EngineCore) -> dict[str, list[Any]]:
    messages: dict[str, list[Any]] = defaultdict(list)
    for _ in range(2000):
        if not core.has_work:
            return messages
        for message in core.step():
            messages[message.id].append(message)
    raise AssertionError("the engine does not come to an end")


def evict_all(core: EngineCore) -> None:
    """Evict all that is cached and not in use; host memory and disk keep theirs."""
    core._run(*core.scheduler.room.shrink_to(0))


def tokens(messages: list[Any]) -> list[int]:
    return [m.token for m in messages if isinstance(m, Token)]


def prompt(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 190, (count,), generator=generator).tolist()
