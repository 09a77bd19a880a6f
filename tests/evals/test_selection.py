"""Blocks that retrieval heads choose: against a literal loop, in chunks and token by token."""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.evals.fidelity.config import FidelityConfig
from razor_dist.evals.fidelity.model import FidelityModel, Scored
from razor_dist.evals.fidelity.report import write_report
from razor_dist.evals.fidelity.task import FidelityTask
from razor_dist.evals.grid import GridTask
from razor_dist.evals.methods import FULL_METHOD, Method, methods_of, selection_of
from razor_dist.evals.needle.config import NeedleGridConfig
from razor_dist.evals.needle.model import build_needle_model
from razor_dist.evals.one_rank import ReplayModel
from razor_dist.evals.selection import (
    BLOCK,
    RECENT,
    SELECTORS,
    SelectedHeads,
    attend_selected,
)
from razor_dist.evals.settings import settings_by_name
from razor_dist.heads.decision import Flags
from razor_dist.jobs.job import run_job
from razor_dist.kernels.query import Query
from razor_dist.models.slower_half import slower_half
from tests.literal import causal, literal_attention
from tests.logits import register, stock_logits
from tests.tiny_models import make_tiny

HEADS: Flags = ((True, False), (False, False), (True, True), (False, True))
SLOW = [4, 5, 6, 7, 12, 13, 14, 15]  # of 16 dimensions of a Llama, whose pairs are 8 apart
WINDOW = {"window_min": 200, "window_ratio": None, "block": 16, "sink_tokens": 4}
PROMPT, END = 700, 1000


@functools.cache
def coded(x: tuple[float, ...], bits: int) -> list[float]:
    """A row as an index of so many bits would give it back, number by number, in float32."""
    most, numbers = np.float32(2 ** (bits - 1) - 1), np.array(x, dtype=np.float32)
    scale = np.float32(np.abs(numbers).max()) / most
    return [float(np.float32(np.rint(n / scale)) * scale) for n in numbers]


def log_sum(values: list[float]) -> float:
    top = max(values)
    return top + math.log(sum(math.exp(value - top) for value in values))


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def literal_estimate(selector: str, q: list[float], keys: list[list[float]]) -> float:
    """The estimate of one block's mass by its definition, one key at a time."""
    name, _, detail = selector.partition("-")
    match name:
        case "slower":
            q, *keys = ([row[d] for d in SLOW] for row in (q, *keys))
            if detail != "unrounded":
                bits = 4 if detail == "4bit" else 8
                q, keys = coded(tuple(q), 8), [coded(tuple(k), bits) for k in keys]
            return max(dot(q, k) for k in keys)
        case "keys":
            return max(dot(coded(tuple(q), 8), coded(tuple(k), 4)) for k in keys)
        case "mass":
            return log_sum([dot(q, k) for k in keys])
        case "means":
            pages = [keys[at : at + 32] for at in range(0, BLOCK, 32)]
            means = [[math.fsum(c) / 32 for c in zip(*page, strict=True)] for page in pages]
            return log_sum([dot(q, mean) + math.log(32) for mean in means])
        case "quest":
            pages = [keys[at : at + 16] for at in range(0, BLOCK, 16)]
            return max(
                math.fsum(
                    max(x * min(c), x * max(c))
                    for x, c in zip(q, zip(*page, strict=True), strict=True)
                )
                for page in pages
            )
    return -math.inf


def literal_row(
    q: Tensor, k: Tensor, v: Tensor, share: float, selector: str
) -> tuple[Tensor, list[bool]]:
    """One query's attention, ``q`` [G, D], to the keys [i + 1, D] up to its own, in float64."""
    i, keys = len(k) - 1, k.tolist()
    blocks = [range(at, min(at + BLOCK, i + 1)) for at in range(0, i + 1, BLOCK)]
    fixed = [not b or at.start >= BLOCK * ((i - RECENT) // BLOCK) for b, at in enumerate(blocks)]
    read = list(fixed)
    always = [j for b, at in enumerate(blocks) if fixed[b] for j in at]
    masses = (q @ k[always].T).logsumexp(-1).tolist()
    for row, mass in zip(q.tolist(), masses, strict=True):
        found = {
            b: literal_estimate(selector, row, [keys[j] for j in at])
            for b, at in enumerate(blocks)
            if not fixed[b]
        }
        known = [mass, *(value for value in found.values() if value > -math.inf)]
        for b, value in found.items():
            read[b] |= value >= math.log(share) + log_sum(known)
    seen = [j for b, at in enumerate(blocks) if read[b] for j in at]
    return (q @ k[seen].T).softmax(-1) @ v[seen], read


@settings(max_examples=40, deadline=None)
@given(
    group=st.integers(1, 3), keys=st.integers(1, 700) | st.integers(700, 1300),
    queries=st.integers(1, 300),
    share=st.sampled_from([1 / 2, 1 / 8, 1 / 32, 1 / 256, 1e-9]),
    selector=st.sampled_from(sorted(SELECTORS)), sharpness=st.sampled_from([0.3, 1.0, 3.0]),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_a_query_reads_what_the_definition_says(
    group: int, keys: int, queries: int, share: float, selector: str, sharpness: float, seed: int
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    queries = min(queries, keys)
    q, k, v = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((group, queries, 16), (keys, 16), (keys, 16))
    )
    out, read = attend_selected(q * sharpness, k, v, share, SELECTORS[selector], torch.tensor(SLOW))
    for t in sorted({0, queries // 2, queries - 1}):
        i = keys - queries + t
        literal, blocks = literal_row(q[:, t] * sharpness, k[: i + 1], v[: i + 1], share, selector)
        assert read[t, : len(blocks)].tolist() == blocks
        torch.testing.assert_close(out[:, t], literal, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("family", "wanted"),
    # GLM turns the first half, in neighbouring pairs.
    [("llama", SLOW), ("glm", list(range(8, 16)))],
)
def test_the_slower_half(tmp_path: Path, family: str, wanted: list[int]) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_tiny(family, tmp_path / family))
    dim = model.config.head_dim
    assert dim == 2 * len(wanted)
    assert slower_half(model, dim).tolist() == wanted


@pytest.fixture(scope="module")
def model(letters: Path) -> FidelityModel:
    config = {"attention": "full", "threads": 1, "chunked_prefill_size": 256}
    return FidelityModel(EngineConfig(model=str(letters), **config))


@pytest.fixture(scope="module")
def text() -> Scored:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 99, (END,), generator=generator).tolist()
    ids[900:960] = ids[150:210]
    return Scored(tuple(ids), PROMPT)


def _method(share: str, selector: str = "slower", **own: Any) -> Method:
    return Method(
        "own", {"attention": "full", **own}, selection=selection_of(share, selector, HEADS)
    )


def _logits(model: FidelityModel, method: Method, text: Scored, *, one_by_one: bool) -> Tensor:
    """Logits ``[positions, V]`` of what is compared, and of nothing else."""
    found = []

    def look(positions: Tensor, logits: Tensor) -> Tensor:
        at = (positions >= text.prompt) & (positions < text.positions.stop)
        found.append(logits[at].clone())
        if one_by_one and len(found[-1]):
            logits = torch.zeros_like(logits)
            logits[0, text.ids[int(positions[0]) + 1]] = 1
        return logits

    model._read_on(method, text, look, one_by_one=one_by_one)
    return torch.cat(found)


def _literal(q: Tensor, k: Tensor, v: Tensor, scaling: float, given: dict[str, Any]) -> Tensor:
    q, n = q * scaling, len(k)
    found = literal_attention(q, k, v, causal(n), 1.0)[0]
    # Before these positions nothing is chosen.
    selects = HEADS[given["layer"]][given["head"]]
    for i in range(RECENT + 2 * BLOCK, n) if selects else ():
        found[:, i] = literal_row(q[:, i], k[: i + 1], v[: i + 1], given["share"], "slower")[0]
    return found


register("literal_selection", _literal)


@pytest.mark.long
def test_logits_are_those_of_stock_transformers_with_the_definition(
    model: FidelityModel, letters: Path, text: Scored
) -> None:
    """However a text is cut, and whatever follows: in the definition, a row has no later keys."""
    wanted = stock_logits(letters, text.ids, "literal_selection", share=1 / 8)
    wanted = wanted[text.positions.start : text.positions.stop]
    method, read = _method("1/8"), []
    for one_by_one, size in ((False, 256), (False, 1024), (False, 90), (True, 256)):
        model.config = model.config.model_copy(update={"chunked_prefill_size": size})
        found = _logits(model, method, text, one_by_one=one_by_one)
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4)
        assert model.replay.selected is not None
        read.append(model.replay.selected.blocks_read(text.positions)[0])
        torch.testing.assert_close(read[-1], read[0], rtol=0, atol=0)
    full = _logits(model, Method("full", {"attention": "full"}), text, one_by_one=False)
    assert (full - wanted).abs().max() > 0.1  # it does make a difference
    assert read[0].min() < 0.9 and read[0][: RECENT + 2 * BLOCK - PROMPT].eq(1).all()


@pytest.mark.long
def test_the_settings_share_is_the_methods_alone(
    model: FidelityModel, text: Scored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full attention reads all, whatever YAML or the environment says; a method may choose."""
    razor = Method("razor", WINDOW, HEADS)
    whole = [_logits(model, own, text, one_by_one=False) for own in (FULL_METHOD, razor)]
    shared = model.config.model_copy(update={"retrieval_share": 0.3})
    monkeypatch.setattr(model, "config", shared)
    monkeypatch.setattr(model, "_read", None)
    for own, logits in zip((FULL_METHOD, razor), whole, strict=True):
        torch.testing.assert_close(_logits(model, own, text, one_by_one=False), logits)
    chosen = Method("razor", {**WINDOW, "retrieval_share": 0.3}, HEADS)
    assert (_logits(model, chosen, text, one_by_one=False) - whole[1]).abs().max() > 1e-3
    assert not Method("x", {"prefill": "exact", "retrieval_share": 0.3}, HEADS).shares_prefill


@pytest.mark.long
@pytest.mark.parametrize("attention", ["full", "razor"])
def test_of_nearly_no_share_all_is_read(model: FidelityModel, text: Scored, attention: str) -> None:
    own = {} if attention == "full" else WINDOW
    whole = Method("whole", {"attention": attention, **own}, None if attention == "full" else HEADS)
    selection = selection_of(1e-30, "slower", HEADS)
    chosen = Method("chosen", {**whole.settings}, whole.retrieval, selection=selection)
    assert whole.fingerprint != chosen.fingerprint
    for one_by_one in (False, True):
        of_whole, of_chosen = (
            _logits(model, method, text, one_by_one=one_by_one) for method in (whole, chosen)
        )
        torch.testing.assert_close(of_chosen, of_whole, rtol=0, atol=1e-4)


def test_tiles_read_what_any_of_their_queries_reads() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (3 * torch.randn(n, 1024, 16, generator=generator) for n in (2, 1, 1))
    selected = SelectedHeads(selection_of("1/8", "mass", ((True,),)), torch.tensor(SLOW), 1024)
    for span in (slice(0, 700), slice(700, 1024)):  # the last tile of the first has 12
        at = torch.arange(span.start, span.stop)
        selected.attend(0, Query(q[None, :, span], 1.0), k[:, span], v[:, span], at)
    own, tile = selected.blocks_read(range(1024))
    _, read = attend_selected(q, k[0], v[0], 1 / 8, SELECTORS["mass"], torch.tensor(SLOW))
    before = torch.arange(1024) // BLOCK + 1
    torch.testing.assert_close(own, read.sum(1) / before, check_dtype=False)
    for begin in (768, 812, 1020):
        first = begin - (begin - 700) % 16
        union = read[first : first + 16].any(0).sum()
        assert tile[begin] == pytest.approx((union / before[begin]).item())
    assert tile[812] > own[812]


@pytest.mark.long
def test_copies_beside_text(
    model: FidelityModel, letters: Path, tmp_path: Path, opens_here: Callable[[object], None]
) -> None:
    opens_here(model)
    own = {"attention": "full", "head_map": None}
    config = FidelityConfig(
        model=str(letters), repeat_at="900,1400", repeat_tokens=100, methods=("full",), ray=False
    )
    (tmp_path / "text").write_text(
        "".join(map(chr, np.random.default_rng(0).integers(97, 123, 1300)))
    )
    task = FidelityTask.plan(config, [tmp_path / "text"])
    [text] = task.texts
    assert text.copies == (range(800, 900), range(1300, 1400))
    assert text.scored.prompt == RECENT + BLOCK
    ids = text.scored.ids
    assert ids[800:900] == ids[128:228] and ids[1300:1400] == ids[228:328]
    # And the text goes on behind a copy where it stopped.
    stock = FidelityTask.plan(config.model_copy(update={"repeat_at": None}), [tmp_path / "text"])
    assert stock.texts[0].scored.ids[:1200] == ids[:800] + ids[900:1300]
    selecting = Method("1/8", own, selection=selection_of("1/8", "slower", HEADS))
    task = FidelityTask(config, task.texts, (*task.methods, selecting))
    summary = run_job(task, config, tmp_path / "run")
    page = write_report(summary.folder)
    full, chosen = (task.run(model, item) for item in task.items())
    assert [(r["begin"], r["end"], "copied" in r) for r in chosen["ranges"]] == [
        (640, 799, False), (800, 899, True), (900, 1299, False), (1300, 1399, True),
    ]  # fmt: skip
    last = chosen["ranges"][-1]
    assert len(last["copied"]) == 4 and 0 < last["blocks"] < last["tiles"] < 1
    assert full["ranges"][-1]["right"] == full["ranges"][-1]["right_full"] == last["right_full"]
    assert "| 1/8 | " in page and f"{last['blocks']:.1%}, {last['right']:.3f} |" in page


def test_repeated_passages_that_are_refused(letters: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("so many words " * 100)
    for ends, count, message in (
        ((1000, 900), 100, r"repeat_at must be ascending, got \[1000, 900\]"),
        ((900, 1000), 200, "text: repeat_at: 900 tokens are too few .* 200 .*: give 968 or more"),
        ((900, 950), 100, "text: repeat_at: 950 tokens are too few .* 100 .*: give 1000 or more"),
        ((1100, 5000), 100, "repeat_at is 5000, but .* holds 4095"),
        ((1100, 4000), 100, "text: the text has too few tokens to repeat passages up to 4000"),
    ):
        with pytest.raises(ConfigError, match=message):
            config = FidelityConfig(
                model=str(letters), methods=("full",), repeat_at=ends, repeat_tokens=count
            )
            FidelityTask.plan(config, [tmp_path / "text"])
    with pytest.raises(ConfigError, match="tokens is the last of repeat_at; leave it out"):
        FidelityConfig(model=str(letters), repeat_at=(1000,), tokens=1000)


@pytest.mark.long
def test_the_needle_model_finds_its_needle_by_chosen_blocks(tmp_path: Path) -> None:
    folder = str(build_needle_model(tmp_path / "needle"))
    config = NeedleGridConfig(
        model=folder, lengths=(3000,), depths=(30,), needles=1, preset="words", threads=1
    )
    named = settings_by_name(("streaming/32", "full/32"))
    with pytest.raises(ConfigError, match="streaming/32: retrieval_share is of no use with"):
        methods_of(config, named)
    [found] = methods_of(config, {"full/32": named["full/32"]})
    assert found.selection is not None and found.selection.share == 1 / 32
    lost = Method(
        "none", found.settings, selection=selection_of("1/2", "none", found.selection.heads)
    )
    task = GridTask.plan(config, [found, lost], preset="words")
    task = pickle.loads(pickle.dumps(task))
    model = ReplayModel(task.config)
    scores = [task.run(model, item)["cells"][0]["score"] for item in task.items()]
    assert scores == [1.0, 0.0]
    # The model's own rule finds one block beside the fixed ones, and most queries none.
    assert (
        methods_of(config, {"own": {"attention": "full", "retrieval_share": "1/32"}})[0].selection
        == found.selection
    )
