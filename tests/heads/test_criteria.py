"""Every criterion on the model made by hand; KVzip's and kvpress's by their definitions."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    PhiConfig,
    PreTrainedModel,
    SmolLM3Config,
)
from transformers.models.phi.modeling_phi import apply_rotary_pos_emb

from razor_dist.config.errors import ConfigError, HeadMapError, ModelError
from razor_dist.heads.decision import Scores
from razor_dist.identify import kvzip, reach
from razor_dist.identify.criterion import Criterion, Sample, head_map, score
from razor_dist.identify.kvzip import Reconstruction, imported_map, repetitions
from razor_dist.identify.onthefly import Change
from razor_dist.identify.razor import ProbeContext, plain_vocabulary, probe_input
from razor_dist.identify.reach import Reach
from razor_dist.identify.settings import (
    KVzipSettings,
    OnTheFlySettings,
    RazorSettings,
    ReachSettings,
)
from razor_dist.models.loader import load_model, model_fingerprint
from razor_dist.models.shape import ModelShape
from razor_dist.models.slower_half import slower_half
from tests.alibi_models import make_alibi
from tests.heads.planted import BOS, HEADS, RETRIEVAL, make_planted, passkeys, prose
from tests.tiny_models import make_tiny, write_random

CPU = torch.device("cpu")
LOCAL = {(0, 0), (2, 1)}  # of the planted heads: the previous token's, and the current one's
Case = tuple[Iterable[Sample], Criterion]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return load_model(
        make_planted(tmp_path_factory.mktemp("planted")), device=CPU, dtype=torch.float32
    )


def _repeating(model: PreTrainedModel, recent: int) -> Case:
    settings = KVzipSettings(samples=2, tokens=200, recent=recent)
    shape = ModelShape.from_config(model.config)
    return repetitions(prose(), settings, shape, ([BOS], [])), Reconstruction(model, settings)


def _reading(model: PreTrainedModel) -> Case:
    settings = ReachSettings(samples=2, tokens=300, length=100)
    shape = ModelShape.from_config(model.config)
    return reach.texts(prose(), settings, shape, [BOS]), Reach(model, settings)


def _probing(model: PreTrainedModel) -> Case:
    settings, shape = RazorSettings(tokens=100), ModelShape.from_config(model.config)
    tokens, ids = probe_input(shape, plain_vocabulary(None, model.config), settings)
    sample = Sample(ids, torch.ones(len(ids), dtype=torch.bool))
    return [sample], ProbeContext(shape, tokens, settings.repeats)


def _cutting(model: PreTrainedModel) -> Case:
    settings = OnTheFlySettings(sinks=4, recent=24)
    return map(passkeys().sample, range(2)), Change(model, settings)


@pytest.mark.parametrize(
    ("case", "least", "most"),
    [
        pytest.param(_probing, 0.3, 0.01, id="razor"),
        pytest.param(_cutting, 0.5, 0.03, id="onthefly"),
        pytest.param(lambda model: _repeating(model, recent=4), 0.45, 0.03, id="kvzip"),
    ],
)
def test_the_planted_heads_are_found(
    planted: PreTrainedModel, case: Any, least: float, most: float
) -> None:
    """Retrieval heads score at least ``least``, all others at most ``most``.

    `tests/heads/test_duo.py` has trained gates.
    """
    scores = score(planted, *case(planted))
    others = [scores[i][j] for i, j in HEADS if (i, j) not in RETRIEVAL]
    assert min(scores[i][j] for i, j in RETRIEVAL) > least > most > max(others)
    found = head_map("planted", planted.config, "m", {"kind": scores}, {}, sparsity=0.8)
    assert {(i, j) for i, j in HEADS if found.retrieval[i][j]} == RETRIEVAL
    found.validate(ModelShape.from_config(planted.config), model_fingerprint(planted.config))


@pytest.mark.parametrize("case", [_probing, _cutting, _reading])
def test_scores_that_are_not_finite_are_refused(case: Any, tmp_path: Path) -> None:
    model: Any = load_model(make_planted(tmp_path), device=CPU, dtype=torch.float32)
    model.model.layers[1].self_attn.k_proj.weight.data.fill_(torch.nan)
    with pytest.raises(ModelError, match="the score of head 0 in layer 1 is nan"):
        score(model, *case(model))


def test_kvzip_takes_a_head_of_the_previous_token_for_one_that_retrieves(
    planted: PreTrainedModel,
) -> None:
    """By definition: the request's first token looks at the text's last. ``recent`` mends it."""
    scores = score(planted, *_repeating(planted, recent=0))
    high = {(i, j) for i, j in HEADS if scores[i][j] > 0.45}
    assert high == {*RETRIEVAL, (0, 0)} and scores[0][0] > 0.99


def test_reach_knows_local_heads_and_no_more(planted: PreTrainedModel) -> None:
    """By definition: what looks everywhere, at the first token, or for content has one score."""
    scores = score(planted, *_reading(planted))
    for i, j in HEADS:
        # One or two places of 100, or all alike: the mean of 1 ... 100, by 100.
        want = {(0, 0): 0.02, (2, 1): 0.01}.get((i, j), 0.505)
        assert scores[i][j] == pytest.approx(want, abs=2e-3), (i, j)
    assert LOCAL.isdisjoint(RETRIEVAL)


def _stock(path: Path, sample: Sample) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Attention matrices ``[H, T, T]`` of stock transformers, and queries, keys before rotation."""
    stock = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    rows: dict[str, list[Tensor]] = {"q": [], "k": []}
    for layer in stock.model.layers:
        attention = layer.self_attn
        for name in rows:
            # Normed after the projection in Qwen3.
            module = getattr(attention, f"{name}_norm", None) or getattr(attention, f"{name}_proj")
            module.register_forward_hook(lambda _, __, out, rows=rows[name]: rows.append(out[0]))
    with torch.no_grad():
        attentions = stock(sample.ids[None], output_attentions=True).attentions
    return [x[0] for x in attentions], rows["q"], rows["k"]


@pytest.mark.parametrize("family", ["llama", "glm"])
def test_kvzip_is_the_largest_weight_of_attention_matrices(family: str, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path)
    model = load_model(path, device=CPU, dtype=torch.float32)
    shape = ModelShape.from_config(model.config)
    generator = torch.Generator().manual_seed(3)
    settings = KVzipSettings(tokens=150, recent=7)
    # Two words before the text, 9 between it and its repetition.
    samples = []
    for _ in range(2):
        text, rest = torch.randint(4, 190, (150,), generator=generator), torch.arange(20, 31)
        ids = torch.cat([rest[:2], text, rest[2:], text])
        samples.append(Sample(ids, torch.arange(len(ids)) >= 152))
    scores = torch.tensor(score(model, samples, Reconstruction(model, settings)))
    want = torch.zeros_like(scores)
    for one in samples:
        for layer, weights in enumerate(_stock(path, one)[0]):
            largest = weights[:, 152:, 2 : 2 + 150 - 7].amax((1, 2))
            want[layer] = torch.maximum(
                want[layer], largest.unflatten(0, (shape.kv_heads, -1)).amax(1)
            )
    torch.testing.assert_close(scores, want, atol=1e-5, rtol=1e-4)


def _without_rotary_layer(path: Path) -> Path:
    """A model whose layer 1 knows no positions."""
    return write_random(
        SmolLM3Config(
            hidden_size=64, intermediate_size=96, vocab_size=192, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, no_rope_layers=[1, 0, 1],
            bos_token_id=None, eos_token_id=2, pad_token_id=0,
        ),
        path,
    )  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "glm", "qwen3", "smollm3"])
def test_reach_is_the_area_under_the_weights_of_means(family: str, tmp_path: Path) -> None:
    other = family == "smollm3"
    path = _without_rotary_layer(tmp_path) if other else make_tiny(family, tmp_path)
    model = load_model(path, device=CPU, dtype=torch.float32)
    shape, length = ModelShape.from_config(model.config), 60
    generator = torch.Generator().manual_seed(3)
    samples = [
        Sample(torch.randint(4, 190, (n,), generator=generator), torch.ones(n, dtype=torch.bool))
        for n in (90, 200)
    ]
    found = torch.tensor(score(model, samples, Reach(model, ReachSettings(length=length))))
    stock = AutoModelForCausalLM.from_pretrained(path)
    cos, sin = stock.model.rotary_emb(torch.zeros(1), torch.arange(length)[None])
    kept = sys.modules[type(stock.model).__module__].apply_rotary_pos_emb
    rotate = getattr(kept, "original", kept)  # another model may have replaced it
    want = torch.zeros_like(found)
    for one in samples:
        for layer, (q, k) in enumerate(zip(*_stock(path, one)[1:], strict=True)):
            means = (x.reshape(len(one.ids), -1, shape.head_dim).mean(0) for x in (q, k))
            q_1HLD, k_1KLD = (x[None, :, None].repeat(1, 1, length, 1) for x in means)
            if not other or layer != 1:
                q_1HLD, k_1KLD = rotate(q_1HLD, k_1KLD, cos, sin)
            for head in range(shape.query_heads):
                at = q_1HLD[0, head, -1] @ k_1KLD[0, head // shape.group].T
                weights = (at * shape.head_dim**-0.5).softmax(-1).tolist()
                reached = sum((length - t) / length * w for t, w in enumerate(weights))
                want[layer, head // shape.group] += reached / shape.group / len(samples)
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-3)


def test_a_part_of_a_head_may_be_rotated_as_phis() -> None:
    config = PhiConfig(
        hidden_size=64, num_attention_heads=4, num_hidden_layers=1, partial_rotary_factor=0.5,
        intermediate_size=64, vocab_size=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(5)[None])
    q, k = torch.randn(2, 1, 4, 5, 16)
    found = reach._rotary_function(model)(q, k, cos, sin)
    for turned, x, own in zip(
        found, (q, k), apply_rotary_pos_emb(q[..., :8], k[..., :8], cos, sin), strict=True
    ):
        assert torch.equal(turned, torch.cat([own, x[..., 8:]], -1))


def test_norms_behind_the_rotation_are_refused() -> None:
    config = HunYuanDenseV1Config(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1,
        intermediate_size=64, vocab_size=64, head_dim=16,
    )  # fmt: skip
    with pytest.raises(ModelError, match="normalise queries and keys behind their rotation"):
        Reach(AutoModelForCausalLM.from_config(config), ReachSettings())


def test_a_model_whose_rotary_embeddings_are_left_out() -> None:
    """As of Granite 4, whose code has them for other models of its type."""
    config = GraniteMoeHybridConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1,
        intermediate_size=64, shared_intermediate_size=64, vocab_size=64, num_local_experts=0,
        num_experts_per_tok=0, layer_types=["full_attention"], position_embedding_type=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match="have no rotary embeddings"):
        Reach(model, ReachSettings())
    with pytest.raises(ModelError, match="retrieval_share is for models with rotary embeddings"):
        slower_half(model, 16)


def test_samples_that_cannot_be(planted: PreTrainedModel, tmp_path: Path) -> None:
    shape = ModelShape.from_config(planted.config)
    with pytest.raises(ConfigError, match="holds texts of up to 2044 tokens twice"):
        repetitions(prose(), KVzipSettings(tokens=2045), shape, ([BOS], []))
    with pytest.raises(ConfigError, match="holds texts of up to 4095"):
        reach.texts(prose(), ReachSettings(tokens=4096), shape, [BOS])
    bloom = load_model(make_alibi("bloom", tmp_path), device=CPU, dtype=torch.float32)
    with pytest.raises(ModelError, match="have no rotary embeddings"):
        Reach(bloom, ReachSettings())


SCORES = [[0.25, 1.0], [0.75, 0.5], [1.0, 0.125]]


def save_scores(path: Path, scores: Any = SCORES, dtype: torch.dtype = torch.float16) -> Path:
    """A file as KVzip's ``test.py --save_head_score`` writes it."""
    torch.save(torch.tensor(scores, dtype=dtype), path)
    return path


def test_published_scores_become_a_head_map(tmp_path: Path) -> None:
    config = tiny_config()
    prose_file = save_scores(tmp_path / "tiny-scbench_qa_eng-0.pt", dtype=torch.bfloat16)
    found = imported_map([prose_file], "m", config)
    assert found.method == "kvzip" and found.settings["files"] == [prose_file.name]
    # 0.4 of six heads stream: two of them.
    assert found.settings["sparsity"] == 0.4
    assert found.retrieval == ((False, True), (True, True), (True, False))
    code = save_scores(tmp_path / "code.pt", [[[0.5, 0.0], [0.0, 0.875], [0.25, 0.0]]])
    alone = save_scores(tmp_path / "alone.pt", [[[0.5]], [[0.0]], [[0.25]]])  # one KV head each
    one = tiny_config()
    one.num_key_value_heads = 1
    assert imported_map([alone], "m", one).kv_scores == {kvzip.KIND: ((0.5,), (0.0,), (0.25,))}
    both = imported_map([prose_file, code], "m", config, threshold=0.8)
    want: Scores = ((0.5, 1.0), (0.75, 0.875), (1.0, 0.125))
    assert both.kv_scores == {kvzip.KIND: want}
    assert both.retrieval == ((False, True), (False, True), (True, False))


def tiny_config() -> Any:
    return LlamaConfig(
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, hidden_size=32
    )


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"no archive", "no file of KVzip's head scores: torch.save wrote no tensor there$"),
        ({"a": 1}, r"must hold a tensor \[layers, KV heads\], got dict"),
        ([0.5, 0.25], r"got \[2\]"),
        ([[0.5, 1.5], [0.5, 0.5]], "must be from 0 to 1"),
        ([[0.5, 0.5, 0.5]] * 3, "3 layers and 3 KV heads, but 'm' has 3 and 2"),
    ],
)
def test_files_of_another_form_are_refused(content: Any, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "scores.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content if isinstance(content, dict) else torch.tensor(content), file)
    with pytest.raises(HeadMapError, match=problem):
        imported_map([file], "m", tiny_config())
    with pytest.raises(HeadMapError, match=r"give files of one model|no file of|must"):
        imported_map([save_scores(tmp_path / "whole.pt"), file], "m", tiny_config())
