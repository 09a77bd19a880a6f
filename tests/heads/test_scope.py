"""RazorAttention's Theorem 1 on real attention weights, and the maps made from it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    MptConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from typer.testing import CliRunner

from razor_dist.cache.policy import StreamingPolicy
from razor_dist.commands.identify import identify
from razor_dist.config.errors import ConfigError, HeadMapError
from razor_dist.heads.head_map import HeadMap
from razor_dist.identify.duo.pattern import write_pattern
from razor_dist.identify.scope import scopes, window_of
from razor_dist.identify.settings import Bound
from razor_dist.models.adapters import adapter
from razor_dist.models.alibi import LayerWeights
from razor_dist.models.loader import model_fingerprint, read_config
from razor_dist.models.shape import ModelShape
from razor_dist.parallel.comm import Communicator
from tests.alibi_models import make_alibi
from tests.cases import Case, logits_of, make_runner
from tests.heads.command import identify_heads
from tests.logits import stock_logits, tokens_of
from tests.tiny_models import make_tiny
from tests.tokenizer import write_letters

TOKENS = 120


@st.composite
def models(draw: st.DrawFn) -> tuple[PretrainedConfig, PreTrainedModel, Tensor]:
    """A random model of transformers, and tokens."""
    heads = draw(st.sampled_from([2, 4, 6]))
    if draw(st.booleans()):
        config = BloomConfig(vocab_size=64, hidden_size=8 * heads, n_layer=2, n_head=heads)
    else:
        attention = {"clip_qkv": draw(st.sampled_from([None, 0.3, 2.0]))}
        config = MptConfig(
            vocab_size=64,
            d_model=8 * heads,
            n_layers=2,
            n_heads=heads,
            max_seq_len=TOKENS,
            attn_config=attention,
        )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    wide = draw(st.floats(0.01, 0.4))
    gain, shift = draw(st.floats(0.2, 2.0)), draw(st.floats(0.0, 0.5))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            norm = "norm" in name or "ln_f" in name
            if norm and name.endswith("weight"):
                parameter.copy_(gain * (1 + 0.3 * noise))
            else:
                parameter.copy_((shift if norm else wide) * noise)
    tokens = torch.randint(0, 64, (1, TOKENS), generator=generator)
    return config, model, tokens


@settings(max_examples=40, deadline=None)
@given(drawn=models(), epsilon=st.sampled_from([0.1, 0.01, 0.001]))
def test_no_weight_beyond_the_scope_exceeds_epsilon(
    drawn: tuple[PretrainedConfig, PreTrainedModel, Tensor], epsilon: float
) -> None:
    config, stock, tokens = drawn
    model_class = adapter(config)
    assert model_class is not None
    ours = model_class(config)
    ours.load_state_dict(stock.state_dict())
    with torch.inference_mode():
        attentions = stock(tokens, output_attentions=True).attentions
    place = torch.arange(TOKENS)
    distance = place[:, None] - place
    for layer, weights in enumerate(attentions):
        for bound in ("paper", "strict"):
            found = scopes(
                ours.layer_weights(layer), ours.slopes(torch.device("cpu")), epsilon, bound
            )
            for head, scope in enumerate(found.tolist()):
                beyond = weights[0, head][distance >= scope]
                assert not beyond.numel() or beyond.max() <= epsilon


def test_the_scope_of_a_random_model_is_within_its_context() -> None:
    """So that the theorem's test is about something: most scopes of such models are short."""
    generator = torch.Generator().manual_seed(0)
    query, key = (0.1 * torch.randn(4, 8, 32, generator=generator) for _ in range(2))
    weights = LayerWeights(query, None, key, torch.ones(32), torch.zeros(32), 8**-0.5)
    found = scopes(weights, torch.tensor([0.25, 0.0625, 0.0156, 0.0039]), 0.001)
    assert found[0] < TOKENS < found[-1]


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_formula_on_dense_matrices(clip: float | None) -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 3, 10, generator=generator)
    key = torch.randn(1, 3, 10, generator=generator)
    gain, shift = torch.rand(10, generator=generator), torch.rand(10, generator=generator)
    slopes, epsilon, scale = torch.tensor([0.5, 0.1]), 0.01, 0.3
    weights = LayerWeights(query, None, key, gain, shift, scale, clip)
    for head, got in enumerate(scopes(weights, slopes, epsilon).tolist()):
        squares = float(gain.square().sum() + shift.square().sum())
        w_q, w_k = query[head].double(), key[0].double()
        content = 2 * float(torch.linalg.svdvals(w_q.T @ w_k)[0]) * squares * scale
        if clip is not None:
            norms = [float(torch.linalg.svdvals(w)[0]) * math.sqrt(2 * squares) for w in (w_q, w_k)]
            content = scale * math.prod(min(norm, clip * math.sqrt(3)) for norm in norms)
        assert got == pytest.approx((content - math.log(epsilon)) / slopes[head].item(), rel=1e-6)


def test_the_strict_bound_holds_where_the_papers_does_not() -> None:
    """Inputs along the one coordinate of gain, and a query whose own key it is turned away from."""
    width, slope, epsilon = 64, 0.5, 0.001
    gain = torch.zeros(width)
    gain[0] = 1.0
    query = torch.zeros(1, 1, width)
    query[0, 0, 0] = 0.5**0.5
    weights = LayerWeights(query, None, -query, gain, torch.zeros(width), 1.0)

    def weight_at(distance: int) -> float:
        """Weight of the one other key, the first, for the query at that distance."""
        hidden = torch.zeros(distance + 1, width, dtype=torch.float64)
        hidden[:, 0], hidden[0, 0] = 1.0, -1.0
        x = torch.nn.functional.layer_norm(hidden, (width,)) * gain
        scores = (x @ query[0, 0].double())[-1] * (x @ -query[0, 0].double())
        scores = scores - slope * torch.arange(distance, -1, -1)
        return float(torch.softmax(scores, 0)[0])

    def scope(bound: Bound) -> float:
        return float(scopes(weights, torch.tensor([slope]), epsilon, bound))

    assert weight_at(math.ceil(scope("paper"))) > 0.99
    assert scope("strict") < 1.2 * 120
    assert weight_at(math.ceil(scope("strict"))) <= epsilon
    assert weight_at(100) > 0.9  # by far the most of what it allows is reached


@given(scope=st.floats(0.01, 1e6), context=st.integers(1, 200000))
def test_windows_cover_their_scope_with_little_to_spare(scope: float, context: int) -> None:
    sizes = [size for n in range(21) for size in (2**n, 3 * 2**n)]
    fitting = min(size for size in sizes if size >= scope)
    assert fitting <= 1.5 * math.ceil(scope)
    assert window_of(scope, context) == (fitting if fitting < context else None)


@pytest.mark.parametrize(("scope", "window"), [(1536.0, 1536), (1536.1, None), (1600.0, None)])
def test_a_window_that_would_hold_the_context_makes_a_retrieval_head(
    scope: float, window: int | None
) -> None:
    assert window_of(scope, 2048) == window


@pytest.fixture(scope="module")
def bloom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Narrow weights, so that scopes are short.
    folder = make_alibi("bloom", tmp_path_factory.mktemp("models") / "tiny-bloom", wide=0.03)
    write_letters(folder)
    return folder


def test_identify_chooses_the_method_and_the_map_loses_next_to_nothing(
    bloom: Path, tmp_path: Path
) -> None:
    out = tmp_path / "map.json"
    text = identify_heads(str(bloom), "--out", str(out), "--context-tokens", "200")
    found = HeadMap.load(out)
    config = read_config(bloom)
    found.validate(ModelShape.from_config(config), model_fingerprint(config))
    assert (found.method, found.settings["epsilon"], found.settings["context"]) == (
        "alibi",
        0.001,
        200,
    )
    assert found.windows is not None and "kept " in text and "windows of streaming heads" in text
    for flags, windows, row in zip(
        found.retrieval, found.windows, found.scores["scope"], strict=True
    ):
        for flag, window, scope in zip(flags, windows, row, strict=True):
            # Windows come in sizes of 128, 192, 256: beyond 192 it would be the context.
            assert flag is (scope > 192) is (window is None)
            assert window is None or window >= scope
    # Steep heads see little: windows of different lengths, and real caches of those lengths.
    lengths = {w for row in found.windows for w in row if w is not None}
    assert len(lengths) > 2 and max(lengths) <= 192 and any(map(any, found.retrieval))
    policy = StreamingPolicy(block=8)
    tokens = tokens_of(300)
    case = Case(
        str(bloom), found.retrieval, policy, tokens[:290], tokens[290:], windows=found.windows
    )
    comm = Communicator(None)
    caches = make_runner(comm, case).caches.streaming
    assert [c.k.shape[1] for c in caches] == [1 + w + 7 for w in sorted(lengths)]
    got = logits_of(comm, case)
    want = stock_logits(bloom, tokens)[289:]
    assert got is not None
    error = (got - want).abs().max() / want.abs().max()
    assert 0 < error < 0.01  # what is left out is below epsilon a token


def test_identify_refuses_the_other_methods(
    bloom: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    out = str(tmp_path / "map.json")
    for method in ("razor", "onthefly"):
        with pytest.raises(ConfigError, match=f"method {method} is for models .* tiny-bloom is"):
            identify_heads(method, str(bloom), "--out", out)
    refused = CliRunner().invoke(identify, [str(bloom), "--out", out, "--tokens", "40"])
    assert refused.exit_code == 2 and "No such option: --tokens" in refused.output
    llama = make_tiny("llama", tmp_path_factory.mktemp("models") / "tiny-llama")
    with pytest.raises(ConfigError, match=r"method alibi is for .* tiny-llama is not"):
        identify_heads("alibi", str(llama), "--out", out)


@pytest.mark.long
def test_verify_tests_the_windows_of_the_map(bloom: Path, tmp_path: Path) -> None:
    """Not the settings' window of 4000 tokens or more, in which 400 tokens would all be."""
    out, prose = tmp_path / "map.json", "A sentence of some length is what a haystack is made of. "
    (tmp_path / "prose.txt").write_text(prose * 10)
    options = ["--context-tokens", "200", "--verify", "--haystack", str(tmp_path)]
    text = identify_heads(str(bloom), "--out", str(out), *options, "--verify-tokens", "400")
    found = HeadMap.load(out)
    checked = found.verification
    assert checked is not None and (checked.documents, checked.tokens) == (5, 400)
    assert checked.settings == {"prefill": "local", "block": 128}
    assert "local prefill: full attention finds" in str(checked)
    assert f"verified on {checked}" in text
    assert found.kv_fraction < checked.kv_bytes / checked.kv_bytes_full < 1
    windows = [w for row in found.windows or () for w in row if w is not None]
    with pytest.raises(ConfigError) as refused:
        identify_heads(str(bloom), "--out", str(out), *options, "--verify-tokens", "120")
    assert str(refused.value).endswith(
        f"nothing: a streaming head's window of at least {min(windows)} tokens holds a document of "
        "120 whole; give more --verify-tokens, up to 3964"
    )
    with pytest.raises(ConfigError, match="every head keeps the whole context"):
        identify_heads(str(bloom), "--out", str(out), "--context-tokens", "1", *options[2:])
    assert HeadMap.load(out) == found  # what is refused is not written


def test_windows_in_the_file(bloom: Path, tmp_path: Path) -> None:
    out = tmp_path / "map.json"
    identify_heads("alibi", str(bloom), "--out", str(out), "--bound", "strict")
    found = HeadMap.load(out)
    again = tmp_path / "again.json"
    found.save(again)
    assert HeadMap.load(again) == found and again.read_text() == out.read_text()
    with pytest.raises(HeadMapError, match=r"window of its own.* cannot be exported"):
        write_pattern(found, tmp_path / "pattern")
    assert found.windows is not None
    row = found.windows[0]
    text = out.read_text()
    start = text.index('"windows"')
    first = str(list(row)).replace("None", "null")
    for wrong, message in (
        (first.replace(str(row[0]), "null", 1), "layer 0, KV head 0 is a streaming head"),
        (first.replace(str(row[0]), "0", 1), "greater than or equal to 1"),
        (first.replace(f"{row[0]}, ", "", 1), "windows: needs 3 layers of 8 KV heads"),
    ):
        again.write_text(text[:start] + text[start:].replace(first, wrong, 1))
        with pytest.raises(HeadMapError, match=message):
            HeadMap.load(again)
