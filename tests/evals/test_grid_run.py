"""A grid on a tiny model: shared prefills are what they stand for, and nothing is run twice."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from razor_dist.config.errors import EngineError, ModelError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.core import EngineCore
from razor_dist.evals.baselines import presses
from razor_dist.evals.baselines.model import PressedModel
from razor_dist.evals.fidelity.config import FidelityConfig
from razor_dist.evals.fidelity.model import FidelityModel
from razor_dist.evals.fidelity.task import FidelityTask
from razor_dist.evals.grid import PRESET, GridTask, grid_reading, place_seed
from razor_dist.evals.methods import FULL_METHOD, Method
from razor_dist.evals.needle.config import GridConfig, NeedleConfig
from razor_dist.evals.needle.results import NeedleResults
from razor_dist.evals.needle.task import NeedleTask
from razor_dist.evals.one_rank import (
    MethodEngine,
    ReplayModel,
    TracedModel,
    kept_layers,
    prefill,
    run_core,
)
from razor_dist.evals.sources.citations import CitationsTask, CitingServer
from razor_dist.evals.sources.config import CitationsConfig, SourcesConfig
from razor_dist.evals.sources.task import SourcesTask
from razor_dist.evals.suites.config import SharedConfig
from razor_dist.evals.suites.job import SuiteTask
from razor_dist.evals.suites.why import WhyModel, WhyTask
from razor_dist.evals.texts import Haystack, Prompter
from razor_dist.heads.decision import Flags
from razor_dist.jobs.results import read_job
from razor_dist.jobs.task import ExternalEngineConfig, Task, job_settings
from razor_dist.protocol.sampling_params import SamplingParams
from tests.tiny_models import save_head_map
from tests.tokenizer import smollm2_tokenizer

WINDOW = {"window_min": 40, "window_ratio": 5, "block": 16}
HEADS: Flags = ((True, False), (False, False), (True, True), (False, True))


@pytest.fixture(scope="module")
def model(letters: Path) -> ReplayModel:
    return ReplayModel(EngineConfig(model=str(letters), threads=1, chunked_prefill_size=128))


def _decode(core: EngineCore, question: list[int]) -> list[int]:
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    core.add("question", question, greedy, prefix_id="document")
    return run_core(core)


def _exact(retrieval: Flags | None, **settings: object) -> Method:
    return Method("exact", {"prefill": "exact", **WINDOW, **settings}, retrieval)


@pytest.mark.long
@pytest.mark.parametrize(
    "method",
    [
        _exact(HEADS),
        _exact(HEADS, compensation=False),
        Method("none", {"attention": "streaming", "prefill": "exact", **WINDOW}),
    ],
    ids=["razor", "no compensation", "streaming"],
)
@pytest.mark.parametrize("tokens", [333, 257])  # the last chunk has 77, and one
def test_a_replayed_document_leaves_the_caches_of_exact_prefill(
    model: ReplayModel, method: Method, tokens: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    document = torch.randint(4, 99, (tokens,), generator=generator).tolist()
    question = document[50:70]
    own = model.engine(method, 400)
    prefill(own.core, document)
    full = model.engine(FULL_METHOD, 400)
    prefill(full.core, document)
    replayed = model.engine(method, 400)
    with model.replay.giving(kept_layers(full.runner)):
        prefill(replayed.core, document)

    one, other = own.runner.caches, replayed.runner.caches
    (sequence,), (copy,) = own.runner.sequences.values(), replayed.runner.sequences.values()
    at = one.pages.extents(sequence.table, 0, tokens)
    assert at == other.pages.extents(copy.table, 0, tokens)
    for a, b in at:
        torch.testing.assert_close(other.pages.k[:, a:b], one.pages.k[:, a:b])
        torch.testing.assert_close(other.pages.v[:, a:b], one.pages.v[:, a:b])
    (cache,), (other_cache,) = one.streaming, other.streaming
    (slot,), (other_slot,) = sequence.streaming, copy.streaming
    assert slot.start == other_slot.start > cache.policy.sinks
    for begin, end in ((0, cache.policy.sinks), (slot.start, tokens)):
        for mine, theirs in zip(
            cache.read(cache.rows, slot, begin, end),
            other_cache.read(cache.rows, other_slot, begin, end),
            strict=True,
        ):
            torch.testing.assert_close(theirs, mine)
    torch.testing.assert_close(
        other_cache.sums[:, :, other_slot.index], cache.sums[:, :, slot.index]
    )
    assert own.runner.sequences.kv_bytes == replayed.runner.sequences.kv_bytes
    assert _decode(replayed.core, question) == _decode(own.core, question)


@pytest.mark.long
def test_engines_of_earlier_methods_leave_no_tensors(model: ReplayModel) -> None:
    method = Method("razor", {"window_min": 64, "window_ratio": None, "prefill": "local"}, HEADS)
    held = []
    gc.disable()
    try:
        for _ in range(4):
            engine = model.read(method, 200, list(range(4, 90)))
            held.append(sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects()))
            _decode(engine.core, [5, 6])
            del engine
    finally:
        gc.enable()
    assert held[2] == held[3] == held[1]


@contextmanager
def without_numbers(model: PreTrainedModel) -> Iterator[None]:
    """Have a model compute logits that are not finite."""
    weight = model.get_output_embeddings().weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
        yield
        weight.copy_(before)


def test_an_answer_that_fails_is_an_error_and_no_wrong_answer(
    letters: Path, tmp_path: Path
) -> None:
    own = {"model": str(letters), "threads": 1, "chunked_prefill_size": 128}
    model, document = ReplayModel(EngineConfig(**own)), [5] * 300
    engine, greedy = MethodEngine(model, FULL_METHOD, 400), SamplingParams(temperature=0)

    def answer() -> list[int]:
        with engine.prefill(document) as read:
            [output] = engine.generate([{"prompt_token_ids": [7, 8]}], greedy, read)
        return list(output.outputs[0].token_ids)

    right = answer()
    with without_numbers(model.replay.model), pytest.raises(EngineError, match="not finite"):
        answer()
    assert answer() == right
    head_map = save_head_map(letters, HEADS, tmp_path / "map.json")
    traced = TracedModel(EngineConfig(**own, head_map=str(head_map)))
    broken = without_numbers(traced._engine.runner.model)
    with broken, pytest.raises(EngineError, match="not finite"):
        traced.answer(document, 4)


@pytest.mark.long
def test_what_is_there_is_not_run_again(
    model: ReplayModel, tmp_path: Path, opens_here: Callable[[object], None]
) -> None:
    opens_here(model)
    about = {"lengths": (300, 400), "depths": (50,), "needles": 1, "haystack": "reference"}
    grid = GridConfig(**model.config.model_dump(exclude={"seed"}) | about)
    local = Method("local", {"prefill": "local", **WINDOW}, HEADS)
    methods = [
        FULL_METHOD,
        _exact(HEADS),
        replace(_exact(None), name="other", retrieval=((True,) * 2,) * 4),
        local,
    ]
    read: list[int] = []
    hook = model.replay.model.register_forward_pre_hook(
        lambda _, __, inputs: read.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )

    def run(methods: Sequence[Method]) -> NeedleResults:
        return GridTask.plan(grid, methods).run_in(tmp_path)

    assert len(run(methods).cells) == 8
    haystack = Haystack("reference", model.prompter.encode)
    reading = grid_reading(model.prompter, haystack, grid.places[0], grid.seed)
    question = len(reading.questions[0].ids)
    chunks = [tokens for tokens in read if tokens > 1 and tokens != question]
    assert sum(chunks) == 2 * (300 + 400)  # once for all that share a prefill, once for local
    read.clear()
    assert len(run(methods).cells) == 8 and read == []
    # Another decision under the same name is another experiment; the old result is not shown.
    changed = replace(methods[1], retrieval=methods[2].retrieval)
    again = run([changed, local])
    assert len(again.cells) == 4 and sum(tokens > 1 for tokens in read) > 0
    assert len(read_job(tmp_path).records) == 10
    hook.remove()


def test_prompts_with_and_without_a_chat_template(model: ReplayModel) -> None:
    chat, plain = Prompter(smollm2_tokenizer()), model.prompter
    assert chat.is_chat and not plain.is_chat
    haystack = Haystack("reference", plain.encode)
    fact = PRESET.draw([50], place_seed((300, 50, 0), 0))[0]
    reading = grid_reading(plain, haystack, (300, 50, 0), 0)
    assert len(reading.prefix) == 300
    assert reading.questions[0].ids == plain.encode(
        f"\n\n{fact.question} Answer: The {fact.subject} is"
    )
    haystack = Haystack("reference", chat.encode)
    text = chat.decode(grid_reading(chat, haystack, (300, 50, 0), 0).questions[0].ids)
    assert text.startswith(f"\n\n{fact.question}") and text.rstrip().endswith("assistant")
    with pytest.raises(ModelError, match="has no tokenizer"):
        Prompter(None)


PROSE: dict[str, Any] = {"haystack": "reference"}


@pytest.mark.parametrize(
    ("plan", "opened"),
    [
        (
            lambda: NeedleTask.plan(NeedleConfig(methods="h2o", kv_budget=0.5, **PROSE)),
            PressedModel,
        ),
        (lambda: CitationsTask.plan(CitationsConfig(**PROSE)), CitingServer),
        (lambda: FidelityTask.plan(FidelityConfig(), [Path(__file__)]), FidelityModel),
        (lambda: GridTask.plan(GridConfig(**PROSE), [FULL_METHOD]), ReplayModel),
        (lambda: SourcesTask.plan(SourcesConfig(**PROSE)), TracedModel),
        (lambda: WhyTask(SuiteTask.plan(SharedConfig(**PROSE)), "razor", (), ""), WhyModel),
    ],
)
def test_what_stands_in_an_engines_place(
    plan: Callable[[], Task], opened: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []
    monkeypatch.setattr(opened, "__init__", lambda _, own: given.append(own))
    monkeypatch.setattr(presses, "check_installed", lambda methods: None)
    task = plan()
    [config] = task.engines.values()
    assert isinstance(config, ExternalEngineConfig)
    assert type(config.open()) is opened and given == [config]
    assert "opens" not in str(job_settings(task)), "it decides no result"
    assert pickle.loads(pickle.dumps(task)) == task
