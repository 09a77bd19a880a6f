"""Engines that are alive at once on one prefix store, beside an engine without a cache."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from razor_dist.engine.build import RankEngine
from razor_dist.engine.worker import follow
from razor_dist.parallel.comm import Communicator
from razor_dist.prefix.store import folders, node_folders
from razor_dist.protocol.messages import Progress, Token
from razor_dist.protocol.step_plan import Stop
from tests.cases import model_and_shape
from tests.logits import split_of
from tests.prefix.engines import GREEDY, engine_of, ids
from tests.prefix.stores import TO_8_BITS
from tests.ranks import Ranks

# Of each token: itself, its log-probability, and the weights of its sources by position.
Answer = list[tuple[int, float, dict[int, float]]]

DOCUMENT = 120  # tokens
ASKING = dataclasses.replace(GREEDY, max_tokens=3, return_sources=3)
# Of the device, about one document, so that others come from host memory or from disk.
SMALL: dict[str, Any] = {"kv_tokens": 200, "max_num_seqs": 1, "max_model_len": 180}
LINES: list[logging.LogRecord] = []  # of a rank's process: what could not be loaded
ENGINES: dict[int, tuple[RankEngine, dict[str, Answer]]] = {}  # in each rank's process


def begin(comm: Communicator, number: int, path: str, given: dict[str, Any]) -> None:
    """Make an engine that stays until `end`."""
    _, shape = model_and_shape(path)
    group = shape.query_heads // shape.kv_heads
    heads = [
        (layer, head * group)
        for layer, row in enumerate(split_of(Path(path)))
        for head, kept in enumerate(row)
        if kept
    ]
    settings = SMALL | {"part_bytes": 2000, "source_heads": heads[:2]} | given
    engine = engine_of(comm, path, settings)
    ENGINES[number] = engine, {}
    logging.getLogger("razor_dist.prefix.transfer").addFilter(note)  # once, whatever is added


def act(
    comm: Communicator, number: int, asked: dict[str, tuple[int, ...]], steps: int | None
) -> tuple[dict[str, Answer], dict[str, Any], set[str]] | None:
    """Hand an engine prompts, and take steps: all that there are to take, if it is None.

    Return the answers that have ended, the counters, and the names of the nodes that it knows.
    """
    engine, answers = ENGINES[number]
    if comm.rank:
        return follow(engine)
    core, ended = engine.core, {}
    for name, prompt in asked.items():
        core.add(name, list(prompt), ASKING)
    taken = 0
    while core.has_work and taken != steps:
        taken += 1
        for message in core.step():
            assert isinstance(message, Progress | Token), message
            if isinstance(message, Token):
                sources = dict(message.sources or ())
                one = message.token, message.logprob, sources
                answers.setdefault(message.id, []).append(one)
                if message.finish is not None:
                    ended[message.id] = answers.pop(message.id)
    stats = msgspec.to_builtins(core.stats().prefix_cache)
    tiers = core.scheduler.room.tiers
    known = {n.manifest.node for n in tiers.nodes}
    Stop().send(engine.runner.comm)  # the other ranks leave `follow`, and the engine stays
    return ended, stats, known


def note(record: logging.LogRecord) -> bool:
    LINES.append(record)
    return True


def lines(comm: Communicator) -> int:
    """Count what a rank has logged of loads."""
    return len(LINES)


def end(comm: Communicator, number: int, kill: bool) -> None:
    """End an engine; with ``kill`` only release its lock, as the kernel would."""
    engine, _ = ENGINES.pop(number)
    tiers = engine.core.scheduler.room.tiers
    if kill:
        if (store := tiers._store) is not None:
            store.lock.release()
    elif comm.rank:
        follow(engine)
    else:
        engine.core.stop()


def assert_same(found: Answer, want: Answer, bound: float) -> None:
    """Compare two answers up to the first token that differs, that one included.

    Both tokens are the likeliest, so their log-probabilities must agree even there.
    """
    assert len(found) == len(want)
    for (token, logprob, sources), (other, wanted, told) in zip(found, want, strict=True):
        assert logprob == pytest.approx(wanted, abs=bound)
        least = max((min(each.values()) for each in (sources, told) if each), default=0.0)
        for position in sources.keys() | told.keys():
            pair = sources.get(position, 0.0), told.get(position, 0.0)
            # Below the least that both have, one may have left out what the other has not.
            if max(pair) > least + bound:
                assert pair[0] == pytest.approx(pair[1], abs=bound), position
        if token != other:
            break


class Shared:
    """Engines on one store, and the answers of an engine without caches."""

    def __init__(self, ranks: Ranks, path: str, kv: str, store: Path) -> None:
        self._ranks, self._path, self._store, self._kv = ranks, path, store, kv
        self._worlds: dict[int, int] = {}
        self._asked: dict[int, dict[str, tuple[int, ...]]] = {}  # not answered yet
        self._wanted: dict[tuple[int, ...], Answer] = {}
        self.bound = TO_8_BITS if kv == "int8" else 1e-4
        self.known: dict[int, set[str]] = {}
        self.stats: dict[int, dict[str, Any]] = {}
        self.at_work: set[int] = set()  # engines that have not taken all steps that there are
        self._number = 0
        self._plain = self._begin(1, {"prefix_cache": False})

    @property
    def alive(self) -> list[int]:
        return sorted(self._worlds.keys() - {self._plain})

    def _begin(self, world: int, given: dict[str, Any]) -> int:
        self._number += 1
        settings = {"kv_dtype": self._kv, **given}
        self._ranks(world).run(begin, self._number, self._path, settings)
        self._worlds[self._number] = world
        self._asked[self._number] = {}
        return self._number

    def begin(self, world: int, chunk: int, **given: Any) -> int:
        own = {"chunked_prefill_size": chunk, "prefix_store": str(self._store)}
        return self._begin(world, own | given)

    def ask(self, number: int, *prompts: tuple[int, ...], steps: int | None = None) -> None:
        """Hand prompts to an engine, take steps, and compare what it has answered."""
        asked = {f"r{self._number}-{n}": prompt for n, prompt in enumerate(prompts)}
        self._number += 1
        self._asked[number] |= asked
        ended, stats, known = self._act(number, asked, steps)
        self.at_work = self.at_work - {number} | ({number} if steps is not None else set())
        self.stats[number], self.known[number] = stats, known
        for name, answer in ended.items():
            prompt = self._asked[number].pop(name)
            if prompt not in self._wanted:
                [self._wanted[prompt]] = self._act(self._plain, {"": prompt}, None)[0].values()
            assert_same(answer, self._wanted[prompt], self.bound)

    def _act(self, number: int, asked: dict[str, tuple[int, ...]], steps: int | None) -> Any:
        return self._ranks(self._worlds[number]).run(act, number, asked, steps)[0]

    def end(self, number: int, *, kill: bool = False) -> None:
        self._ranks(self._worlds.pop(number)).run(end, number, kill)

    def close(self) -> None:
        for number in list(self._worlds):
            self.end(number, kill=number == self._plain)

    def nodes(self) -> list[Path]:
        return [node for folder in folders(self._store) for node in node_folders(folder)]

    def failures(self, number: int) -> int:
        """Count what could not be loaded from either tier."""
        found = self.stats.get(number, {})
        return sum(found.get(tier, {}).get("failures", 0) for tier in ("host", "disk"))

    def counted(self, number: int, tier: str, what: str) -> int:
        return int(self.stats[number][tier][what])


def document(seed: int, cut: int = DOCUMENT) -> tuple[int, ...]:
    return ids((seed, DOCUMENT))[:cut]


def question(seed: int) -> tuple[int, ...]:
    return ids((100 + seed, 8))
