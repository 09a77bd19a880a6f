"""BLOOM, MPT and Baichuan: their adapters against transformers and the literal reference.

Over ranks, prefill cuts and decode, with all heads in full and with a window per streaming head.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MptConfig
from transformers.models.bloom import modeling_bloom
from transformers.models.mpt import modeling_mpt

from razor_dist.config.errors import ModelError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.build import build_engine
from razor_dist.kernels import alibi
from razor_dist.models.alibi import press_slopes
from razor_dist.models.loader import load_model, model_fingerprint, read_config
from razor_dist.models.mpt import Model as Mpt
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.zigzag import chunks
from razor_dist.protocol.step_plan import Fork
from tests.alibi_models import FAMILIES, Local, literal_alibi
from tests.cases import (
    Case,
    all_full,
    answer,
    logits_of,
    make_runner,
    model_and_shape,
    one_chunk,
    prefill,
)
from tests.engine.recorded import case_of, story
from tests.logits import POLICY, assert_any_cut, assert_same, stock_logits, tokens_of
from tests.ranks import Ranks
from tests.tiny_models import Tiny, save_head_map

LITERAL = dataclasses.asdict(POLICY)


def want_of(path: Path, family: str, tokens: tuple[int, ...]) -> torch.Tensor:
    """Every position's logits: stock transformers', or the literal ones where it has no model."""
    if family == "baichuan":
        return literal_alibi(path, list(tokens)).float()
    return stock_logits(path, tokens)


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 40, 112])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    bloom = modeling_bloom._get_alibi_slopes(heads, torch.device("cpu"))
    torch.testing.assert_close(torch.tensor(press_slopes(heads)), bloom, rtol=1e-5, atol=0)
    for most in (8, 16):
        config = MptConfig(n_heads=heads, attn_config={"alibi_bias_max": most})
        # The bias of the key before the last one is minus the slope.
        stock = -modeling_mpt.build_mpt_alibi_tensor(heads, 2, most)[:, 0, 0]
        torch.testing.assert_close(torch.tensor(Mpt.slopes_of(config)), stock, rtol=1e-6, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_literal_reference_is_the_model(family: str, tiny: Tiny) -> None:
    tokens = tokens_of(70)
    want = want_of(tiny(family), family, tokens)
    assert_same(literal_alibi(tiny(family), list(tokens)).float(), want)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_all_retrieval_is_the_stock_model(family: str, ranks: Ranks, tiny: Tiny) -> None:
    n, k = 150, 5
    tokens = tokens_of(n + k, seed=1)
    path = tiny(family)
    want = want_of(path, family, tokens)[n - 1 :]
    case = Case(str(path), all_full(path), POLICY, tokens[:n], tokens[n:])
    assert_any_cut(ranks, case, want, (1, 2, 4), (8192, 64, 37))
    whole = dataclasses.replace(case, prompt=tokens, forced=())
    assert_any_cut(ranks, whole, want[-1:], (2,), (70,))


def mixed(path: Path) -> tuple[Any, Any, Local]:
    """Retrieval flags, windows and the literal settings: a layer of each kind, and mixed ones."""
    _, shape = model_and_shape(str(path))
    heads, flags, windows, local = shape.kv_heads, [], [], []
    for layer in range(shape.layers):
        row: list[tuple[bool, int | None]] = [
            (False, None) if layer == 0 else (h % 3 == layer % 3, (None, 5, 24, 61)[h % 4])
            for h in range(heads)
        ]
        if layer == 1:  # several windows, no retrieval head
            row = [(False, (9, 33, 9, 70)[h % 4]) for h in range(heads)]
        flags.append(tuple(yes for yes, _ in row))
        windows.append(tuple(None if yes else window for yes, window in row))
        local.append([None if yes else _settings(window) for yes, window in row])
    return tuple(flags), tuple(windows), local


def _settings(window: int | None) -> dict[str, Any]:
    if window is None:
        return LITERAL
    own = {"window_min": window, "window_ratio": None, "sinks": 0, "compensation": False}
    return {**LITERAL, **own}


@pytest.mark.long
@pytest.mark.parametrize("family", ["bloom6", "mpt6", "baichuan"])
def test_a_window_for_each_head_is_the_literal_definition(
    family: str, ranks: Ranks, tiny: Tiny
) -> None:
    n, k = 140, 12
    tokens = tokens_of(n + k, seed=2)
    path = tiny(family)
    flags, windows, local = mixed(path)
    want = literal_alibi(path, list(tokens), local).float()[n - 1 :]
    case = Case(str(path), flags, POLICY, tokens[:n], tokens[n:], page_size=7, windows=windows)
    assert_any_cut(ranks, case, want, (1, 2, 4), (8192, 50))
    whole = dataclasses.replace(case, prompt=tokens, forced=())
    assert_any_cut(ranks, whole, want[-1:], (2,), (41,))


def test_distances_as_dimensions_are_the_literal_definition(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's inputs in bfloat16, prefilled and decoded in float32: no mask but what hides."""
    monkeypatch.setattr(alibi, "needs_digits", lambda *_: True)
    n, k = 140, 12
    tokens = tokens_of(n + k, seed=2)
    path = tiny("bloom6")
    flags, windows, local = mixed(path)
    want = literal_alibi(path, list(tokens), local).float()[n - 1 :]
    case = Case(str(path), flags, POLICY, tokens[:n], tokens[n:], page_size=7, windows=windows)
    got = logits_of(Communicator(None), case)
    assert got is not None
    assert_same(got, want)


def test_exact_prefill_is_full_until_the_prompt_ends(ranks: Ranks, tiny: Tiny) -> None:
    n = 130
    tokens = tokens_of(n + 6, seed=3)
    path = tiny("bloom6")
    flags, windows, _ = mixed(path)
    case = Case(str(path), flags, POLICY, tokens[:n], tokens[n:], exact=True, windows=windows)
    want = ranks(1).run(logits_of, case)[0]
    assert_same(want[:1], want_of(path, "bloom6", tokens[:n])[-1:])
    assert_any_cut(ranks, case, want, (2, 4), (8192, 47))


def continued(comm: Communicator, case: Case) -> torch.Tensor | None:
    """Prefill 60 tokens, decode 3, and prefill the rest of the prompt in a fork of that."""
    runner = make_runner(comm, case, 2)
    prefill(runner, 0, dataclasses.replace(case, prompt=case.prompt[:60]))
    for token in case.prompt[60:63]:
        runner.execute(answer((0, token)))
    end, logits = len(case.prompt), None
    runner.execute(Fork(1, begin=63, end=end, total=end, source=0))
    for chunk in chunks(63, end, 20, comm.size):
        tokens = case.prompt[chunk.begin : chunk.end]
        logits = runner.execute(one_chunk(1, tokens, last=chunk.end == end))
    return logits


@pytest.mark.long
def test_a_fork_of_decoded_tokens_is_continued(ranks: Ranks, tiny: Tiny) -> None:
    path = tiny("mpt6")
    flags, windows, local = mixed(path)
    tokens = tokens_of(118, seed=6)
    want = literal_alibi(path, list(tokens), local).float()[-1:]
    case = Case(
        str(path),
        flags,
        POLICY,
        tokens,
        (0,) * 3,
        chunked_prefill_size=25,
        page_size=7,
        windows=windows,
    )
    for world in (1, 2):
        assert_same(ranks(world).run(continued, case)[0], want)


@pytest.mark.long
def test_recorded_decode_steps_are_the_eager_ones(ranks: Ranks, tiny: Tiny) -> None:
    path = tiny("bloom6")
    flags, windows, _ = mixed(path)
    case = dataclasses.replace(case_of(path), retrieval=flags, windows=windows)
    errors, agree, *_ = ranks(2).run(story, case)[0]
    assert len(errors) > 80 and max(errors) < 1e-5 and agree


@pytest.mark.parametrize("family", ["bloom6", "mpt"])
def test_nothing_as_wide_as_the_context_is_built(
    family: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("built")

    for module, names in (
        (modeling_bloom, ("create_causal_mask", "build_alibi_tensor", "_get_alibi_slopes")),
        (modeling_mpt, ("create_causal_mask", "build_mpt_alibi_tensor")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    path = tiny(family)
    case = Case(str(path), all_full(path), POLICY, tokens_of(20))
    assert logits_of(Communicator(None), case) is not None


def test_bias_max_counts_as_in_storywriter(tiny: Tiny, tmp_path: Path) -> None:
    """transformers' class ignores the bias' maximum; the literal reference does not."""
    path = tmp_path / "story"
    shutil.copytree(tiny("mpt"), path)
    config = json.loads((path / "config.json").read_text())
    config["attn_config"] |= {"alibi_bias_max": 16, "clip_qkv": 2}  # an integer, as 6 is there
    (path / "config.json").write_text(json.dumps(config))
    assert model_fingerprint(read_config(path)) != model_fingerprint(read_config(tiny("mpt")))
    tokens = tokens_of(90, seed=5)
    got = logits_of(Communicator(None), Case(str(path), all_full(path), POLICY, tokens))
    want = literal_alibi(path, list(tokens)).float()
    assert got is not None
    assert_same(got, want[-1:])
    assert (literal_alibi(tiny("mpt"), list(tokens)).float() - want)[-1].abs().max() > 1e-2


def test_weights_of_another_kind_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    """Baichuan's kinds share a model type; a rotary one brings its frequencies."""
    path = tmp_path / "rotary"
    shutil.copytree(tiny("baichuan"), path)
    weights = load_file(path / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"does not use: .*inv_freq"):
        load_model(path, device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize("family", ["baichuan", "mpt"])
def test_weights_in_bin_files_load_once_they_are_converted(
    family: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the lines that docs/models.md has for it."""
    path = tmp_path / family
    shutil.copytree(tiny(family), path)
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    for number, names in enumerate((sorted(weights)[::2], sorted(weights)[1::2]), start=1):
        part = {name: weights[name] for name in names}
        torch.save(part, path / f"pytorch_model-{number:05}-of-00002.bin")
    with pytest.raises(ModelError, match="cannot load the weights in"):
        load_model(path, device=torch.device("cpu"), dtype=torch.float32)
    docs = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    [recipe] = re.findall(r"## Weights in .bin files\n.*?```python\n(.*?)```", docs, re.DOTALL)
    monkeypatch.setattr("sys.argv", ["convert.py", str(path)])
    exec(recipe, {})
    model = load_model(path, device=torch.device("cpu"), dtype=torch.float32)
    loaded = model.state_dict()
    for name, weight in weights.items():
        assert torch.equal(loaded[name], weight.float()), name


def test_an_engine_has_the_maps_windows_at_any_length(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny("bloom6")
    flags, windows, _ = mixed(path)
    own = tuple(tuple(None if f else w or 7 for f, w in zip(*row, strict=True))
                for row in zip(flags, windows, strict=True))  # fmt: skip
    head_map = save_head_map(path, flags, tmp_path / "map.json", method="alibi", windows=own)
    settings = {"model": str(path), "head_map": str(head_map), "block": 8}
    engine = build_engine(
        EngineConfig(**settings, max_model_len=5000, max_num_seqs=1, prefix_cache=False),
        Communicator(None),
        torch.device("cpu"),
    )
    assert "was trained with 4,096 (4K) positions" in caplog.text
    lengths = sorted({w for row in own for w in row if w is not None})
    policies = [cache.policy for cache in engine.runner.caches.streaming]
    assert [p.window(4999) for p in policies] == [p.window(0) for p in policies] == lengths
    assert [c.k.shape[1] for c in engine.runner.caches.streaming] == [1 + w + 7 for w in lengths]
    assert not any(p.sinks or p.compensation for p in policies)
