"""Decode steps that are recorded and replayed are the eager steps, or are not used.

Recordings are made by `razor_dist.engine.tape.Tape`, which repeats operations as a CUDA graph
does, so that all but the capture itself is tested without a GPU. The kernels for block tables are
those of CPUs (`tests/test_kernels_decode.py` holds all to their definition).
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from razor_dist.config.schema import EngineConfig
from razor_dist.engine.graph import (
    CudaRecorder,
    DecodeGraphs,
    Recorder,
    batch_bucket,
    padded_length,
)
from razor_dist.engine.runner import ModelRunner
from razor_dist.engine.tape import Tape, recorded_rows
from razor_dist.kernels.quantized import INT4, INT8
from razor_dist.parallel.comm import Communicator
from razor_dist.protocol.step_plan import Close
from tests.cases import Case, answer, prefill
from tests.engine.recorded import SPLIT, Both, case_of, make_pair, story
from tests.logits import tokens_of
from tests.ranks import Ranks
from tests.tape import CountingTape
from tests.test_cuda import DEVICES
from tests.test_kernels_linear import needs_compiler
from tests.tiny_models import Tiny


@needs_compiler
def test_slots_that_have_moved_need_no_new_recording(tiny: Tiny) -> None:
    both = Both(Communicator(None), case_of(tiny("llama")))
    for key in (3, 4, 5, 0):
        both.open(key, 9)  # 32 of 170 places each
    both.open(1, 41)  # 32
    for _ in range(4):
        both.decode(1)
        both.choose(1)
    before, (slot,) = both.tape.recorded, both.graphs.sequences[1].streaming
    both.execute(Close(0))
    assert slot.offset == 128
    both.open(2, 70)  # 34, which are free, but not together
    assert slot.offset == 96
    for _ in range(4):
        both.decode(1)
        both.choose(1)
    assert both.tape.recorded == before
    assert max(both.errors) < 1e-4 and both.agree


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize(
    ("world", "split"),
    [
        *((world, SPLIT) for world in (1, 3)),
        *((2, ((kind, kind),) * 4) for kind in (True, False)),
    ],
)
def test_recorded_steps_are_the_eager_steps(
    world: int, split: Any, ranks: Ranks, tiny: Tiny
) -> None:
    answers = ranks(world).run(story, case_of(tiny("llama"), retrieval=split))
    errors, agree, recorded, replayed, sent = answers[0]
    assert len(errors) == 94
    assert max(errors) <= 1e-5
    assert agree
    # Each recording ran a few times at least, the check of it included; all ranks did the same.
    assert 5 <= recorded <= 15
    assert replayed >= 70
    assert {answer[2:4] for answer in answers} == {(recorded, replayed)}
    assert {times for _, _, times in sent} == {1, 2, 4}
    for eager, graphs, times in sent:
        assert graphs == eager * times


@needs_compiler
@pytest.mark.parametrize("family", ["qwen2", "mistral", "glm"])
def test_every_family_can_be_recorded(family: str, tiny: Tiny) -> None:
    path = tiny(family)
    both = Both(Communicator(None), case_of(path, retrieval=split_for(family)))
    both.open(0, 20)
    for _ in range(6):
        both.decode(0)
        both.choose(0)
    assert both.graphs.graphs is not None and both.graphs.graphs.enabled
    assert both.tape.replayed == 5
    assert max(both.errors) <= 1e-5


def split_for(family: str) -> tuple[tuple[bool, ...], ...]:
    heads = 4 if family == "mistral" else 2
    return ((False,) * heads, (True,) + (False,) * (heads - 1), (True,) * heads)


@needs_compiler
@torch.inference_mode()
def test_a_replay_computes_from_its_inputs_alone(tiny: Tiny) -> None:
    """With nothing but the inputs written, the recording of one step answers the next ones."""
    both = Both(Communicator(None), case_of(tiny("llama")), pad=64)
    both.open(0, 41)
    for _ in range(2):
        both.decode(0)
    runner = both.graphs
    assert runner.graphs is not None
    [recording] = runner.graphs._recordings.values()
    assert recording.inputs is not None and recording.replay is not None
    for step in range(12):  # over the edge of a block, too
        plan = answer((0, 20 + step))
        batch = runner.prepare(plan.entries).passes[0].decode
        assert batch is not None
        recording.inputs.copy_(batch.inputs)
        got, tokens = recording.replay()
        want = both.eager.execute(plan)
        assert want is not None
        assert tokens.tolist() == want.argmax(-1).tolist()
        assert (got - want).abs().max() / want.abs().max() <= 1e-5
        runner.execute(plan)
    assert both.tape.recorded == 1


@needs_compiler
@pytest.mark.parametrize("codes", [INT8, INT4])
def test_codes_are_read_and_written_alike(codes: torch.dtype, tiny: Tiny) -> None:
    both = Both(Communicator(None), case_of(tiny("llama"), kv_dtype=codes))
    for length, key in ((41, 0), (9, 1)):
        both.open(key, length)
    for _ in range(6):
        both.decode(0, 1)
        both.choose(0, 1)
    assert both.tape.replayed > 0 and both.agree
    assert max(both.errors) < 1e-4


@needs_compiler
def test_a_key_is_of_lengths_alone(tiny: Tiny) -> None:
    both = Both(Communicator(None), case_of(tiny("llama")))
    for key, length in enumerate((41, 20, 20, 9)):
        both.open(key, length)
    runner, graphs = both.graphs, both.graphs.graphs
    assert graphs is not None

    def key_of(*sequences: int) -> object:
        batch = runner.prepare(answer(*((key, 5) for key in sequences)).entries).passes[0].decode
        assert batch is not None
        return graphs.key(batch)

    assert key_of(1) == key_of(2)
    assert key_of(0, 1) == key_of(1, 0) == key_of(2, 0)
    assert key_of(0, 1, 2) == key_of(0, 1, 2, 3)
    assert len({key_of(0), key_of(0, 1), key_of(0, 1, 2)}) == 3
    keys = []
    for position in range(41, 90):
        assert runner.sequences[0].length == position
        keys.append(key_of(0))
        both.decode(0)
        both.choose(0)
    changed = [41 + i for i in range(1, len(keys)) if keys[i] != keys[i - 1]]
    # The ring of 30 places is full by then, so that only the shard's padding matters.
    assert changed == [48, 64, 80]


@given(st.integers(1, 300))
def test_batches_are_padded_to_few_sizes(sequences: int) -> None:
    bucket = batch_bucket(sequences)
    assert sequences <= bucket < max(sequences * 2, sequences + 8)
    assert batch_bucket(bucket) == bucket <= batch_bucket(sequences + 1)
    assert bucket in (1, 2, 4) or bucket % 8 == 0


@needs_compiler
def test_one_recording_serves_any_sequences(tiny: Tiny) -> None:
    """Sequences come and go within a batch of four; pages and slots are others' every time."""
    both = Both(Communicator(None), case_of(tiny("llama")), pad=256)
    for key in range(3):
        both.open(key, 20 + 9 * key)
    for keys in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        both.decode(*keys)
        both.choose(*keys)
    both.execute(Close(0))
    both.open(3, 50)
    both.open(4, 11)
    for keys in ((3, 1, 2), (4, 3, 2, 1), (1, 2, 3, 4)):
        both.decode(*keys)
        both.choose(*keys)
    assert both.tape.recorded == 1
    assert both.tape.replayed == 5  # the check of the recording included
    assert max(both.errors) <= 1e-5 and both.agree


@needs_compiler
def test_the_least_recently_used_recording_goes(tiny: Tiny) -> None:
    both = Both(Communicator(None), case_of(tiny("llama")), pad=256)
    runner, tape = both.graphs, both.tape
    runner.graphs = DecodeGraphs(both.comm, runner.caches, runner.decode_logits, tape, most=2)
    for key in range(3):
        both.open(key, 20)
    for keys in ((0,), (0,), (0, 1), (0, 1), (2,)):  # both are recorded, one of one was used last
        both.decode(*keys)
    assert both.tape.recorded == 2
    both.decode(0, 1, 2)  # a third: that of two goes
    both.decode(1)
    assert both.tape.recorded == 2
    both.decode(0, 2)  # seen for the first time, again
    both.decode(0, 2)
    assert both.tape.recorded == 3
    assert max(both.errors) <= 1e-5


def rows_of(graphs: DecodeGraphs) -> list[int]:
    """Rows of each recording that is kept, the least recently used first."""
    return [key.sequences for key in graphs.recorded]


@needs_compiler
def test_recordings_on_cpu_keep_few_rows_together(tiny: Tiny) -> None:
    case, tape = case_of(tiny("llama")), Tape(Communicator(None))
    tape.most_rows = 20
    eager, runner = make_pair(Communicator(None), case, tape, 10)
    graphs = runner.graphs
    assert graphs is not None
    for key in range(10):
        for of in (eager, runner):
            prefill(of, key, dataclasses.replace(case, prompt=tokens_of(9, key)))
    kept = []
    for count in (4, 8, 4, 7, 10, 4):
        for step in range(3):
            plan = answer(*((key, 5 + step) for key in range(count)))
            want, found = (of.execute(plan) for of in (eager, runner))
            assert want is not None and found is not None
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
            assert sum(rows_of(graphs)) <= tape.most_rows
        kept.append(rows_of(graphs))
    assert kept == [[4], [4, 8], [8, 4], [8, 4, 7], [16], [16, 4]]
    assert graphs.enabled


@needs_compiler
def test_a_batch_that_shrinks_again_is_not_recorded_again(tiny: Tiny) -> None:
    config = EngineConfig(model="any", max_num_seqs=24)
    case, tape = case_of(tiny("llama")), Tape(Communicator(None), recorded_rows(config))
    _, runner = make_pair(Communicator(None), case, tape, 24)
    assert runner.graphs is not None
    for key in range(24):
        prefill(runner, key, dataclasses.replace(case, prompt=tokens_of(9, key)))
    sizes, kept = [24, 16, *range(8, 0, -1)], list[tuple[list[int], int]]()
    with mock.patch.object(tape, "record", wraps=tape.record) as record:
        for _ in range(2):
            for count in sizes:
                for step in range(3):
                    runner.execute(answer(*((key, 5 + step) for key in range(count))))
            kept.append((rows_of(runner.graphs), record.call_count))
    assert kept == [(sizes, len(sizes))] * 2


@needs_compiler
def test_what_is_closed_holds_no_recording(tiny: Tiny) -> None:
    """NCCL would wait for it without end as the process group is destroyed."""
    both = Both(Communicator(None), case_of(tiny("llama")), pad=256)
    both.open(0, 20)
    both.decode(0)
    both.decode(0)
    assert both.graphs.graphs is not None and both.tape.recorded == 1
    assert both.tape.last() is not None
    both.graphs.close()
    assert both.tape.last() is None
    both.decode(0)
    both.decode(0)
    assert both.tape.recorded == 1 and max(both.errors) <= 1e-5


@needs_compiler
def test_steps_of_many_sequences_are_not_recorded_on_cpu(tiny: Tiny) -> None:
    """Two sequences are few enough here, and their recording has two rows."""
    tape, case = Tape(Communicator(None)), case_of(tiny("llama"))
    tape.most_sequences = 2
    _, runner = make_pair(Communicator(None), case, tape)
    tokens = dict.fromkeys(range(3), 5)
    for key in tokens:
        prefill(runner, key, dataclasses.replace(case, prompt=tokens_of(9, key)))
    for count in (3, 3, 3, 2, 2, 2):
        runner.execute(answer(*list(tokens.items())[:count]))
    assert runner.graphs is not None
    assert rows_of(runner.graphs) == [2]


@needs_compiler
def test_recordings_of_more_than_eight_sequences_have_spare_rows_on_cpu(tiny: Tiny) -> None:
    """Up to eight they have none: there, the number of rows changes the rounding."""
    case = case_of(tiny("llama"))
    pair = make_pair(Communicator(None), case, Tape(Communicator(None)), 17)
    for runner, key in itertools.product(pair, range(17)):
        prefill(runner, key, dataclasses.replace(case, prompt=tokens_of(9 + key, key)))
    for step, count in enumerate((11, 12, 16, 9, 17, 17, 17, 10, 8, 8, 8)):
        want, found = (
            runner.execute(answer(*((key, 5 + step) for key in range(count)))) for runner in pair
        )
        assert want is not None and found is not None and len(found) == count
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    graphs = pair[1].graphs
    assert graphs is not None and graphs.enabled
    assert sorted(rows_of(graphs)) == [8, 16, 24]


@given(st.integers(1, 1 << 21), st.sampled_from([1, 16, 1024]))
def test_padding_is_little_and_seldom_changes(tokens: int, pad: int) -> None:
    padded = padded_length(tokens, pad)
    assert tokens <= padded <= max(tokens + pad - 1, tokens * 1.125)
    assert padded_length(padded, pad) == padded
    assert padded_length(tokens + 1, pad) >= padded


def recorder_on(device: str) -> Recorder:
    if device == "cpu":
        return CountingTape(Communicator(None))
    return CudaRecorder(torch.device(device))


def logits_of_steps(runner: ModelRunner, case: Case) -> torch.Tensor:
    """Logits of 24 decode steps: one sequence alone, after ten steps beside a second."""
    for key, length in ((0, 41), (1, 70)):
        prefill(runner, key, dataclasses.replace(case, prompt=tokens_of(length, key)))
    found = []
    for step in range(24):
        plan = answer((0, 10 + step), (1, 20 + step)) if step > 10 else answer((0, 10 + step))
        logits = runner.execute(plan)
        assert logits is not None
        found.append(logits.float().cpu())
    return torch.cat(found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", ["llama", "llama_wide"])
def test_recorded_steps_are_those_of_the_cpu(
    model: str, dtype: torch.dtype, device: str, tiny: Tiny
) -> None:
    """In bfloat16, the error is at most 1.5 times that of eager steps."""
    cpu = case_of(tiny(model), retrieval=SPLIT if model == "llama" else SPLIT[1:])
    case = dataclasses.replace(cpu, device=device, dtype=dtype, kv_dtype=dtype)
    exact, _ = make_pair(Communicator(None), cpu, CountingTape(Communicator(None)))
    eager, graphs = make_pair(Communicator(None), case, recorder_on(device))
    want, plain, got = (
        logits_of_steps(runner, of) for runner, of in ((exact, cpu), (eager, case), (graphs, case))
    )
    assert graphs.graphs is not None and graphs.graphs.enabled
    error, usual = ((x - want).norm() / want.norm() for x in (got, plain))
    if dtype == torch.float32:
        assert error <= 1e-4
    else:
        assert error <= 1.5 * usual <= 0.1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("row", "change"),
    [(4, 0), (4, -1), (4, 1), (5, 8), (5, -8)],
    ids=["right", "a key too few", "a key too many", "a block too few", "a block too many"],
)
def test_a_wrong_mask_is_found_when_it_is_recorded(
    row: int, change: int, dtype: torch.dtype, device: str, tiny: Tiny
) -> None:
    """A recording that reads one key more or less is not used."""
    path = tiny("llama_wide")
    case = case_of(path, retrieval=SPLIT[1:], device=device, dtype=dtype, kv_dtype=dtype)
    _, graphs = make_pair(Communicator(None), case, recorder_on(device))
    prefill(graphs, 0, dataclasses.replace(case, prompt=tokens_of(45, 0)))
    write = DecodeGraphs._write

    def wrong(self: DecodeGraphs, recording: Any, *args: Any) -> None:
        write(self, recording, *args)
        recording.inputs[row] += change

    with mock.patch.object(DecodeGraphs, "_write", wrong):
        for token in range(3):
            graphs.execute(answer((0, 10 + token)))
    assert graphs.graphs is not None
    assert graphs.graphs.enabled == (change == 0)
