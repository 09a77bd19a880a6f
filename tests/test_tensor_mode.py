"""Tensor-parallel decode: ranks that share short steps compute what one rank does.

The truth is one rank's logits. Cases of replicated decode are tested in this mode beside it, in
`tests.test_invariance`, `tests.test_short_steps` and `tests.prefix.test_logits`.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import re
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from razor_dist.config.schema import EngineConfig
from razor_dist.engine.build import build_engine
from razor_dist.engine.decode_mode import share_short_steps, why_replicated
from razor_dist.engine.tensor_parallel import is_compact, part_of, why_not
from razor_dist.heads.decision import HeadRoles
from razor_dist.heads.head_map import HeadMap, shipped_head_map
from razor_dist.heads.layout import HeadLayout, HeadShare
from razor_dist.models.loader import load_model
from razor_dist.models.registry import resolve_model
from razor_dist.models.shape import ModelShape
from razor_dist.parallel.comm import Communicator
from razor_dist.protocol.messages import Token
from razor_dist.protocol.step_plan import BatchEntry, Compute, Open
from tests.cases import Case, answer, logits_of, make_runner, model_and_shape, prefill
from tests.engine.test_sources import traced
from tests.logits import GROWING, assert_any_cut, assert_same, split_of, tokens_of
from tests.ranks import Ranks
from tests.tape import CountingTape
from tests.tiny_models import Tiny

CPU = torch.device("cpu")


def scored_beside_an_answer(comm: Communicator, case: Case) -> tuple[Any, torch.Tensor | None]:
    """Log-probabilities of a prompt that is read beside an answer, and logits after both."""
    runner = make_runner(comm, case, 2)
    prefill(runner, 0, case)
    n = len(case.prompt)
    runner.execute(Open(1, end=n, total=n, max_read=n))
    scored = BatchEntry(1, case.prompt[::-1], sharded=True, last=True, prompt_logprobs=2)
    logits = runner.execute(Compute.of([BatchEntry(0, [5]), scored]))
    return runner.prompt_logprobs[1], logits


def test_a_prompt_is_scored_beside_an_answer(ranks: Ranks, tiny: Tiny) -> None:
    path = tiny("llama")
    case = Case(str(path), split_of(path), GROWING, tokens_of(50, seed=3), forced=(5,), tensor=True)
    scores, logits = ranks(1).run(scored_beside_an_answer, case)[0]
    assert scores.shape == (49, 6) and logits.shape[0] == 2
    for world in (2, 4):
        for rank, (found, own) in enumerate(ranks(world).run(scored_beside_an_answer, case)):
            torch.testing.assert_close(found, scores, rtol=1e-4, atol=1e-4)
            if rank == 0:
                torch.testing.assert_close(own, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_nine_heads_on_eight_ranks(ranks: Ranks) -> None:
    path = str(resolve_model("smollm2"))
    split = HeadMap.load(shipped_head_map("smollm2")).retrieval
    tokens = tuple(t + 20 for t in tokens_of(90, seed=7))
    case = Case(path, tuple(map(tuple, split)), GROWING, tokens[:86], tokens[86:])
    want = ranks(1).run(logits_of, case)[0]
    assert_any_cut(ranks, dataclasses.replace(case, tensor=True), want, (8,))


def test_sources_are_those_of_one_rank(ranks: Ranks, tiny: Tiny) -> None:
    path, text = tiny("llama"), tokens_of(103)
    split = ((True, True), (False, True), (True, False), (False, False))
    case = Case(str(path), split, GROWING, text[:100], text[100:], tail=64)
    heads = [(1, 5), (0, 0), (2, 3)]
    want = ranks(1).run(traced, case, heads)[0]
    for world in (2, 8):
        found = ranks(world).run(traced, dataclasses.replace(case, tensor=True), heads)[0]
        for (positions, weights), (of_one, weights_of_one) in zip(found, want, strict=True):
            assert torch.equal(positions, of_one)
            torch.testing.assert_close(weights, weights_of_one, atol=1e-5, rtol=1e-4)


def replayed(comm: Communicator, case: Case) -> Tensor | None:
    """`logits_of` by steps that are recorded and repeated: all answers at once."""
    tape = CountingTape(comm)
    runner = make_runner(comm, case, recorder=tape)
    rows = [prefill(runner, 0, case)]
    rows += [runner.execute(answer((0, token))) for token in case.forced]
    assert runner.graphs is not None and runner.graphs.enabled and tape.replayed > 2
    found = [row for row in rows if row is not None]
    return torch.cat(found) if found else None


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_steps_that_are_recorded(family: str, ranks: Ranks, tiny: Tiny) -> None:
    path, tokens = tiny(family), tokens_of(100)
    case = Case(str(path), split_of(path), GROWING, tokens[:90], tokens[90:])
    want = ranks(1).run(logits_of, case)[0]
    for world in (2, 8):
        shared = dataclasses.replace(case, tensor=True)
        assert_same(ranks(world).run(replayed, shared)[0], want)


def replayed_beside_a_chunk(comm: Communicator, case: Case) -> tuple[list[int], Tensor | None]:
    """Replays in each of some steps that decode beside a chunk; and the decoded tokens' logits."""
    tape = CountingTape(comm)
    runner = make_runner(comm, case, 2, recorder=tape)
    prefill(runner, 0, case)
    n, counts, rows = len(case.prompt), [], []
    runner.execute(Open(1, end=n, total=n, max_read=n))
    for index, token in enumerate(case.forced):
        before, begin = tape.replayed, 8 * index
        chunk = BatchEntry(1, case.prompt[begin : begin + 8], sharded=True, last=False)
        logits = runner.execute(Compute.of([BatchEntry(0, [token]), chunk]))
        counts.append(tape.replayed - before)
        rows += [] if logits is None else [logits[:1]]
    return counts, torch.cat(rows) if rows else None


def test_what_decodes_beside_a_chunk_is_replayed(ranks: Ranks, tiny: Tiny) -> None:
    path, tokens = tiny("llama"), tokens_of(98)
    case = Case(str(path), split_of(path), GROWING, tokens[:90], tokens[90:])
    want = ranks(1).run(logits_of, case)[0][1:]
    shared = dataclasses.replace(case, tensor=True)
    counts, got = ranks(2).run(replayed_beside_a_chunk, shared)[0]
    # Steps are eager where a longer recording is needed.
    assert len(counts) == 8 and sum(counts) >= 5
    assert_same(got, want)


def sent_and_kept(comm: Communicator, case: Case) -> tuple[dict[str, int], int, int]:
    """Return the bytes ten decoded tokens send, the rows of streaming caches, and bytes in use."""
    runner = make_runner(comm, case)
    prefill(runner, 0, case)
    comm.bytes_sent.clear()
    for token in case.forced:
        runner.execute(answer((0, token)))
    sent = {purpose: nbytes for purpose, nbytes in comm.bytes_sent.items() if nbytes}
    return sent, sum(runner.caches.layout.rows), sum(c.used_bytes for c in runner.caches.streaming)


def test_bytes_are_counted_and_streaming_caches_are_shared_out(ranks: Ranks, tiny: Tiny) -> None:
    path, world, steps = tiny("mistral"), 4, 10
    _, shape = model_and_shape(str(path))
    one = ((False,) * 4, (True, False, False, False), (False,) * 4)  # 11 streaming heads
    tokens = tokens_of(110)
    case = Case(str(path), one, GROWING, tokens[:100], tokens[100:], tensor=True)
    hidden, vocabulary = 64 * 4, 192 * 4
    found = ranks(world).run(sent_and_kept, case)
    for sent, _, _ in found:
        reduced = 2 * shape.layers * (2 * hidden * (world - 1) // world)
        logits = (world - 1) * vocabulary // world
        assert sent["tensor"] == steps * (reduced + logits)
        assert sent["merge"] == steps * (world - 1) * shape.group * (16 + 1) * 4
        assert set(sent) == {"tensor", "merge"}
    rows = [rows for _, rows, _ in found]
    assert rows == [3, 3, 3, 2]
    whole = dataclasses.replace(case, tensor=False)
    *_, (_, of_all, nbytes) = ranks(world).run(sent_and_kept, whole)
    assert of_all == sum(rows)
    assert [of_rank for *_, of_rank in found] == [nbytes // 11 * n for n in rows]


def collectives(comm: Communicator, case: Case) -> Counter[tuple[str, str]]:
    """Collectives of one decoded token, by kind and purpose."""
    runner, found = make_runner(comm, case), Counter[tuple[str, str]]()
    prefill(runner, 0, case)
    with ExitStack() as patches:
        for kind in ("all_gather", "all_reduce", "sum", "exchange", "broadcast"):
            original = getattr(comm, kind)

            def counted(*args: Any, of: Any = original, kind: str = kind) -> Any:
                found[kind, args[-1]] += 1
                return of(*args)

            patches.enter_context(mock.patch.object(comm, kind, counted))
        runner.execute(answer((0, 5)))
    return found


def test_a_token_is_three_collectives_a_layer_and_one(ranks: Ranks, tiny: Tiny) -> None:
    """So that GLM's forty layers, all with retrieval heads, are 121."""
    path, world = tiny("mistral"), 2
    _, shape = model_and_shape(str(path))
    some = (True, False, False, False)
    case = Case(str(path), (some,) * shape.layers, GROWING, tokens_of(60), (5,), tensor=True)
    a_layer = {("all_gather", "merge"): 1, ("sum", "tensor"): 2}
    want = Counter({kind: count * shape.layers for kind, count in a_layer.items()})
    want["all_gather", "tensor"] = 1  # the logits
    assert ranks(world).run(collectives, case) == [want] * world
    assert want.total() == 3 * shape.layers + 1
    # Layers without retrieval heads merge nothing.
    none = dataclasses.replace(case, retrieval=((False,) * 4,) * shape.layers)
    assert ranks(world).run(collectives, none)[0].total() == 2 * shape.layers + 1


@given(
    table=st.integers(1, 8).flatmap(
        lambda heads: st.lists(
            st.lists(st.sampled_from(["kept", 5, None]), min_size=heads, max_size=heads),
            min_size=1,
            max_size=6,
        )
    ),
    size=st.integers(2, 9),
    group=st.integers(1, 4),
)
def test_every_head_has_one_rank(table: list[list[Any]], size: int, group: int) -> None:
    retrieval = [[head == "kept" for head in row] for row in table]
    windows = tuple(tuple(None if head == "kept" else head for head in row) for row in table)
    layouts = [
        HeadLayout.from_decision(retrieval, CPU, windows, HeadShare(rank, size, group, True))
        for rank in range(size)
    ]
    for layer, row in enumerate(retrieval):
        shorts = [layout.short[layer] for layout in layouts]
        streaming = [head for short in shorts for head in short.streaming]
        assert sorted(streaming) == [head for head, yes in enumerate(row) if not yes]
        counts = [len(short.streaming) for short in shorts]
        assert max(counts) - min(counts) <= 1
        outputs = [head for short in shorts for head in short.outputs]
        assert sorted(outputs) == list(range(group * len(row)))
        for short in shorts:
            owned = [h * group + g for h in short.streaming for g in range(group)]
            assert short.outputs[len(short.outputs) - len(owned) :] == owned
    for window, by_rank in enumerate(layouts[0].kept):
        assert sorted(itertools.chain(*by_rank)) == list(range(sum(map(len, by_rank))))
        assert [len(rows) for rows in by_rank] == [layout.rows[window] for layout in layouts]


@given(n=st.integers(1, 500), size=st.integers(1, 9))
def test_features_are_dealt_out_whole(n: int, size: int) -> None:
    parts = [part_of(n, rank, size) for rank in range(size)]
    assert [i for begin, end in parts for i in range(begin, end)] == list(range(n))


def test_models_without_a_plan_are_not_shared_and_the_reason_is_told(
    tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model(tiny("bloom"), device=CPU, dtype=torch.float32)
    assert why_not(model) == "transformers has no tensor-parallel plan for bloom"
    shape, comm = ModelShape.from_config(model.config), Communicator(None)
    comm.size = 2
    retrieval = [[True] * shape.kv_heads] * shape.layers
    config = EngineConfig(decode="tensor", world_size=2)
    with caplog.at_level(logging.WARNING):
        mode = share_short_steps(config, model, shape, HeadRoles(retrieval), comm)
    assert mode.tensor is None and mode.layout.share is None
    assert mode.reason == "transformers has no tensor-parallel plan for bloom"
    assert "every rank computes all of a short step: transformers has no" in caplog.text
    model = load_model(tiny("llama"), device=CPU, dtype=torch.float32)
    assert why_replicated(config, model) is None
    for name, value in (
        ("weights", "zero3"), ("prefix_host_gb", 1.0), ("weight_dtype", "int8"),
    ):  # fmt: skip
        given: dict[str, Any] = {name: value}
        reason = why_replicated(EngineConfig(world_size=2, **given), model)
        assert reason is not None and name in reason
        of_it = ModelShape.from_config(model.config)
        heads = [[True] * of_it.kv_heads] * of_it.layers
        chosen = EngineConfig(world_size=2, **given)
        assert chosen.decode == "auto"
        mode = share_short_steps(chosen, model, of_it, HeadRoles(heads), comm)
        assert (mode.tensor, mode.reason) == (None, reason)
    mixtral, phi3 = (
        load_model(tiny(name), device=CPU, dtype=torch.float32) for name in ("mixtral", "phi3")
    )
    assert why_not(mixtral) is None and is_compact(mixtral)
    assert why_not(phi3) is None and not is_compact(phi3)


def decode_of(comm: Communicator, path: str, decode: str | None) -> tuple[str, str, str, list[int]]:
    """Return an engine's decode mode, as it says twice, why, and its answer to a prompt."""
    from razor_dist.engine.worker import follow
    from razor_dist.protocol.sampling_params import SamplingParams

    given: dict[str, Any] = {} if decode is None else {"decode": decode}
    config = EngineConfig(
        model=path,
        attention="streaming",
        world_size=comm.size,
        max_model_len=200,
        max_num_seqs=2,
        window_min=20,
        block=8,
        **given,
    )
    engine = build_engine(config, comm, CPU)
    if comm.rank:
        follow(engine)
        return engine.info.decode, "", engine.info.decode_reason, []
    core, tokens = engine.core, []
    core.add("a", list(range(3, 150)), SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    while core.has_work:
        tokens += [event.token for event in core.step() if isinstance(event, Token)]
    said = core.stats().decode
    core.stop()
    return engine.info.decode, said, engine.info.decode_reason, tokens


def test_the_setting_and_the_measurement_choose_for_all_ranks(ranks: Ranks, tiny: Tiny) -> None:
    path = str(tiny("llama"))
    *_, why, want = ranks(1).run(decode_of, path, "tensor")[0]
    assert why == "one rank"
    for decode in ("tensor", None, "replicated"):
        found = ranks(2).run(decode_of, path, decode)
        modes = {mode for mode, *_ in found}
        assert len(modes) == 1 and found[0][1] in modes
        _, _, why, tokens = found[0]
        assert tokens == want
        if decode is not None:
            assert (modes, why) == ({decode}, "by the settings")
            continue
        times = re.fullmatch(
            r"one token's weights take ([\d.]+) ms where the ranks share them, and ([\d.]+) where "
            r"each reads all", why,
        )  # fmt: skip
        assert times
        shared, alone = map(float, times.groups())
        if shared < 1.3 * alone:
            assert modes == {"tensor"}
        elif shared > 1.5 * alone:
            assert modes == {"replicated"}
