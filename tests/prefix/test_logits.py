"""The prefix cache's claim: after any hit, logits are those of a fresh read.

Texts branch off earlier ones wherever their caches can be cut. Everything is checked on the ranks
here; what rank 0 looks up, admits and evicts is in tests/prefix/test_answers.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from razor_dist.cache.policy import StreamingPolicy
from razor_dist.kernels.quantized import INT4, INT8
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.zigzag import chunks
from razor_dist.protocol.step_plan import BatchEntry, Cache, Close, Compute, Fork, Open
from tests.cases import Case, logits_of, make_runner
from tests.logits import TOLERANCE, split_of, tokens_of
from tests.ranks import Ranks
from tests.tiny_models import Tiny

GROWING = StreamingPolicy(window_min=8, window_ratio=4, window_max=30, sinks=3, block=4)


@dataclass(frozen=True)
class Text:
    """A text that branches off an earlier one, or is the first; numbers are of its own tokens."""

    source: int  # index of the text whose caches it is forked from; -1 for the first
    place: float  # of the cut, from the least possible (0) to the source's end (1)
    chunked: int  # tokens that are read in chunks of ``cut`` tokens
    cut: int
    piece: int  # tokens that are then read in one short step
    decoded: int  # and one by one
    reserved: int = 3  # tokens more than these

    @property
    def tokens(self) -> int:
        return self.chunked + self.piece + self.decoded


def branched(
    comm: Communicator, case: Case, texts: tuple[Text, ...]
) -> list[tuple[list[int], Tensor | None]]:
    """Read all texts; each one's tokens, those of its source included, and its last logits."""
    runner = make_runner(comm, dataclasses.replace(case, prompt=(0,) * 700), len(texts) + 1)
    arenas = [cache.arena for cache in runner.caches.streaming]
    read: list[list[int]] = []
    tails: list[list[int]] = []
    found = []
    for key, text in enumerate(texts):
        new = list(tokens_of(text.tokens, seed=key))
        before: list[int] = []
        begins = [0] * len(arenas)
        if text.source >= 0:
            before, begins = read[text.source], tails[text.source]
            pairs = zip(arenas, begins, strict=True)
            least = max([arena.least_cut(len(before), at) for arena, at in pairs], default=0)
            before = before[: least + round(text.place * (len(before) - least))]
        begin = len(before)
        end, total = begin + text.chunked, begin + text.tokens + text.reserved
        if text.source >= 0:
            runner.execute(Fork(key, begin, end, total, text.source))
        else:
            runner.execute(Open(key, end, total, max_read=690))
        logits = None
        for chunk in chunks(begin, end, text.cut, comm.size) if text.chunked else ():
            ids = torch.tensor(new[chunk.begin - begin : chunk.end - begin])
            piece = BatchEntry(key, ids, sharded=True, last=chunk.end == end)
            logits = runner.execute(Compute.of([piece]))
        rest = new[text.chunked :]
        for ids in (rest[: text.piece], *([token] for token in rest[text.piece :])):
            if ids:
                logits = runner.execute(Compute.of([BatchEntry(key, torch.tensor(ids))]))
        runner.execute(Cache(key))
        read.append(before + new)
        pairs = zip(arenas, begins, strict=True)
        tails.append([arena.tail_begin(begin + text.tokens, at) for arena, at in pairs])
        found.append((read[-1], None if logits is None else logits.clone()))
    assert runner.sequences.kv_bytes == 0
    assert runner.sequences.cached_bytes > 0
    for key in range(len(texts)):
        runner.execute(Close(key))
    pages = runner.caches.pages
    assert pages.free_pages == pages.num_pages and runner.sequences.cached_bytes == 0
    return found


@st.composite
def histories(draw: st.DrawFn) -> tuple[Text, ...]:
    texts: list[Text] = []
    for index in range(draw(st.integers(2, 5))):
        first = index == 0
        texts.append(
            Text(
                source=-1 if first else draw(st.integers(0, index - 1)),
                place=0.0 if first else draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
                chunked=draw(st.integers(40, 90) if first else st.integers(0, 60)),
                cut=draw(st.sampled_from([400, 16, 33])),
                piece=draw(st.sampled_from([0, 2, 5, 30])),
                decoded=draw(st.integers(1, 14)),
                reserved=draw(st.sampled_from([3, 150])),
            )
        )
    return tuple(texts)


def assert_as_fresh(
    ranks: Ranks, world: int, case: Case, texts: tuple[Text, ...], tolerance: float = TOLERANCE
) -> None:
    for tokens, got in ranks(world).run(branched, case, texts)[0]:
        fresh = dataclasses.replace(case, prompt=tuple(tokens), tail=0)
        want = ranks(1).run(logits_of, fresh)[0]
        error = (got[-1:] - want).abs().max() / want.abs().max()
        assert error <= tolerance, f"relative error {error:.2e} at {len(tokens)} tokens"


@pytest.mark.long
@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    texts=histories(),
    tail=st.sampled_from([0, 3, 16, 50]),
    ratio=st.sampled_from([None, 3, 6]),
    block=st.sampled_from([1, 4, 16]),
    sinks=st.integers(0, 4),
    compensation=st.booleans(),
    world=st.sampled_from([1, 2, 4]),
)
def test_a_branch_anywhere_is_a_fresh_read(
    texts: tuple[Text, ...],
    tail: int,
    ratio: int | None,
    block: int,
    sinks: int,
    compensation: bool,
    world: int,
    ranks: Ranks,
    tiny: Tiny,
) -> None:
    policy = StreamingPolicy(
        window_min=8,
        window_ratio=ratio,
        window_max=30,
        sinks=sinks,
        block=block,
        compensation=compensation,
    )
    path = tiny("llama")
    case = Case(str(path), split_of(path), policy, (), page_size=4, tail=tail)
    assert_as_fresh(ranks, world, case, texts)


# A document in chunks and its answer; a question cut into the answer, one cut before the document's
# end, and one that goes on after that one's answer. Then one that is read in a chunk so long that
# not its queries travel, but the keys before it, as many as the ranks have of what it shares; and
# one cut as far before that chunk's end as the tail allows that was stored there.
TEXTS = (
    Text(-1, 0.0, 90, 33, 5, 12),
    Text(0, 0.9, 0, 1, 20, 6),
    Text(0, 0.0, 40, 16, 0, 9),
    Text(2, 0.5, 0, 1, 1, 5),
    Text(0, 0.0, 100, 400, 0, 0),
    Text(4, 0.0, 0, 1, 0, 1),
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "settings", "worlds"),
    [
        # Every other streaming head has a window of its own, without sinks.
        ("bloom", {"windows": ((11, None) * 4,) * 3}, (1, 2, 4)),
        ("phi3", {}, (1, 2, 4)),
        ("qwen2", {"kv_dtype": torch.bfloat16}, (1, 2, 4)),
        ("qwen2", {"kv_dtype": INT8}, (1, 2, 4)),
        ("qwen2", {"kv_dtype": INT4}, (1, 2, 4)),
        ("llama", {"tensor": True}, (3, 8)),
    ],
    ids=["bloom", "phi3", "bf16", "int8", "int4", "tensor"],
)
def test_branches_of_other_models_and_dtypes(
    family: str, settings: dict[str, Any], worlds: tuple[int, ...], ranks: Ranks, tiny: Tiny
) -> None:
    path = tiny(family)
    case = Case(str(path), split_of(path), GROWING, (), page_size=4, tail=20, **settings)
    for world in worlds:
        assert_as_fresh(ranks, world, case, TEXTS)
