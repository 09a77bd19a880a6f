"""RazorAttention's probe against the definition, and the committed head maps against the probe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from razor_dist.config.errors import ConfigError
from razor_dist.heads.decision import Scores, decide
from razor_dist.heads.head_map import HeadMap, shipped_head_map
from razor_dist.identify.razor import ProbeContext, head_map, plain_vocabulary, probe, probe_input
from razor_dist.identify.settings import RazorSettings
from razor_dist.kernels.query import Query
from razor_dist.models.loader import load_model, model_fingerprint, read_config
from razor_dist.models.shape import ModelShape
from razor_dist.models.smollm2 import embedded_model
from tests.heads.planted import ECHO, HEADS, INDUCTION, RETRIEVAL, make_planted
from tests.heads.test_gates import Largest
from tests.logits import stock_run
from tests.tiny_models import make_tiny
from tests.tokenizer import smollm2_tokenizer

CPU = torch.device("cpu")


def _literal_scores(attention_HTT: Tensor, ids: list[int]) -> dict[str, tuple[Tensor, Tensor]]:
    """Both readings of both scores, token by token from the attention matrix."""
    found = {}
    for kind, shift in (("induction", 1), ("echo", 0)):
        pairs, per_token = [], []
        for i, token in enumerate(ids):
            earlier = [t for t in range(i) if ids[t] == token]
            weights = [attention_HTT[:, i, t + shift] for t in earlier]
            pairs += weights
            if weights:
                per_token.append(torch.stack(weights).mean(0))
        found[kind] = torch.stack(pairs).mean(0), torch.stack(per_token).mean(0)
    return found


@pytest.mark.parametrize("family", ["llama", "glm"])
def test_scores_equal_those_of_the_attention_matrices(family: str, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path)
    config = read_config(path)
    settings = RazorSettings(tokens=23, repeats=4, seed=5)
    vocabulary = plain_vocabulary(None, config)
    model = load_model(path, device=CPU, dtype=torch.float32)
    result = probe(model, vocabulary, settings)

    order = torch.randperm(len(vocabulary), generator=torch.Generator().manual_seed(5))
    ids = vocabulary[order[:23]].repeat(4)
    attentions = stock_run(path, ids.tolist(), output_attentions=True).attentions
    for layer, attention in enumerate(attentions):
        for kind, (by_pair, by_token) in _literal_scores(attention[0], ids.tolist()).items():
            got = torch.tensor(result.scores[kind][layer])
            torch.testing.assert_close(got, by_pair, atol=1e-6, rtol=1e-4)
            got = torch.tensor(result.per_token[kind][layer])
            torch.testing.assert_close(got, by_token, atol=1e-6, rtol=1e-4)


def test_constructed_attention() -> None:
    """Heads built to attend where the definition looks get the scores that follow from it."""
    n, repeats = 5, 4
    total = n * repeats
    shape = ModelShape(
        layers=1, query_heads=4, kv_heads=2, head_dim=total, vocab_size=8, max_positions=total
    )
    # Key t is the t-th unit vector, so a query's coordinates are its scores.
    k = torch.eye(total).repeat(2, 1, 1)
    q = torch.zeros(4, total, total)
    for i in range(n, total):
        q[0, i, i - n] = 100.0  # echo, the latest occurrence only
        q[1, i, i % n + 1 : i - n + 2 : n] = 100.0  # induction, all occurrences alike
        q[2, i, i % n] = 100.0  # echo, the first occurrence only
    # Head 3 attends uniformly.
    context = ProbeContext(shape, n, repeats)
    out = context.attend(0, Query.grouped(q, 1.0, None, 2), k, k)
    torch.testing.assert_close(out[n, 0], torch.eye(total)[0])
    result = context.by_query_head()
    one_of_r = (1 + 1 / 2 + 1 / 3) / 3  # one occurrence of r has all the weight, r = 1, 2, 3
    uniform = sum((i // n) / (i + 1) for i in range(n, total)) / (6 * n)
    assert result.scores["echo"][0] == pytest.approx((3 / 6, 0.0, 3 / 6, uniform), abs=1e-5)
    assert result.scores["induction"][0] == pytest.approx((0.0, 3 / 6, 0.0, uniform), abs=1e-5)
    assert result.per_token["echo"][0][0] == pytest.approx(one_of_r, abs=1e-5)
    assert result.per_token["induction"][0][1] == pytest.approx(one_of_r, abs=1e-5)


def test_no_attention_matrix_is_held() -> None:
    heads, total, dim = 4, 2048, 8
    shape = ModelShape(
        layers=1, query_heads=heads, kv_heads=2, head_dim=dim, vocab_size=8, max_positions=total
    )
    q, kv = torch.randn(2, heads // 2, total, dim), torch.randn(2, total, dim)
    with Largest() as largest:
        ProbeContext(shape, total // 4, 4).attend(0, Query(q, 0.3), kv, kv)
    assert largest.elements <= heads * total * dim


def test_finds_the_planted_heads(tmp_path: Path) -> None:
    path = make_planted(tmp_path)
    model = load_model(path, device=CPU, dtype=torch.float32)
    # 2 of the 12 query heads by each score: one group.
    settings = RazorSettings(induction_percent=16.7, echo_percent=16.7, tokens=250)
    result = probe(model, plain_vocabulary(None, model.config), settings)
    found = head_map("planted", model, result, settings)
    planted = {"induction": INDUCTION, "echo": ECHO}
    for kind, (layer, head) in planted.items():
        own = [(layer, 2 * head), (layer, 2 * head + 1)]
        assert sorted(found.selected[kind]) == own
        scores = {(i, j): x for i, row in enumerate(found.scores[kind]) for j, x in enumerate(row)}
        others = [score for pair, score in scores.items() if pair not in own]
        assert min(scores[pair] for pair in own) > 0.3 > 0.003 > max(others)
    # Each of three repeats gives all its weight to what it has, one to three times: 3 of 6 pairs.
    assert found.scores["induction"][1][0] == pytest.approx(0.5, abs=0.01)
    assert {(i, j) for i, j in HEADS if found.retrieval[i][j]} == RETRIEVAL


def test_bfloat16_finds_the_same_order_of_scores(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path)
    vocabulary = plain_vocabulary(None, read_config(path))
    settings = RazorSettings(tokens=64)
    scores = []
    for dtype in (torch.float32, torch.bfloat16):
        result = probe(load_model(path, device=CPU, dtype=dtype), vocabulary, settings)
        scores.append(torch.tensor(result.scores["induction"] + result.scores["echo"]).flatten())
    assert torch.corrcoef(torch.stack(scores))[0, 1] > 0.99


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_cpu(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path)
    vocabulary = plain_vocabulary(None, read_config(path))
    settings = RazorSettings(tokens=64)
    found = []
    for device in (CPU, torch.device("cuda")):
        result = probe(load_model(path, device=device, dtype=torch.float32), vocabulary, settings)
        found.append(torch.tensor(result.scores["induction"]))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-2)


def test_as_many_tokens_as_fit(tmp_path: Path) -> None:
    shape = ModelShape(
        layers=1, query_heads=4, kv_heads=2, head_dim=8, vocab_size=99, max_positions=8192
    )

    def tokens(vocabulary: int, **settings: int) -> int:
        return probe_input(shape, torch.arange(vocabulary), RazorSettings(**settings))[0]

    assert tokens(50_000) == 2048
    assert tokens(50_000, tokens=100) == 100
    assert tokens(300) == 300
    with pytest.raises(ConfigError, match="repeats is 5000"):
        tokens(300, repeats=5000)


def test_vocabulary_leaves_special_tokens_out(tmp_path: Path) -> None:
    config = read_config(embedded_model())
    assert plain_vocabulary(smollm2_tokenizer(), config).tolist() == list(range(17, 49152))
    path = make_tiny("glm", tmp_path)
    assert plain_vocabulary(None, read_config(path)).tolist() == [1, *range(4, 192)]


@pytest.fixture(scope="module", params=[8, pytest.param(30, marks=pytest.mark.slow)])
def embedded_scores(request: pytest.FixtureRequest) -> dict[str, Scores]:
    """Scores of the embedded model's first layers, which do not depend on the others."""
    torch.set_num_threads(2)
    folder = embedded_model()
    model: Any = load_model(folder, device=CPU, dtype=torch.float32)
    model.model.layers = model.model.layers[: request.param]
    found = probe(model, plain_vocabulary(smollm2_tokenizer(), model.config), RazorSettings())
    return {kind: rows[: request.param] for kind, rows in found.scores.items()}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "kv_heads"), [("smollm2-14-1", 22), ("smollm2", 39)], ids=["14+1", "28+2"]
)
def test_committed_maps_are_what_the_probe_decides(
    name: str, kv_heads: int, embedded_scores: dict[str, Scores]
) -> None:
    committed = HeadMap.load(shipped_head_map(name))
    config = read_config(embedded_model())
    committed.validate(ModelShape.from_config(config), model_fingerprint(config))
    induction, echo = (committed.settings[f"{kind}_percent"] for kind in ("induction", "echo"))
    # The scores in the file decide what the file says, and so they do with those probed here.
    found = {
        kind: embedded_scores[kind] + rows[len(embedded_scores[kind]) :]
        for kind, rows in committed.scores.items()
    }
    for scores in (committed.scores, found):
        assert decide(scores, induction, echo, group=3).retrieval == committed.retrieval
    assert sum(map(sum, committed.retrieval)) == kv_heads
    for kind, rows in embedded_scores.items():
        stored = torch.tensor(committed.scores[kind][: len(rows)])
        torch.testing.assert_close(torch.tensor(rows), stored, rtol=1e-3, atol=1e-6)
