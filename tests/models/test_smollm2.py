"""The embedded model: converted once, and the same model and tokenizer as the GGUF."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from razor_dist.config.errors import ModelError
from razor_dist.models import smollm2
from razor_dist.models.loader import eos_token_ids


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm2.embedded_model()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return loaded


def test_weights_are_the_dequantised_ones(folder: Path) -> None:
    blocks = {t.name: t for t in gguf.GGUFReader(smollm2._find_gguf()).tensors}
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


TEXTS = [
    "a  3 b",
    "x   12 34\n\n  5",
    "Hello  2024!!!  ok",
    "½ ² ٣٤ V2",
    "don't  we'll I'M 12's",
    "  \n\t 7",
    "def f(x):\n    return 10 + x\n",
    "漢字12字 🎉 é",
    "<|im_start|>user\nhi 12<|im_end|>",
]


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_agrees_with_llama_cpp(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    reference = _llama_cpp_tokenizer()
    ids = tokenizer(text).input_ids
    assert ids == reference.tokenize(text.encode(), add_bos=False, special=True)
    assert tokenizer.decode(ids) == text


_REFERENCE: list[llama_cpp.Llama] = []


def _llama_cpp_tokenizer() -> llama_cpp.Llama:
    if not _REFERENCE:
        gguf_path = str(smollm2._find_gguf())
        _REFERENCE.append(llama_cpp.Llama(gguf_path, vocab_only=True, verbose=False))
    return _REFERENCE[0]


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
    key = smollm2._cache_key(smollm2._find_gguf())
    (tmp_path / "razor_dist" / f"smollm2-{key}.partial").mkdir(parents=True)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(smollm2.embedded_model())) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert found == [tmp_path / "razor_dist" / f"smollm2-{key}"] * 4
    assert (found[0] / "config.json").is_file()


def test_unwritable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.raises(ModelError, match="XDG_CACHE_HOME chooses another place"):
        smollm2.embedded_model()
