"""One rank of eight at a long context, on one device: its own kernels, tables and recordings.

Nothing is sent (`razor_dist.parallel.silent`), and of a prompt only its last chunk is read: caches
hold random numbers. What is missing from a real rank's time are the links.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from razor_dist.attention.step import Pass
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.core import EngineCore
from razor_dist.engine.graph import CudaRecorder, Recorder
from razor_dist.engine.runner import ModelRunner
from razor_dist.engine.tape import StepFunction, Tape
from razor_dist.evals.bench.engine import greedy
from razor_dist.evals.bench.gpu import Bench
from razor_dist.evals.bench.measure import Table, fastest
from razor_dist.evals.bench.settings import PLAIN
from razor_dist.evals.bench.shape import random_model
from razor_dist.parallel.silent import SilentCommunicator
from razor_dist.parallel.zigzag import Chunk, chunks
from razor_dist.plan.compute import operations
from razor_dist.plan.deployment import Deployment
from razor_dist.plan.one_rank import chunk_reader, runner_of
from razor_dist.protocol.messages import Failed, Token
from razor_dist.protocol.step_plan import Close

RANKS = 8
_KEPT = 0.3  # of the KV heads
_WINDOW = 8192
_WARM_STEPS = 4  # a recording is made and compared twice
_RUNS = ("first", "again", "16 fewer", "again, 16 fewer")
_SECONDS = {"cuda": 0.5, "cpu": 0.05}


@contextmanager
def few_layers(folder: str, layers: int) -> Iterator[str]:
    """A folder for a model of the same sizes, with that many layers."""
    settings = json.loads((Path(folder) / "config.json").read_text())
    with tempfile.TemporaryDirectory() as few:
        settings["num_hidden_layers"] = layers
        (Path(few) / "config.json").write_text(json.dumps(settings))
        yield few


def deployment(bench: Bench, folder: str, context: int, sequences: int) -> Deployment:
    window = min(_WINDOW, context // RANKS)
    config = EngineConfig(
        model=folder,
        device=bench.device.type,
        world_size=RANKS,
        decode="tensor",
        max_model_len=context,
        max_num_seqs=sequences,
        window_min=min(4000, window),
        window_max=window,
        **PLAIN,
        max_step_ms=1e9,  # no prompt is cut
    )
    return Deployment.of(config, "cuda" if bench.cuda else "cpu", _KEPT)


class RankAlone:
    """Rank 0, with an engine around it that takes prompts as read."""

    def __init__(self, bench: Bench, folder: str, context: int, sequences: int) -> None:
        self.d = deployment(bench, folder, context, sequences)
        self.model = random_model(folder, bench.device, self.d.dtype)
        comm = SilentCommunicator(0, RANKS)
        recorder: Recorder = CudaRecorder(bench.device) if bench.cuda else Tape(comm)
        self.replays = _remembered(recorder)
        cache = self.d.cache(context)
        self.runner = runner_of(self.d, self.model, cache, comm, recorder=recorder)
        fill(self.runner)
        chunk = self.d.chunked_prefill_size
        self.core = EngineCore(
            self.runner, self.d.config, chunked_prefill_size=chunk, eos_token_ids=()
        )

    def step(self) -> int:
        """Run one step; return how many tokens came of it."""
        found = self.core.step()
        for message in found:
            if isinstance(message, Failed):
                raise message.exception
        return sum(isinstance(message, Token) for message in found)

    def steps_of(self, batch: int, context: int, timed: int) -> Iterator[float]:
        """Seconds of steps after which ``batch`` sequences, of nearly ``context``, have a token."""
        new_tokens = _WARM_STEPS + timed + 2 * batch + 4  # some come before the last prompt
        prompt = [1] * (context - new_tokens)
        for number in range(batch):
            self.core.add(f"{batch} {number}", prompt, greedy(new_tokens))
        with _prompts_taken_as_read(self.runner):
            while self.core.has_work:
                began = time.perf_counter()
                if self.step() == batch:
                    yield time.perf_counter() - began


def _prompts_taken_as_read(runner: ModelRunner) -> AbstractContextManager[object]:
    """Return a context that counts a prompt's tokens in its sequence and computes nothing."""
    run, vocabulary = runner._run, runner.shape.vocab_size

    def counted(part: Pass) -> Tensor:
        if not (part.chunks or part.replicated):
            return run(part)
        return torch.zeros(sum(part.rows), vocabulary, device=runner.device)

    return mock.patch.object(runner, "_run", counted)


def _remembered(recorder: Recorder) -> list[StepFunction]:
    """Have a recorder keep what replays each of its recordings in a list."""
    replays: list[StepFunction] = []
    record = recorder.record

    def remember(step: StepFunction) -> StepFunction:
        replays.append(record(step))
        return replays[-1]

    recorder.record = remember  # type: ignore[method-assign]
    return replays


def fill(runner: ModelRunner) -> None:
    for store in runner.caches.stores:
        for tensor in (store.k, store.v):
            if tensor.is_floating_point():
                tensor.normal_()
            else:
                tensor.random_(-127, 128)
        for name in ("k_scale", "v_scale"):
            scale = getattr(store, name, None)
            if scale is not None:
                scale.fill_(0.01)


@torch.inference_mode()
def decode(
    bench: Bench, folder: str, context: int, batches: Sequence[int], timed: int
) -> Iterator[tuple[dict[str, Any], Table, RankAlone]]:
    """Time a step of each number of sequences: as the engine runs it, and the replay alone."""
    rank = RankAlone(bench, folder, context, max(batches))
    for batch in batches:
        steps = rank.steps_of(batch, context, timed)
        times = list(itertools.islice(steps, _WARM_STEPS + timed))[_WARM_STEPS:]
        graphs = rank.runner.graphs
        assert graphs is not None
        step, replay, host = statistics.median(times), None, None
        if rank.replays:  # none if no step could be recorded
            replay = fastest(rank.replays[-1], bench.device, _SECONDS[bench.device.type])
            host = step - replay
        found = {
            "batch": batch,
            "context": context,
            "step_seconds": step,
            "replay_seconds": replay,
            "host_seconds": host,
            "in_graphs": graphs.enabled,
            "replay_differs_by": graphs.difference,
        }
        rows = [["sequences", "a step", "its replay", "host", "in graphs", "differs by"]]
        cells = ["" if s is None else f"{1e3 * s:.2f}" for s in (step, replay, host)]
        rows += [[str(batch), *cells, str(graphs.enabled), f"{graphs.difference:.0e}"]]
        title = f"Rank 0 of {RANKS}, {context:,} tokens a sequence, links left out, ms:"
        yield found, Table(title, rows), rank
        for _ in steps:  # to the end, so that the caches are free again
            pass


@torch.inference_mode()
def prefill(
    bench: Bench, folder: str, context: int, tokens: Sequence[int], few: int
) -> Iterator[tuple[dict[str, Any], Table]]:
    """Time a prompt's last chunk, of each number of ``tokens`` on this rank, first and again.

    Then a slightly shorter one, for a backend that makes a plan for every length and stride. Layers
    are alike, and ``few`` of them are run.
    """
    layers = json.loads((Path(folder) / "config.json").read_text())["num_hidden_layers"]
    with few_layers(folder, few) as part:
        d = deployment(bench, part, context, 1)
        model = random_model(part, bench.device, d.dtype)
    runner = runner_of(d, model, d.cache(context), SilentCommunicator(0, RANKS))
    fill(runner)
    for own in tokens:
        times = []
        for shorter in (0, 0, 16, 16):
            length = RANKS * (own - shorter)
            before = chunks(0, context - length, d.chunked_prefill_size, RANKS)
            whole = [*before, Chunk(context - length, context, RANKS)]
            read = chunk_reader(runner, whole, len(before))
            began = time.perf_counter()
            read()
            times.append(time.perf_counter() - began)
            runner.execute(Close(0))
            if bench.is_late:
                break
        work = operations(d, context).total - operations(d, context - RANKS * own).total
        rate = work / RANKS / min(times[:2])
        found = {
            "tokens": own,
            "context": context,
            "layers": few,
            "seconds": dict(zip(_RUNS, times, strict=False)),
            "operations_per_second": rate,
        }
        cells = [f"{t:.3f}" for t in times] + [""] * (4 - len(times))
        rows = [["tokens of the rank", "first", "again", "16 fewer", "again", "TFLOP/s",
                 f"{layers} layers"]]  # fmt: skip
        rows += [[f"{own:,}", *cells, f"{rate / 1e12:,.2f}",
                  f"{min(times[:2]) * layers / few:.2f}"]]  # fmt: skip
        title = f"Rank 0 of {RANKS}: the last chunk of {context:,} tokens, {few} layers, s:"
        yield found, Table(title, rows)
        if bench.is_late:
            return
