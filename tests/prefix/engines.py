"""Engines with a prefix cache and requests to them, as the tests of this folder have them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from razor_dist.config.schema import EngineConfig
from razor_dist.engine import build
from razor_dist.engine.build import RankEngine, make_engine
from razor_dist.engine.core import EngineCore
from razor_dist.engine.worker import follow
from razor_dist.heads.decision import HeadRoles
from razor_dist.parallel.comm import Communicator
from razor_dist.prefix import transfer
from razor_dist.protocol.messages import CacheScope, Progress, Token
from razor_dist.protocol.sampling_params import SamplingParams
from tests.cases import model_and_shape
from tests.engine.cores import evict_all, prompt
from tests.logits import split_of, windows_of
from tests.ranks import Ranks

Answers = dict[str, list[tuple[int, float]]]
Told = dict[str, int]

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
END = (2,)  # ends a message; no other prompt has it
SETTINGS: dict[str, Any] = {
    "max_model_len": 400,
    "page_size": 4,
    "window_min": 12,
    "window_ratio": 5,
    "block": 4,
    "chunked_prefill_size": 32,
    "prefix_tail_tokens": 24,
    "max_num_seqs": 4,
    "max_step_ms": 1e6,
}


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request; those before ``wait`` are added together."""

    name: str
    ids: tuple[int, ...]
    params: SamplingParams = GREEDY
    steps: int | None = None  # aborted after this many
    salt: str | None = None
    cache_prompt: bool = True
    pin: bool = False
    prefix: str | None = None
    release: str | None = None  # a pinned prefix, before
    wait: bool = True  # all that is there ends before the next


def step(core: EngineCore, answers: Answers, cached: Told) -> None:
    """Take a step; note its tokens, and what each request found in the cache."""
    for message in core.step():
        if isinstance(message, Progress):
            cached.setdefault(message.id, message.cached)
        elif isinstance(message, Token):
            found = message.token, message.logprob
            answers.setdefault(message.id, []).append(found)
        else:
            raise AssertionError(message)


def engine_of(comm: Communicator, path: str, given: dict[str, Any]) -> RankEngine:
    # Small, so that nodes are cut into many.
    build.PART_BYTES = transfer.PART_BYTES = given.get("part_bytes", 16 << 20)
    changed = {key: given[key] for key in given.keys() - {"part_bytes", "source_heads", "windows"}}
    config = EngineConfig(model=path, world_size=comm.size, **(SETTINGS | changed))
    model, _ = model_and_shape(path)
    split = split_of(Path(path))
    if config.attention == "full":
        split = tuple((True,) * len(row) for row in split)
    windows = windows_of(split) if given.get("windows") else None
    roles = HeadRoles(split, windows, given.get("source_heads", ()))
    engine = make_engine(model, config, roles, comm, eos_token_ids=END)
    if "part_bytes" in given:
        engine.core.max_step = 0.0  # one part a step
    return engine


def serve(
    comm: Communicator, path: str, given: dict[str, Any], asks: tuple[Ask, ...]
) -> tuple[Answers, Told, dict[str, Any]]:
    """Rank 0's answers, the tokens that each found in the cache, and the counters at the end."""
    engine = engine_of(comm, path, given)
    if comm.rank:
        follow(engine)
        return {}, {}, {}
    core = engine.core
    answers, cached = serve_all(core, asks)
    for ask in asks:
        core.abort(ask.name)
    stats = core.stats()
    assert sum(stats.kv_bytes_per_rank) == 0
    evict_all(core)
    accounts = core.scheduler.room.accounts
    assert (accounts.free == accounts.sizes).all()
    pages = engine.runner.caches.pages
    assert pages.free_pages == pages.num_pages and not engine.runner.sequences
    core.stop()
    return answers, cached, msgspec.to_builtins(stats)


def serve_all(core: EngineCore, asks: tuple[Ask, ...]) -> tuple[Answers, Told]:
    """Answer requests; the engine ends all work, saving included, where they say ``wait``."""
    answers: Answers = {}
    cached: Told = {}
    for ask in asks:
        if ask.release is not None:
            core.abort(ask.release)
        about: dict[str, Any] = {"pin": ask.pin, "prefix_id": ask.prefix}
        scope = CacheScope(ask.salt, ask.cache_prompt)
        core.add(ask.name, list(ask.ids), ask.params, scope=scope, **about)
        if ask.steps is not None:
            for _ in range(ask.steps):
                if core.has_work:
                    step(core, answers, cached)
            core.abort(ask.name)
            answers.pop(ask.name, None)
        while ask.wait and core.has_work:
            step(core, answers, cached)
    while core.has_work:
        step(core, answers, cached)
    return answers, cached


def alone(ranks: Ranks, path: Path, asks: tuple[Ask, ...], **changed: Any) -> Answers:
    """The answers of an engine of one rank that has no cache."""
    plain = tuple(a for a in asks if a.steps is None)
    changed = {**changed, "prefix_cache": False}
    return ranks(1).run(serve, str(path), changed, plain)[0][0]


def assert_alike(found: Answers, want: Answers, tolerance: float = 1e-4) -> None:
    """Assert equal tokens, and logprobs that differ by at most ``tolerance``."""
    assert found.keys() == want.keys()
    for name, answer in want.items():
        assert [token for token, _ in found[name]] == [token for token, _ in answer], name
        got = [logprob for _, logprob in found[name]]
        assert got == pytest.approx([logprob for _, logprob in answer], abs=tolerance), name


def ids(*parts: tuple[int, int]) -> tuple[int, ...]:
    """Texts of (seed, tokens), one after the other."""
    return tuple(token for seed, count in parts for token in prompt(count, seed))
