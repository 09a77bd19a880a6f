"""Shared memory against gloo: the same bytes arrive, and a lost rank is noticed."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from razor_dist.parallel.comm import Communicator, Pending
from razor_dist.parallel.segment import own_files
from razor_dist.parallel.shared_memory import SharedMemory, connect
from tests.ranks import RankPool, Ranks

# Bytes around one place, and several places, of a channel and of the boards.
SIZES = [0, 1, 7, 4096, (256 << 10) - 1, (256 << 10) + 1, 512 << 10, (1 << 20) + 12, 3 << 20]
DTYPES = [torch.float32, torch.bfloat16, torch.int64]


# Small whole numbers, whose sums are exact in bf16, so that their order does not matter.
def numbers(seed: int, nbytes: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-50, 50, (nbytes // dtype.itemsize,), generator=generator).to(dtype)


def communicate(comm: Communicator, seed: int) -> list[Tensor]:
    """Make the same random transfers on all ranks, waiting in each rank's own order."""
    draw, order = random.Random(seed), random.Random(seed + comm.rank)
    pending: list[Pending] = []
    results: list[Tensor] = []
    for number in range(12):
        nbytes, dtype = draw.choice(SIZES), draw.choice(DTYPES)
        mine = numbers(100 * number + comm.rank, nbytes, dtype)
        match draw.choice(["shift", "exchange", "gather", "reduce", "sum", "broadcast"]):
            case "shift":
                offset = draw.randrange(1, comm.size)
                pending.append(comm.shift(mine, torch.empty_like(mine), offset, "ring"))
            case "exchange":
                others = [rank for rank in range(comm.size) if rank != comm.rank]
                buffers = [(rank, torch.empty_like(mine)) for rank in others]
                pending.append(comm.exchange([(rank, mine) for rank in others], buffers, "halo"))
            case "gather":
                results.append(comm.all_gather(mine, "merge"))
            case "reduce":
                pending.append(comm.all_reduce(mine, "compensation"))
            case "sum":
                results.append(comm.sum(mine, "tensor"))
            case "broadcast":
                comm.broadcast(mine, "control")
                results.append(mine)
        results += [t for p in pending[-1:] for t in p.received]
        if order.random() < 0.4 and pending:
            pending.pop(order.randrange(len(pending))).wait()
    order.shuffle(pending)
    for transfer in pending:
        transfer.wait()
    return results


def over_both(comm: Communicator, seed: int) -> bool:
    """Return whether both brought the same tensors and counted the same bytes."""
    assert isinstance(comm, SharedMemory)
    gloo = Communicator(comm.group)
    comm.bytes_sent.clear()
    ours, theirs = communicate(comm, seed), communicate(gloo, seed)
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    return comm.bytes_sent == gloo.bytes_sent


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_same_arrives_as_over_gloo(ranks: Ranks, size: int) -> None:
    @settings(max_examples=12, deadline=None)
    @given(st.integers(0, 10**6))
    def check(seed: int) -> None:
        assert ranks(size).run(over_both, seed) == [True] * size

    check()


def sums(comm: Communicator) -> list[Tensor]:
    """The same sum past the queues and through them; on rank 0 always through them."""
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(comm.rank))
    assert isinstance(comm, SharedMemory)
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 0:
            patch.setattr(comm, "_compiled", None)
        at_once = comm.sum(tensor.clone(), "tensor")
    return [at_once, *comm.all_reduce(tensor, "compensation").wait()]


def test_a_sum_has_the_same_bits_on_every_rank(ranks: Ranks) -> None:
    first, *others = ranks(6).run(sums)
    for both in (first, *others):
        assert all(torch.equal(one, first[0]) for one in both)


@contextmanager
def own_pool(size: int) -> Iterator[RankPool]:
    """Ranks that may be killed."""
    pool = RankPool(size)
    try:
        yield pool
    finally:
        for process in pool.processes:
            process.kill()
        pool.close()


def lose_rank_1(comm: Communicator, how: signal.Signals, operation: str, timeout: float) -> str:
    """End or stop rank 1 in the middle of an operation; return what another rank is told."""
    links = connect(dist.group.WORLD, timedelta(seconds=timeout))
    assert links is not None
    links.all_gather(torch.ones(1), "control")
    if comm.rank == 1:
        os.kill(os.getpid(), how)
    large = torch.ones(4 << 20)
    try:
        match operation:
            case "broadcast":
                # Of rank 0's messages, more than the pipe to rank 1 holds.
                links.broadcast(large, "control")
            case "gather":
                links.all_gather(large, "merge")
            case "sum":
                links.sum(torch.ones(8), "tensor")
            case "exchange":
                peer = [(1, large)]
                links.exchange(peer, [(1, torch.empty_like(large))], "ring").wait()
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("operation", ["broadcast", "gather", "sum", "exchange"])
def test_the_end_of_a_rank_is_told_at_once(operation: str) -> None:
    with own_pool(3) as pool:
        with pytest.raises((EOFError, ConnectionResetError)):  # rank 1 answers nothing
            pool.run(lose_rank_1, signal.SIGKILL, operation, 600)
        # Rank 0 has answered by now, and not after the 600 s of the collectives' time-out.
        assert pool.answers[0] in ("rank 1 has ended", "a rank has ended")


def wait_for_a_plan(comm: Communicator, end: bool) -> str:
    """Rank 0 ends, or stops rank 1 for longer than the time-out; return what that is told."""
    links = connect(dist.group.WORLD, timedelta(seconds=600 if end else 2))
    assert links is not None
    plan = torch.full((1,), os.getpid())
    links.broadcast(plan.clone(), "control")
    pids = links.all_gather(plan, "control").flatten().tolist()
    if comm.rank == 0:
        time.sleep(0.2)
        if end:
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(pids[1], signal.SIGCONT)
        time.sleep(0.1)
    try:
        links.broadcast(plan, "control")
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_a_rank_that_waits_for_a_plan_is_told_that_rank_0_has_ended() -> None:
    with own_pool(2) as pool:
        with pytest.raises((EOFError, ConnectionResetError)):  # rank 0 answers nothing
            pool.run(wait_for_a_plan, True)
        assert pool._pipes[1].poll(60)
        assert pool._pipes[1].recv() == (True, "rank 0 has ended")


def stop_in_turn(comm: Communicator) -> str:
    """Rank 0 sends a last plan to rank 1, which ends, and later to rank 2; return what that got."""
    links, plan = connect(dist.group.WORLD, timedelta(seconds=60)), torch.zeros(2)
    assert links is not None
    if comm.rank == 0:
        write = os.write

        def slowly(file: int, data: Any) -> int:
            written = write(file, data)
            time.sleep(0.3)
            return written

        with mock.patch.object(os, "write", slowly):
            links.broadcast(torch.ones(2), "control")
        return "told"
    links.broadcast(plan, "control")
    if comm.rank == 1:
        os._exit(0)
    return str(plan.tolist())


def test_a_rank_reads_the_last_plan_after_another_has_ended() -> None:
    """Rank 0 tells one after the other, and may be slow on a busy machine."""
    with own_pool(3) as pool:
        with pytest.raises((EOFError, ConnectionResetError)):  # rank 1 answers nothing
            pool.run(stop_in_turn)
        assert pool._pipes[2].poll(60)
        assert pool._pipes[2].recv() == (True, "[1.0, 1.0]")


def test_time_in_which_a_waiting_rank_was_stopped_does_not_count() -> None:
    with own_pool(2) as pool:
        assert pool.run(wait_for_a_plan, False) == ["nothing"] * 2


@pytest.mark.long
@pytest.mark.parametrize("operation", ["broadcast", "gather", "sum", "exchange"])
def test_a_rank_that_is_stopped_is_given_up_after_the_timeout(operation: str) -> None:
    with own_pool(2) as pool:
        pool.run(sums)  # processes take seconds to start
        with pytest.raises(TimeoutError):  # rank 1 answers nothing
            pool.run(lose_rank_1, signal.SIGSTOP, operation, 2, timeout=6)
        assert re.fullmatch(r"no rank has answered for 2 s \(.*\)", pool.answers[0])


def wait_idly(comm: Communicator) -> tuple[float, int]:
    """Return the CPU seconds, and this thread's waits, that 3 s without a plan of rank 0 take."""
    used = psutil.Process().cpu_times
    seconds, waits = sum(used()[:2]), resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    if comm.rank == 0:
        time.sleep(3)
    comm.broadcast(torch.zeros(256, dtype=torch.int64), "control")
    waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - waits
    return sum(used()[:2]) - seconds, waits


def test_ranks_that_wait_for_a_plan_take_no_cpu_time(ranks: Ranks) -> None:
    for seconds, waits in ranks(4).run(wait_idly):
        assert seconds <= 0.3, "of 3 s: it spins"
        assert waits <= 100, "in 3 s: it looks every few milliseconds"


def refuse(*_: object) -> None:
    raise PermissionError


def stays_apart(comm: Communicator, what: str, instead: Any) -> bool:
    """Rank 1 differs in something; tell if this rank keeps to gloo, and no file stays open."""
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(what, instead)
        before = len(os.listdir("/proc/self/fd"))
        links = connect(dist.group.WORLD, timedelta(seconds=9))
        return links is None and len(os.listdir("/proc/self/fd")) == before


def another_host() -> tuple[str]:
    return ("another",)


@pytest.mark.parametrize(
    ("what", "instead"),
    [
        ("razor_dist.parallel.shared_memory.host", another_host),
        ("os.open", refuse),
        ("os.pipe2", refuse),
    ],
    ids=[
        "it is on another host",
        "it may not open the files of the others",
        "it may not make a pipe",
    ],
)
def test_where_memory_cannot_be_shared_no_rank_does(ranks: Ranks, what: str, instead: Any) -> None:
    assert ranks(3).run(stays_apart, what, instead) == [True] * 3


def test_a_limit_on_the_size_of_files_leaves_no_segment_and_no_open_file() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = os.listdir("/proc/self/fd")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with ExitStack() as files:
            assert own_files(0, files)[0] is not None
            assert own_files(1 << 21, files) == (None, -1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir("/proc/self/fd") == before


def test_a_sum_is_one_call_on_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started and waited for, it would be two events and a change of streams, 80 times a token."""
    calls = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **given: calls.append(given))
    comm, part = Communicator(None), torch.ones(4)
    comm.size = 2
    assert comm.sum(part, "tensor") is part
    assert calls == [{"group": None}]
