"""Steps of many: logits depend neither on what shared the step nor on how a prompt was cut."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from razor_dist.attention import decode
from razor_dist.attention.step import Step
from razor_dist.cache.caches import Caches
from razor_dist.cache.pages import PagePool
from razor_dist.engine import runner
from razor_dist.engine.prepare import Preparation
from razor_dist.kernels import decode_torch
from razor_dist.kernels.quantized import INT4, INT8
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.sharding import is_even
from razor_dist.parallel.zigzag import Chunk
from razor_dist.protocol.step_plan import BatchEntry, Close, Compute, Open
from tests.cases import Case, logits_of, make_runner
from tests.logits import GROWING, TOLERANCE, assert_same, split_of, tokens_of
from tests.ranks import Ranks
from tests.test_invariance import policies
from tests.tiny_models import Tiny


@dataclass(frozen=True)
class Company:
    """Several texts that are read together."""

    case: Case  # of which prompt and forced tokens are not used
    texts: tuple[tuple[int, ...], ...]
    chunks: tuple[int, ...]  # tokens of each that are read in chunks
    steps: tuple[tuple[int, ...], ...]  # tokens that each step reads of each text, or chunk's least
    # Of a prompt's chunks, two of three are computed by all ranks.
    mixed: bool = False

    def entries(self, world: int = 1) -> Iterator[list[BatchEntry]]:
        """Yield each step's pieces; chunks are of whole shards but for the last."""
        read = [0] * len(self.texts)
        for step in self.steps:
            found = []
            for key, (text, tokens, chunks) in enumerate(
                zip(self.texts, step, self.chunks, strict=True)
            ):
                begin, sharded = read[key], read[key] < chunks
                whole = -(-tokens // (2 * world)) * 2 * world
                end = min(begin + whole, chunks) if sharded else min(begin + tokens, len(text))
                last = self.mixed or end >= chunks
                if self.mixed and sharded and end > begin and is_even(Chunk(begin, end, world)):
                    sharded = (begin // (2 * world)) % 3 == 0
                if end > begin:
                    found.append(BatchEntry(key, text[begin:end], sharded, last=last))
                read[key] = end
            if found:
                yield Compute.of(found).entries


def together(comm: Communicator, company: Company) -> tuple[dict[tuple[int, int], Tensor], int]:
    """Rank 0's logits by text and tokens read of it; and the bytes that its merges sent."""
    longest = max(company.texts, key=len)
    made = make_runner(comm, dataclasses.replace(company.case, prompt=longest), 4)
    for key, (text, end) in enumerate(zip(company.texts, company.chunks, strict=True)):
        made.execute(Open(key, end=end, total=len(text), max_read=len(text)))
    comm.bytes_sent.clear()
    found: dict[tuple[int, int], Tensor] = {}
    read = [0] * len(company.texts)
    for entries in company.entries(comm.size):
        logits = made.execute(Compute.of(entries))
        for entry in entries:
            read[entry.sequence] += len(entry.tokens)
        if logits is not None:
            keys = [entry.sequence for entry in entries if entry.samples]
            found |= {(k, read[k]): row.clone() for k, row in zip(keys, logits, strict=True)}
    for key in range(len(company.texts)):
        made.execute(Close(key))
    assert made.sequences.kv_bytes == 0
    return found, comm.bytes_sent["merge"]


def without_a_compiler(comm: Communicator, company: Company) -> object:
    with mock.patch.object(decode, "implementation", return_value=decode_torch):
        return together(comm, company)


def with_one_compiler(comm: Communicator, company: Company) -> object:
    """`together`, where rank 1 alone has compiled kernels."""
    return (together if comm.rank == 1 else without_a_compiler)(comm, company)


def as_prepared(comm: Communicator, company: Company) -> object:
    """`together`, where a pass must leave its step and all sequences as they were prepared."""
    prepare, commit = Preparation.step, runner.commit
    seen = ""

    def prepared(self: Preparation, entries: Any, sequences: Any) -> Step:
        nonlocal seen
        step = prepare(self, entries, sequences)
        seen = repr((step, sequences))
        return step

    def committed(rank: int, caches: Caches, step: Step, sequences: Any) -> None:
        assert repr((step, sequences)) == seen
        commit(rank, caches, step, sequences)

    with (
        mock.patch.object(Preparation, "step", prepared),
        mock.patch.object(runner, "commit", committed),
    ):
        return together(comm, company)


@functools.cache
def alone(
    case: Case, texts: tuple[tuple[int, ...], ...], ends: tuple[int, ...], ranks: Ranks
) -> list[Tensor]:
    """One rank's logits of each text by itself; the tokens behind its end are forced."""
    cases = (
        dataclasses.replace(case, prompt=text[:end], forced=text[end:])
        for text, end in zip(texts, ends, strict=True)
    )
    return [ranks(1).run(logits_of, one)[0] for one in cases]


def assert_same_as_alone(
    company: Company,
    ranks: Ranks,
    *worlds: int,
    tolerance: float = TOLERANCE,
    how: Callable[..., object] = together,
) -> None:
    ends = [1] * len(company.texts)
    if company.case.exact:  # which sees the prompt otherwise than what comes after it
        entries = [entry for step in company.entries() for entry in step]
        for index, chunks in enumerate(company.chunks):
            first = next(len(entry.tokens) for entry in entries if entry.sequence == index)
            ends[index] = chunks or first
    # One rank has no other to share tensors with.
    case = dataclasses.replace(company.case, tensor=False)
    wanted = alone(case, company.texts, tuple(ends), ranks)
    for world in worlds:
        found, _ = ranks(world).run(how, company)[0]
        assert found
        for (key, read), row in found.items():
            want = wanted[key][read - ends[key]]
            assert (row - want).abs().max() <= tolerance * want.abs().max(), (key, read)


def texts_of(*lengths: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tokens_of(n, seed) for seed, n in enumerate(lengths))


# A prompt in two chunks and its answer, one in a chunk beside the second and its answer, a short
# prompt that continues twice, one that begins with a single token; windows move in all of them.
STEPS = (
    (64, 0, 9, 1),
    (60, 60, 0, 1),
    (1, 1, 40, 1),
    (1, 1, 1, 30),
    (1, 1, 1, 1),
    (7, 33, 1, 1),
    (1, 1, 60, 1),
)
TEXTS = texts_of(140, 99, 115, 40)
CHUNKS = (120, 60, 0, 0)


@pytest.mark.parametrize(
    ("family", "tensor", "worlds"),
    [
        ("llama", False, (1, 2, 4, 8)),
        ("llama", True, (2, 3, 8)),
        ("qwen3_moe", True, (4, 8)),
        *(
            pytest.param(family, tensor, worlds, marks=pytest.mark.long)
            for tensor, worlds, families in (
                (False, (2, 8), ("qwen2", "mistral", "glm", "phi3")),
                (False, (1, 4), ("bloom", "mpt", "baichuan")),
                (True, (2, 3, 8), ("phi3",)),
                (True, (4, 8), ("llama2", "llama3", "qwen2", "qwen3", "mistral", "mixtral")),
                (True, (4, 8), ("glm_1m", "glm4", "cohere")),
            )
            for family in families
        ),
    ],
)
def test_a_step_that_is_shared_changes_nothing(
    family: str, tensor: bool, worlds: tuple[int, ...], ranks: Ranks, tiny: Tiny
) -> None:
    path = tiny(family)
    case = Case(str(path), split_of(path), GROWING, (), tensor=tensor)
    assert_same_as_alone(Company(case, TEXTS, CHUNKS, STEPS), ranks, *worlds)


# Where keys are the same bits however a text is read, so that all are rounded alike.
FIRST_LAYER = ((True, True), *((False, False),) * 3)
OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "exact": {"exact": True},
    "bfloat16": {"kv_dtype": torch.bfloat16},
    "exact, int8": {"exact": True, "kv_dtype": INT8, "retrieval": FIRST_LAYER},
    "int4": {"kv_dtype": INT4, "retrieval": FIRST_LAYER},
    "tensor, exact": {"tensor": True, "exact": True},
    "tensor, bfloat16": {"tensor": True, "kv_dtype": torch.bfloat16},
    "tensor, int8": {"tensor": True, "kv_dtype": INT8, "retrieval": FIRST_LAYER},
    "tensor, int4": {"tensor": True, "kv_dtype": INT4, "retrieval": FIRST_LAYER},
    "tensor, windows": {"tensor": True, "windows": ((9, None), (None, 9)) * 2},
}


@pytest.mark.long
@pytest.mark.parametrize("settings", OTHER_SETTINGS.values(), ids=OTHER_SETTINGS)
def test_with_other_settings(settings: dict[str, Any], ranks: Ranks, tiny: Tiny) -> None:
    path = tiny("llama")
    case = dataclasses.replace(Case(str(path), split_of(path, 3), GROWING, ()), **settings)
    # A key on the edge between two numbers of bfloat16, 4e-3 apart, may be rounded either way.
    tolerance = 1e-3 if "kv_dtype" in settings else TOLERANCE
    worlds = (2, 8) if case.tensor else (1, 2, 8)
    company = Company(case, TEXTS, CHUNKS, STEPS)
    assert_same_as_alone(company, ranks, *worlds, tolerance=tolerance)


@pytest.mark.parametrize(
    ("family", "how", "worlds"),
    [
        ("llama", without_a_compiler, (1, 3)),
        ("llama", with_one_compiler, (3,)),
        ("llama", as_prepared, (2,)),
        *((family, with_one_compiler, (2,)) for family in ("qwen3", "bloom", "mpt")),
    ],
)
def test_ways_of_computing_answers_change_nothing(
    family: str, how: Callable[..., object], worlds: tuple[int, ...], ranks: Ranks, tiny: Tiny
) -> None:
    path = tiny(family)
    case = Case(str(path), split_of(path), GROWING, ())
    assert_same_as_alone(Company(case, TEXTS, CHUNKS, STEPS), ranks, *worlds, how=how)


@pytest.mark.long
@pytest.mark.parametrize("tensor", [False, True])
def test_a_prompt_is_read_by_turns_in_chunks_and_by_all_ranks(
    tensor: bool, ranks: Ranks, tiny: Tiny
) -> None:
    path = tiny("llama")
    case = Case(str(path), split_of(path), GROWING, (), tail=8, tensor=tensor)
    steps = ((16, 0, 9, 1), (16, 16, 1, 1)) * 5
    company = Company(case, TEXTS, (138, 97, 0, 0), (*steps, *STEPS), mixed=True)
    assert_same_as_alone(company, ranks, 2, 4, how=as_prepared)


def test_prompts_that_begin_in_a_short_step_send_nothing(ranks: Ranks, tiny: Tiny) -> None:
    path = tiny("llama")
    case = Case(str(path), split_of(path), GROWING, ())
    begins = Company(case, texts_of(50, 30), (0, 0), ((50, 30),))
    assert all(sent == 0 for _, sent in ranks(4).run(together, begins))
    goes_on = dataclasses.replace(begins, steps=((20, 30), (30, 0)))
    assert all(sent > 0 for _, sent in ranks(4).run(together, goes_on))


@st.composite
def companies(draw: st.DrawFn) -> tuple[int, Company]:
    policy = draw(policies())
    lengths = draw(st.lists(st.integers(1, 70), min_size=1, max_size=4))
    texts = texts_of(*lengths)
    chunks = tuple(draw(st.just(0) | st.integers(0, n - 1)) for n in lengths)
    tokens = st.sampled_from([0, 1, 1, 2, 5, 17, 64])
    steps = tuple(tuple(draw(tokens) for _ in lengths) for _ in range(draw(st.integers(1, 5))))
    rest = (*steps, (70,) * len(lengths), (70,) * len(lengths))
    case = Case("", (), policy, (), exact=draw(st.booleans()), page_size=3)
    mixed = not case.exact and draw(st.booleans())
    return draw(st.sampled_from([1, 2, 3, 8])), Company(case, texts, chunks, rest, mixed)


@pytest.mark.long
@pytest.mark.parametrize("tensor", [False, True])
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(drawn=companies())
def test_any_company(tensor: bool, drawn: tuple[int, Company], ranks: Ranks, tiny: Tiny) -> None:
    world, company = drawn
    path = tiny("llama")
    split = split_of(path, world)
    case = dataclasses.replace(company.case, model=str(path), retrieval=split, tensor=tensor)
    assert_same_as_alone(dataclasses.replace(company, case=case), ranks, world)


def test_a_fragmented_pool_is_read_in_few_parts(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages in any order give the same logits, and no call each."""
    path = tiny("llama")
    text = tokens_of(900)
    case = Case(str(path), split_of(path), GROWING, text[:880], text[880:], page_size=4)
    want = logits_of(Communicator(None), case)
    taken = PagePool._take
    found: list[int] = []

    def scattered(pool: PagePool, need: int) -> list[int]:
        pages = taken(pool, need)
        order = torch.randperm(len(pages), generator=torch.manual_seed(0)).tolist()
        return [pages[i] for i in order]

    spans = PagePool.spans

    def counted(pool: PagePool, table: object, begin: int, end: int) -> list[object]:
        parts = spans(pool, table, begin, end)
        found.append(len(parts))
        return list(parts)

    monkeypatch.setattr(PagePool, "_take", scattered)
    monkeypatch.setattr(PagePool, "spans", counted)
    for cut in (8192, 200):
        scattered_case = dataclasses.replace(case, chunked_prefill_size=cut)
        got = logits_of(Communicator(None), scattered_case)
        assert got is not None and want is not None
        assert_same(got, want)
    assert max(found) == 1  # of 225 pages
