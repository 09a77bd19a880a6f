"""Tokenizers for tests: the embedded model's, loaded once, and such as a tiny model's ids hold."""

import json
import shutil
from functools import lru_cache
from pathlib import Path

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from razor_dist.models.registry import resolve_model
from razor_dist.models.tokenizer import load_tokenizer


@lru_cache(maxsize=1)
def smollm2_tokenizer() -> PreTrainedTokenizerBase:
    """SmolLM2's."""
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    assert tokenizer is not None
    return tokenizer


def write_letters(folder: Path) -> None:
    """Put a tokenizer of printable ASCII letters, ids 4 to 98, into a model's folder."""
    wrapped = PreTrainedTokenizerFast(tokenizer_object=_letters(), unk_token="?!")
    wrapped.save_pretrained(folder)


def copy_with_letters(model: Path, folder: Path) -> Path:
    """Copy a tiny model to ``folder``, with such letters as structured outputs can be spelt in."""
    shutil.copytree(model, folder)
    write_letters(folder)
    file = folder / "tokenizer.json"
    stored = json.loads(file.read_text())
    stored["decoder"] = {"type": "ByteFallback"}  # by its kind llguidance knows what tokens spell
    stored["model"]["vocab"] |= {"<pad>": 0, "<s>": 1, "</s>": 2}  # and takes ids to have no gaps
    file.write_text(json.dumps(stored))
    return folder


# Words of the tokenizer below, each with a space before it.
SENTENCEPIECE_WORDS = ("time", "a", "the", "world", "says")


@lru_cache(maxsize=1)
def sentencepiece_tokenizer() -> PreTrainedTokenizerBase:
    """One of the kind of Llama 2's, Mistral's and Phi-3's: a word holds the space before it.

    A space is put before every text, and what has no token is spelt in bytes, ids 3 to 258.
    """
    symbols = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    symbols += [chr(code) for code in range(33, 127)]
    merges = []
    for word in SENTENCEPIECE_WORDS:
        for end in range(1, len(word)):
            pair = word[:end], word[end]
            merges += [pair] if pair not in merges else []
        merges.append(("▁", word))
    vocabulary = dict.fromkeys([*symbols, *(left + right for left, right in merges)])
    tokenizer = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(vocabulary)},
            merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


# In GLM-4's order.
GLM_SPECIAL = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
)
# As GLM-4-9B's: tools are a field of a message.
GLM_TEMPLATE = (
    "[gMASK]<sop>{% for item in messages %}{% if item['tools'] is defined %}<|system|>\nTools:"
    "{% set tools = item['tools'] %}{% for tool in tools %}\n{{ tool['function'] | tojson }}"
    "{% endfor %}{% endif %}{% if item['content'] %}<|{{ item['role'] }}|>"
    "{{ item['metadata'] }}\n{{ item['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_glm_letters(folder: Path) -> dict[str, int]:
    """Put one like GLM-4's into a folder: with special tokens, two of them before every text.

    Returns
    -------
    dict of str to int
        Token ids: letters 4 to 98, then the line feed, then `GLM_SPECIAL` from 100 on.
    """
    tokenizer = _letters("\n", *GLM_SPECIAL)
    ids: dict[str, int] = tokenizer.get_vocab()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[gMASK] <sop> $A",
        special_tokens=[(token, ids[token]) for token in ("[gMASK]", "<sop>")],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="?!",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(GLM_SPECIAL),
        chat_template=GLM_TEMPLATE,
    ).save_pretrained(folder)
    return ids


def _letters(*more: str) -> Tokenizer:
    """Every character a token; ``more`` from id 99 on."""
    letters = {chr(32 + i): i + 4 for i in range(95)} | {"?!": 3}
    letters |= {token: 99 + i for i, token in enumerate(more)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return tokenizer
