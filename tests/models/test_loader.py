"""Loading: stock logits, shared pages, complete weights, stable fingerprints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig

from razor_dist.config.errors import ModelError
from razor_dist.models.content import content_hash
from razor_dist.models.loader import (
    eos_token_ids,
    load_model,
    model_fingerprint,
    read_config,
    stored_dtype,
    weights_fingerprint,
)
from razor_dist.models.smollm2 import embedded_model
from razor_dist.models.tokenizer import load_tokenizer
from tests.logits import stock_run
from tests.tiny_models import FAMILIES, make_tiny
from tests.tokenizer import write_letters

CPU = torch.device("cpu")


def test_a_model_is_loaded_for_inference(tmp_path: Path) -> None:
    model = load_model(make_tiny("llama", tmp_path), device=CPU, dtype=torch.float32)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training and model.config.use_cache is False


def test_a_folder_of_git_lfs_pointers_has_a_hash(tmp_path: Path) -> None:
    weights, found = tmp_path / "model.safetensors", set()
    for letter in "ab":
        weights.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{letter * 64}")
        found.add(content_hash(str(tmp_path)))
    assert len(found) == 2
    weights.unlink()
    weights.symlink_to("gone")
    with pytest.raises(ModelError, match=f"cannot read {weights}: No such file"):
        content_hash(str(tmp_path))


def test_tiny_models_attend_to_something(tmp_path: Path) -> None:
    for family in FAMILIES:
        path = make_tiny(family, tmp_path / family)
        ids = torch.randint(4, 192, (128,), generator=torch.Generator().manual_seed(1)).tolist()
        for weights in stock_run(path, ids, output_attentions=True).attentions:
            peak = weights[0, :, -1].max(-1).values.mean()
            assert 0.05 < peak < 0.95, (family, peak)  # uniform would be 1/128


_MEASURE = """
import sys, torch
from razor_dist.models.loader import load_model
model = load_model(sys.argv[1], device=torch.device("cpu"), dtype=torch.float32)
touched = sum(float(p.sum()) for p in model.parameters())
print("touched", flush=True)
sys.stdin.readline()  # until every process has its pages
keep, fields = False, dict.fromkeys(("Rss", "Pss", "Anonymous"), 0)
for line in open("/proc/self/smaps"):
    head = line.split()
    if not head[0].endswith(":"):
        keep = line.rstrip().endswith("model.safetensors")
    elif keep and head[0][:-1] in fields:
        fields[head[0][:-1]] += int(head[1]) * 1024
print(fields["Rss"], fields["Pss"], fields["Anonymous"])
print(sum(p.numel() * 4 for p in model.parameters()), flush=True)
sys.stdin.readline()  # stay until the others have measured
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
def test_processes_share_the_weights() -> None:
    """Every parameter is mapped from the file: counted once, however many ranks hold it."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _MEASURE, str(embedded_model())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "touched\n"
    figures = []
    for process in processes:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("measure\n")
        process.stdin.flush()
        rss, pss, anonymous = map(int, process.stdout.readline().split())
        figures.append((rss, pss, anonymous, int(process.stdout.readline())))
    for process in processes:
        process.communicate("end\n")
    for rss, pss, anonymous, parameter_bytes in figures:
        assert rss >= 0.99 * parameter_bytes
        assert anonymous == 0
        assert pss <= 0.51 * rss


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_weights_are_mapped_if_they_are_computed_with_as_stored(
    stored: torch.dtype, tmp_path: Path
) -> None:
    file = make_tiny("llama", tmp_path) / "model.safetensors"
    weights = {name: tensor.to(stored, copy=True) for name, tensor in load_file(file).items()}
    file.unlink()
    save_file(weights, file, metadata={"format": "pt"})
    model = load_model(tmp_path, device=CPU, dtype=torch.float32)
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [[int(at, 16) for at in x[0].split("-")] for x in lines if x[-1] == str(file)]
    inside = {any(a <= p.data_ptr() < b for a, b in spans) for p in model.parameters()}
    assert inside == {stored == torch.float32}


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path)
    file = path / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(file).items()}
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1: model\.layers\.1\.self_attn\.q_proj\.weight"):
        load_model(path, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda whole: whole[: len(whole) // 2], "not fully covered; a file is cut off"),
        (lambda _: b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
    ],
    ids=["cut off", "pointer"],
)
def test_files_that_are_not_whole_are_told_of(
    content: Callable[[bytes], bytes], reason: str, tmp_path: Path
) -> None:
    path = make_tiny("llama", tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(content(file.read_bytes()))
    with pytest.raises(ModelError, match=f"cannot load the weights in .*{reason}"):
        load_model(path, device=CPU, dtype=torch.float32)
    with pytest.raises(ModelError, match=reason):
        stored_dtype(path)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    path, name = make_tiny("llama", tmp_path), "model.layers.0.mlp.up_proj.weight"
    weights = load_file(path / "model.safetensors") | {name: torch.zeros(5, 6)}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"{name} in .* is \[5, 6\], .*config.json \[96, 64\]"):
        load_model(path, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float16])
def test_quantised_weights_of_which_config_json_is_silent(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    path, name = make_tiny("llama", tmp_path), "model.layers.0.mlp.up_proj.weight"
    weights = load_file(path / "model.safetensors")
    weights[name] = weights[name].to(dtype)
    weights[f"{name}_scale"] = torch.ones(1)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    told = "_scale:" if dtype == torch.float16 else " in .* is of dtype .*:"
    with pytest.raises(ModelError, match=f"{name}{told} weights are quantised"):
        load_model(path, device=CPU, dtype=torch.float32)


def test_tensors_that_are_no_weights_may_be_of_any_dtype(tmp_path: Path) -> None:
    path, name = make_tiny("llama", tmp_path), "model.layers.0.self_attn.bias"
    weights = load_file(path / "model.safetensors") | {name: torch.ones(3, 3, dtype=torch.bool)}
    weights["model.norm.weight"] = weights["model.norm.weight"].double()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    found = load_model(path, device=CPU, dtype=torch.float32).model.norm.weight
    assert torch.equal(found, weights["model.norm.weight"].float())


def test_an_index_of_shards_that_is_broken(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path)
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    (path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelError, match="cannot load the weights in"):
        load_model(path, device=CPU, dtype=torch.float32)


def test_bad_folder_and_dtype(tmp_path: Path) -> None:
    for config in (
        "",
        "null",
        '{"model_type": "no-such"}',
        '{"model_type": "llama", "num_hidden_layers": "x"}',
    ):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(ModelError, match="cannot read the configuration"):
            read_config(tmp_path)
    with pytest.raises(ModelError, match=r"dtype must be one of float32.*got int8"):
        load_model(tmp_path, device=CPU, dtype=torch.int8)


def test_eos_token_ids(tmp_path: Path) -> None:
    path = make_tiny("glm", tmp_path)
    assert eos_token_ids(path) == (2, 3)
    assert eos_token_ids(read_config(path)) == (2, 3)
    (path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert eos_token_ids(path) == (7,)
    assert eos_token_ids(LlamaConfig(eos_token_id=None)) == ()
    for text, reason in (
        ("{", "cannot read"),
        ("[]", "cannot read"),
        ('{"eos_token_id": "a"}', "token ids"),
    ):
        (path / "generation_config.json").write_text(text)
        with pytest.raises(ModelError, match=reason):
            eos_token_ids(path)


def test_fingerprint_ignores_what_attention_does_not_see(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path)
    original = model_fingerprint(read_config(path))
    fields = json.loads((path / "config.json").read_text())
    # As transformers 4 would have written it.
    rope = fields.pop("rope_parameters")
    fields |= {"rope_theta": int(rope["rope_theta"]), "rope_scaling": None}
    fields |= {"torch_dtype": "bfloat16", "transformers_version": "4.40.0", "use_cache": True}
    fields |= {"pad_token_id": 5, "_name_or_path": "elsewhere"}
    assert model_fingerprint(AutoConfig.for_model(**fields)) == original
    for change in ({"rope_theta": 1e6}, {"num_hidden_layers": 5}, {"num_key_value_heads": 4}):
        assert model_fingerprint(AutoConfig.for_model(**(fields | change))) != original


def test_fingerprint_is_pinned() -> None:
    """Head maps on disk hold it: a change of this value orphans them."""
    assert model_fingerprint(LlamaConfig()) == (
        "sha256:2ee30a311613e16c14496bc47c58a37d376ccb435dbd5a7712e24eac951156c0"
    )


def test_what_turns_keys_is_in_the_fingerprint_of_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releases of transformers may compute it otherwise, from the same weights and fields."""
    model = load_model(make_tiny("llama", tmp_path / "model"), device=CPU, dtype=torch.float32)
    rotary, found = model.model.rotary_emb, [weights_fingerprint(model)]
    rotary.inv_freq *= 1 + 1e-6  # as another processor may round it
    assert weights_fingerprint(model) == found[0]
    rotary.inv_freq *= 1.1
    found.append(weights_fingerprint(model))
    rotary.attention_scaling = 1.2
    found.append(weights_fingerprint(model))
    kind, name = type("Remote", (type(model),), {}), "transformers_modules.of.modeling"
    kind.__module__ = name
    model.__class__ = kind
    code = tmp_path / "helpers.py"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(__file__=str(tmp_path / "modeling.py")))
    for text in ("one", "another"):
        code.write_text(text)
        found.append(weights_fingerprint(model))
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("others", [(), ("tokenizer_config.json",)])
def test_tekken_alone_is_no_tokenizer(
    others: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_tokenizer(tmp_path) is None and not caplog.text
    for name in ("tekken.json", *others):
        (tmp_path / name).write_text("{}")
    assert load_tokenizer(tmp_path) is None
    assert "has tekken.json, which is not read, and no tokenizer.json" in caplog.text
    write_letters(tmp_path)
    assert load_tokenizer(tmp_path) is not None
