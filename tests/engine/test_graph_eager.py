"""Decode steps that cannot be recorded stay eager on every rank; and what a tape records."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from razor_dist.config.schema import EngineConfig
from razor_dist.engine.graph import CudaRecorder, recorder_of
from razor_dist.engine.tape import StepFunction, Tape
from razor_dist.parallel.comm import Communicator
from tests.cases import Case, answer, prefill
from tests.engine.recorded import Both, case_of, make_pair
from tests.logits import tokens_of
from tests.ranks import Ranks
from tests.tape import CountingTape
from tests.test_kernels_linear import needs_compiler
from tests.tiny_models import Tiny


class Broken(CountingTape):
    """A tape that fails as it warms up, records or replays, or whose replays are wrong."""

    def __init__(self, comm: Communicator, how: str) -> None:
        super().__init__(comm)
        self.how = how

    def warm_up(self, step: StepFunction) -> None:
        if self.how == "warms up":
            raise RuntimeError("out of memory")
        super().warm_up(step)

    def record(self, step: StepFunction) -> StepFunction:
        if self.how == "raises":
            raise RuntimeError("operation not permitted when stream is capturing")
        replay = super().record(step)
        wrong = {"differs": 0.1, "nan": math.nan}.get(self.how, 0.0)
        found: list[tuple[Tensor, ...]] = []

        def broken() -> tuple[Tensor, ...]:
            if self.how == "replays":
                raise RuntimeError("out of memory")
            logits, tokens = replay()
            logits = logits + wrong
            if self.how == "rounds":  # to the next number
                logits = logits.nextafter(torch.tensor(math.inf))
            found.append((logits, tokens + (self.how == "chooses")))
            return found[0] if self.how == "frozen" else found[-1]

        return broken


def broken(comm: Communicator, case: Case, how: tuple[str, ...]) -> tuple[float, bool, str, int]:
    """Return the logits' largest error, if graphs are still used, the log, and all recordings."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("razor_dist.engine.graph")
    logger.addHandler(handler)
    tape = Broken(comm, how[comm.rank])
    eager, graphs = make_pair(comm, case, tape)
    error = 0.0
    for runner in (eager, graphs):
        prefill(runner, 0, dataclasses.replace(case, prompt=tokens_of(41, 0)))
    for token in range(10, 20):
        plan = answer((0, token))
        want, got = eager.execute(plan), graphs.execute(plan)
        if want is not None and got is not None:
            error = max(error, ((want - got).abs().max() / want.abs().max()).item())
    logger.removeHandler(handler)
    assert graphs.graphs is not None
    return error, graphs.graphs.enabled, "\n".join(records), tape.recorded


@needs_compiler
@pytest.mark.parametrize(
    ("how", "words"),
    [
        (("warms up",), ["RuntimeError: out of memory"]),
        (("raises",), ["RuntimeError: operation not permitted"]),
        (("replays",), ["RuntimeError: out of memory"]),
        (("differs",), ["differ from the eager step's by"]),
        (("rounds",), ["differ from the eager step's by"]),
        (("rounds", ""), ["differ from", "another rank"]),
        (("nan",), ["differ from the eager step's by nan"]),
        (("frozen",), ["differ from the eager step's by"]),
        (("chooses",), ["other tokens than the eager step"]),
        (("", "raises"), ["another rank", "RuntimeError: operation not permitted"]),
        (("differs", ""), ["differ from", "another rank"]),
    ],
)
def test_what_cannot_be_recorded_stays_eager_on_every_rank(
    how: tuple[str, ...], words: list[str], ranks: Ranks, tiny: Tiny
) -> None:
    answers = ranks(len(how)).run(broken, case_of(tiny("llama")), how)
    for (error, enabled, logged, recorded), expected in zip(answers, words, strict=True):
        assert error <= 1e-5
        assert not enabled
        assert logged.count("decode steps are not recorded from here on") == 1
        assert expected in logged
        assert recorded <= 1


def raised(comm: Communicator, case: Case, how: str) -> str:
    """The error of the second decode step, which is recorded."""
    _, runner = make_pair(comm, case, Broken(comm, how))
    prefill(runner, 0, dataclasses.replace(case, prompt=tokens_of(41, 0)))
    runner.execute(answer((0, 10)))
    with pytest.raises(RuntimeError) as error:
        runner.execute(answer((0, 11)))
    return str(error.value)


@needs_compiler
@pytest.mark.parametrize("how", ["warms up", "replays"])
def test_a_rank_that_fails_in_the_midst_of_collectives_ends(
    how: str, ranks: Ranks, tiny: Tiny
) -> None:
    """Another rank would wait for it there until the time-out, or on a GPU without end."""
    assert ranks(2).run(raised, case_of(tiny("llama")), how) == ["out of memory"] * 2


def test_a_pool_of_graphs_is_left_once_torch_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: dict[int, weakref.WeakSet[object]] = {}

    class Graph:
        pass

    @contextmanager
    def capture(graph: object, pool: int, **_: object) -> Iterator[None]:
        """Refuse a pool that is known and has no graph, as torch does."""
        assert pools.get(pool) != weakref.WeakSet(), "use_count > 0 INTERNAL ASSERT FAILED"
        of_pool = pools.setdefault(pool, weakref.WeakSet())
        yield
        of_pool.add(graph)

    for name in ("Stream", "current_stream", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, mock.Mock())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", itertools.count().__next__)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    recorder = CudaRecorder(torch.device("cuda"))
    kept = [recorder.record(lambda: ()) for _ in range(2)]
    assert len(pools) == 1
    kept.clear()
    with pytest.raises(ZeroDivisionError):
        recorder.record(lambda: (torch.zeros(1 // 0),))
    kept = [recorder.record(lambda: ()) for _ in range(2)]
    assert [len(graphs) for graphs in pools.values()] == [0, 0, 2]


@needs_compiler
@pytest.mark.parametrize(("noise", "enabled"), [(0.03, True), (0.003, False)])
def test_a_replay_may_differ_as_two_eager_steps_do(noise: float, enabled: bool, tiny: Tiny) -> None:
    """Ranks that add up in a changing order make two eager steps differ; here added noise does."""
    case = case_of(tiny("llama"))
    _, runner = make_pair(Communicator(None), case, CountingTape(Communicator(None)))
    graphs = runner.graphs
    assert graphs is not None
    # Eagerly when first seen; then eagerly, again, to warm up, and what is recorded.
    forward, added = graphs._forward, iter([0.0, 0.0, noise, 0.0, 0.01, 0.0])

    def noisy(*given: Any) -> tuple[Tensor, Tensor]:
        logits, tokens = forward(*given)
        return logits + next(added), tokens

    graphs._forward = noisy
    prefill(runner, 0, dataclasses.replace(case, prompt=tokens_of(41, 0)))
    for token in range(10, 14):
        runner.execute(answer((0, token)))
        if not graphs.enabled:
            break
    assert graphs.enabled == enabled


def with_nan(comm: Communicator, case: Case) -> tuple[list[int], bool, float]:
    """Decode beside a sequence of NaN, and that alone; return how many steps were compared."""
    both = Both(comm, case)
    for key in (0, 1):
        both.open(key, 41)
    pool, compared = both.graphs.caches.pages, []
    for page in both.graphs.sequences[1].table.pages:
        pool.k[:, page * pool.page_size : (page + 1) * pool.page_size] = math.nan
    for keys in ((0, 1), (0, 1), (1,), (1,), (1,), (0,), (0,), (0,)):
        both.decode(*keys)
        compared.append(both.compared)
    assert both.graphs.graphs is not None
    return compared, both.graphs.graphs.enabled, both.errors[-1] if both.errors else 0.0


@needs_compiler
@pytest.mark.parametrize("world", [1, 2])
def test_a_sequence_of_nan_ends_no_recordings(world: int, ranks: Ranks, tiny: Tiny) -> None:
    """The other sequences' logits are compared; without any, the step does not count."""
    for found, enabled, error in ranks(world).run(with_nan, case_of(tiny("llama"))):
        assert found == [0, 1, 1, 1, 1, 2, 3, 3]
        assert enabled and error <= 1e-5


def of_one_rank(comm: Communicator) -> bool:
    there = mock.patch("razor_dist.engine.graph.available", return_value=comm.rank == 0)
    with there:
        return recorder_of(EngineConfig(), comm, torch.device("cpu")) is not None


def test_ranks_record_if_all_of_them_can(ranks: Ranks) -> None:
    assert ranks(2).run(of_one_rank) == [False, False]


def recorder_for(comm: Communicator, device: str, kernels: bool = True) -> tuple[bool, list[str]]:
    there = mock.patch("razor_dist.engine.graph.available", return_value=kernels)
    with there, mock.patch("razor_dist.engine.graph.log.info") as info:
        found = recorder_of(EngineConfig(), comm, torch.device(device)) is not None
    return found, [call.args[0] % call.args[1:] for call in info.call_args_list]


def test_nothing_is_recorded_without_kernels_or_in_graphs_over_gloo(ranks: Ranks) -> None:
    assert recorder_for(Communicator(None), "cpu") == (True, [])
    assert recorder_for(Communicator(None), "cpu", kernels=False) == (False, [])
    assert recorder_for(Communicator(None), "cuda", kernels=False) == (False, [])
    words = "decode runs without CUDA graphs: they cannot hold collectives of gloo"
    assert ranks(2).run(recorder_for, "cuda") == [(False, [words])] * 2


@needs_compiler
def test_the_tape_refuses_what_a_capture_refuses() -> None:
    x = torch.ones(3)
    for step in (
        lambda: x[x > 0],
        lambda: x[torch.tensor([1, 0, 1], dtype=torch.uint8)],
        lambda: x * x.sum().item(),
        lambda: x + torch.tensor(1.0),
        lambda: x + x.long().tolist()[0],
        lambda: x + x.numpy()[0],
        lambda: x.repeat_interleave(x.long()),
        lambda: x.long().bincount(),
    ):
        with pytest.raises((RuntimeError, AssertionError)), torch.inference_mode():
            Tape(Communicator(None)).record(step)


@needs_compiler
def test_the_tape_repeats_operations_of_every_kind() -> None:
    """Operations that write to given memory, that must be copied there, in place; and views."""
    x, index, state = torch.arange(6.0), torch.tensor([4, 1]), torch.zeros(2)
    run = []

    def step() -> tuple[Tensor]:
        run.append(1)
        values, places = x.view(2, 3).max(1)  # no form of it writes to both
        picked = x[index]
        state.add_(picked)
        return (torch.cat([values * 2, places.float(), picked.reshape(-1), state, x[:1]]),)

    def wanted() -> Tensor:
        values, places = x.view(2, 3).max(1)
        return torch.cat([values * 2, places.float(), x[index], state + x[index], x[:1]])

    tape = Tape(Communicator(None))
    with torch.inference_mode():
        replay = tape.record(step)
        torch.testing.assert_close(state, x[index])  # recorded once, and not run again
        for number in range(3):
            x.copy_(torch.randn(6, generator=torch.Generator().manual_seed(number)))
            index.copy_(torch.tensor([number, 5 - number]))
            want = wanted()
            torch.testing.assert_close(replay()[0], want, rtol=0, atol=0)
    assert len(run) == 1
