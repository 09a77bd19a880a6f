"""The needle model: GLM's architecture with weights that are constructed, not trained.

A test instrument: it looks up a hidden word and copies what follows it, exactly, in a prompt of any
length, and can do nothing else. Every one of its heads is needed for that
(`tests/models/test_needle.py` removes each).

**What it does.** After ``… remember KEY`` it says the words that followed KEY earlier, up to the
full stop; where KEY did not occur, ``<unk>``. Each step looks one word back only, so a hidden
answer is found if none of its words occurs elsewhere.

**Codes.** Token i is the 11 bits of i with the 4 parity bits of the Hamming code [15, 11, 3], as
±1. Two codes differ in at least 3 places, so that their scalar product is 15 if they are equal and
at most 9 otherwise. The hidden state is six such slots and four flags, all of fixed norm, which
makes RMSNorm a constant::

    code | before | wanted | found | beside | answer || start, armed, ready, relay

==========  ========  =======================================================================
KV head     kind      its two query heads
==========  ========  =======================================================================
layer 0, 0  local     *previous token*, on the rotary half: the query is the key turned back by
                      one position. Writes ``before`` = code of the previous token.
layer 0, 1  local     *start*, on the unrotated half: reads the first token, ``[gMASK]``, and so
                      writes ``armed`` = 1.
layer 0     MLP       ``wanted`` = armed × code: a gate, silu(20 armed) code / 20.
layer 1, 0  retrieval *induction* (first query head): looks for tokens whose ``before`` is our
                      ``wanted``, and writes their code to ``found``. *Echo* (second one): looks
                      for tokens whose ``before`` is our own ``before``; writes to ``beside``.
layer 1, 1  local     *start* again, writes ``ready`` = 1.
layer 1     MLP       ``answer`` = ready × found + relay × beside. ``relay`` marks the token
                      ``<|assistant|>``, which stands between a question's last word and the
                      answer's first: what followed the word before it is what is wanted there.
==========  ========  =======================================================================

A streaming head without its window loses the previous token, one without the first tokens loses
``[gMASK]``, and either way no answer is found.

**Sharpness.** A softmax over N keys is exact to float32 if the wanted key's score exceeds all
others by log N + 17, which is 31 at 2^20. Induction: 10 per code place, so 150 for a match and at
most 90 for another word; between them, with 120, stands the first token, where both query heads
rest when nothing matches. Start: 60 against 0. Previous token: the score is 100 sum_f
cos(w_f (d - 1)) for a key d positions back, with rotary base 10^4 and 8 frequencies; the next best
key is 51 lower within a window, and 35 over 2^21 positions. Float32 angles, which err by up to
1/64 at 2^20, change that by 0.3 (`tests/models/test_needle.py` measures it).

**Size.** A head dimension of 32 (16 rotary, 15 for the code, 1 for the first token) is the least
that a code of 2048 words allows, a group of two query heads the least that GQA allows. So the
retrieval group takes 2 · N²/2 · 4 · 32 flops, 1.4e14 at N = 2^20; all else is linear in N.
"""

from __future__ import annotations

import json
import math
from importlib.resources import files
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import GenerationConfig, GlmConfig, GlmForCausalLM, PreTrainedTokenizerFast
from transformers.models.glm.modeling_glm import GlmAttention, GlmMLP

from razor_dist.config.errors import ConfigError
from razor_dist.files import make_folder
from razor_dist.heads.head_map import HeadMap
from razor_dist.models.loader import save_model

HEAD_MAP: Final = "head_map.json"  # in the model's folder
RETRIEVAL: Final = ((False, False), (True, False))  # [layers][KV heads]
MAX_TOKENS: Final = 2**21

UNKNOWN, FULL_STOP, END = "<unk>", ".", "<|endoftext|>"
START, USER, ASSISTANT = "[gMASK]", "<|user|>", "<|assistant|>"
# GLM's special tokens, less those of tools. `UNKNOWN` is the first: it is the likeliest token where
# all logits are equal.
_SPECIAL = (UNKNOWN, END, START, "<sop>", "<|system|>", USER, ASSISTANT)
# GLM's form, without the line breaks, which a tokenizer of words does not see.
_CHAT_TEMPLATE = (
    "[gMASK]<sop>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_DATA_BITS, _CODE = 11, 15
_SLOTS = ("code", "before", "wanted", "found", "beside", "answer")
_AT: Final = {name: slice(_CODE * i, _CODE * (i + 1)) for i, name in enumerate(_SLOTS)}
_FLAGS: Final = {name: 90 + i for i, name in enumerate(("start", "armed", "ready", "relay"))}
_HIDDEN, _DIM, _ROTARY, _GROUP, _KV_HEADS = 96, 32, 16, 2, 2
_THETA = 10_000.0
# In the unrotated half: the code's places, and one that only the first token's key fills.
_CONTENT, _REST = slice(_ROTARY, _ROTARY + _CODE), _ROTARY + _CODE
# Scores; see "Sharpness" above.
_BACK_SHARPNESS, _START_SCORE, _PLACE_SCORE, _REST_SCORE = 100.0, 60.0, 10.0, 120.0
# silu(x) = x (1 - 2e-9) from here on: a gate that is open.
_OPEN = 20.0


def needle_words() -> tuple[str, ...]:
    """Return the words of the vocabulary in alphabetical order."""
    file = files("razor_dist.configs").joinpath("needle_words.txt")
    return tuple(file.read_text(encoding="utf-8").split())


def needle_vocabulary() -> dict[str, int]:
    """Return token ids: special tokens first, then the full stop, then `needle_words`."""
    tokens = (*_SPECIAL, FULL_STOP, *needle_words())
    return {token: index for index, token in enumerate(tokens)}


def check_needle_model(what: str, model: str, vocab_size: int) -> None:
    """Refuse ``what`` for another model."""
    if vocab_size != len(needle_vocabulary()):
        raise ConfigError(
            f"{what} is for the needle model (razor-dist needle-model), not for {model}"
        )


def needle_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Make a word-level tokenizer that begins every text with ``[gMASK] <sop>``, as GLM's does.

    Case is ignored; a word outside the vocabulary becomes ``<unk>``.
    """
    vocabulary = needle_vocabulary()
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} <sop> $A",
        special_tokens=[(token, vocabulary[token]) for token in (START, "<sop>")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[t for t in _SPECIAL if t not in (UNKNOWN, END)],
        chat_template=_CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def build_needle_model(folder: str | Path) -> Path:
    """Write the needle model as a Hugging Face folder, and return the folder.

    It gets ``config.json``, ``generation_config.json``, ``model.safetensors`` (float32, 1.9 MB),
    the tokenizer with its chat template, and ``head_map.json``; equal bytes on every call. Raises
    `ConfigError` for a folder that holds another model.
    """
    folder = Path(folder)
    _refuse_other_model(folder)
    make_folder(folder)
    model = _construct(needle_vocabulary())
    save_model(model, folder)
    needle_tokenizer(MAX_TOKENS).save_pretrained(folder)
    HeadMap.of_model(
        "needle",
        model.config,
        method="constructed",
        settings={},
        retrieval=RETRIEVAL,
        selected={"induction": ((1, 0),), "echo": ((1, 1),)},
    ).save(folder / HEAD_MAP)
    return folder


def _refuse_other_model(folder: Path) -> None:
    """Raise `ConfigError` for another model, whose weights transformers would remove."""
    there = [*folder.glob("config.json"), *folder.glob("*.safetensors")]
    try:
        vocabulary = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError):
        vocabulary = None
    if there and vocabulary != len(needle_vocabulary()):
        raise ConfigError(
            f"{folder} holds the {there[0].name} of another model, which would be replaced; name a "
            "new folder"
        )


def _construct(vocabulary: dict[str, int]) -> GlmForCausalLM:
    config = GlmConfig(
        vocab_size=len(vocabulary),
        hidden_size=_HIDDEN,
        intermediate_size=2 * _CODE,
        num_hidden_layers=2,
        num_attention_heads=_KV_HEADS * _GROUP,
        num_key_value_heads=_KV_HEADS,
        head_dim=_DIM,
        max_position_embeddings=MAX_TOKENS,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": _THETA,
            "partial_rotary_factor": _ROTARY / _DIM,
        },
        attention_bias=True,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=[vocabulary[END], vocabulary[USER]],
        pad_token_id=vocabulary[END],
        dtype="float32",
    )
    model = GlmForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id, do_sample=False
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        codes = _codes(len(vocabulary))
        _embed(model, codes, vocabulary)
        lower, upper = model.model.layers
        # Squared norms of an ordinary token's hidden state: its code, then what layer 0 adds.
        _previous_token(lower.self_attn, _unit(_CODE))
        _start(lower.self_attn, _unit(_CODE), writes="armed")
        _gate(lower.mlp, _unit(2 * _CODE + 1), 0, by="armed", source="code", target="wanted")
        _lookup(upper.self_attn, _unit(3 * _CODE + 1))
        # The first token has neither code nor previous token, and wants nothing.
        _start(upper.self_attn, _unit(_CODE + 1), writes="ready")
        after = _unit(5 * _CODE + 2)
        _gate(upper.mlp, after, 0, by="ready", source="found", target="answer")
        _gate(upper.mlp, after, 1, by="relay", source="beside", target="answer")
    return model


def _codes(count: int) -> Tensor:
    """Return the codewords, ±1, of the numbers below ``count``, float32 ``[count, 15]``."""
    number = torch.arange(count)
    # A bit is checked by the parities whose places are the bits of its own column.
    columns = [c for c in range(1, _CODE + 1) if c.bit_count() > 1]
    data = torch.stack([number >> bit & 1 for bit in range(_DATA_BITS)], dim=1)
    parity = [
        data[:, [c >> check & 1 == 1 for c in columns]].sum(1) % 2
        for check in range(_CODE - _DATA_BITS)
    ]
    return 2.0 * torch.cat([data, torch.stack(parity, dim=1)], dim=1) - 1.0


def _unit(squared_norm: float) -> float:
    """Return the value that RMSNorm makes of a 1 of the hidden state."""
    return math.sqrt(_HIDDEN / squared_norm)


def _embed(model: GlmForCausalLM, codes: Tensor, vocabulary: dict[str, int]) -> None:
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    embedding[:, _AT["code"]] = codes
    head[:, _AT["answer"]] = codes
    # A flag in the place of the code, and of its norm.
    for token, flag in ((START, "start"), (ASSISTANT, "relay")):
        embedding[vocabulary[token]] = 0.0
        embedding[vocabulary[token], _FLAGS[flag]] = math.sqrt(_CODE)
        head[vocabulary[token]] = 0.0
    # The answer ends where its sentence does: a full stop that is found is said as the end.
    head[vocabulary[END], _AT["answer"]] = 1.25 * codes[vocabulary[FULL_STOP]]
    # Said where nothing is found; a word that is found has 15.
    head[vocabulary[UNKNOWN]] = 0.0
    head[vocabulary[UNKNOWN], _FLAGS["armed"]] = 3.0


def _queries(attention: GlmAttention, kv_head: int) -> list[slice]:
    first = kv_head * _GROUP
    return [slice(_DIM * h, _DIM * (h + 1)) for h in range(first, first + _GROUP)]


def _write(attention: GlmAttention, query_head: int, target: slice, share: float) -> None:
    """Add the first places of a query head's output to the hidden state's ``target``."""
    width = target.stop - target.start
    attention.o_proj.weight[target, _DIM * query_head : _DIM * query_head + width] = (
        share * torch.eye(width)
    )


def _previous_token(attention: GlmAttention, unit: float) -> None:
    frequency = _THETA ** (-torch.arange(_ROTARY // 2) / (_ROTARY / 2))
    # Interleaved pairs (2f, 2f + 1). At position 0 a pair of the key points along its first axis.
    attention.k_proj.bias[0:_ROTARY:2] = 1.0
    attention.v_proj.weight[0:_CODE, _AT["code"]] = torch.eye(_CODE) / unit
    for head, rows in enumerate(_queries(attention, 0)):
        bias = attention.q_proj.bias[rows]
        bias[0:_ROTARY:2] = _BACK_SHARPNESS * math.sqrt(_DIM) * frequency.cos()
        bias[1:_ROTARY:2] = -_BACK_SHARPNESS * math.sqrt(_DIM) * frequency.sin()
        _write(attention, head, _AT["before"], 1 / _GROUP)


def _start(attention: GlmAttention, unit: float, writes: str) -> None:
    first = _DIM  # of KV head 1
    normed = math.sqrt(_CODE) * unit
    attention.k_proj.weight[first + _REST, _FLAGS["start"]] = 1 / normed
    attention.v_proj.weight[first, _FLAGS["start"]] = 1 / normed
    flag = _FLAGS[writes]
    for head, rows in enumerate(_queries(attention, 1), start=_GROUP):
        attention.q_proj.bias[rows][_REST] = _START_SCORE * math.sqrt(_DIM)
        _write(attention, head, slice(flag, flag + 1), 1 / _GROUP)


def _lookup(attention: GlmAttention, unit: float) -> None:
    attention.k_proj.weight[_CONTENT, _AT["before"]] = torch.eye(_CODE) / unit
    rest = attention.k_proj.weight[_REST]
    rest[_FLAGS["start"]] = 1 / (math.sqrt(_CODE) * _unit(_CODE + 1))
    # The echo head is not to find its own <|assistant|>, which follows the asked word too.
    rest[_FLAGS["relay"]] = -2 / (math.sqrt(_CODE) * _unit(2 * _CODE + 1))
    attention.v_proj.weight[0:_CODE, _AT["code"]] = torch.eye(_CODE) / unit
    ours = (("wanted", "found"), ("before", "beside"))
    scale = math.sqrt(_DIM)
    for head, (rows, (asked, target)) in enumerate(zip(_queries(attention, 0), ours, strict=True)):
        weight = attention.q_proj.weight[rows]
        weight[_CONTENT, _AT[asked]] = _PLACE_SCORE * scale * torch.eye(_CODE) / unit
        attention.q_proj.bias[rows][_REST] = _REST_SCORE * scale
        _write(attention, head, _AT[target], 1.0)


def _gate(mlp: GlmMLP, unit: float, half: int, *, by: str, source: str, target: str) -> None:
    """Add ``by × source`` to ``target``, by the MLP's neurons of one half."""
    neurons = torch.arange(_CODE) + half * _CODE
    on = math.sqrt(_CODE) if by == "relay" else 1.0
    mlp.gate_up_proj.weight[neurons, _FLAGS[by]] = _OPEN / (on * unit)
    mlp.gate_up_proj.weight[2 * _CODE + neurons, _AT[source]] = torch.eye(_CODE) / unit
    mlp.down_proj.weight[_AT[target], neurons] = torch.eye(_CODE) / _OPEN
