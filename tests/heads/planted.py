"""A model made by hand, in which it is known what every head does.

Three layers of two KV heads, each with a group of two query heads that do the same:

- layer 0, head 0 looks at the previous token and writes down which it was;
- layer 0, head 1 is diffuse: it looks at all tokens alike;
- layer 1, head 0 is an induction head: it looks for tokens that come after one like the current,
  and writes down which they are;
- layer 1, head 1 looks at the first token;
- layer 2, head 0 is an echo head: it looks for tokens like the current, and writes down what the
  induction head found there;
- layer 2, head 1 looks at the current token.

Cut to sinks and recent tokens, all but the induction head and the echo head stay what they are.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from razor_dist.documents.corpus import reference_paragraphs
from razor_dist.identify.passkeys import Passkeys
from razor_dist.identify.prose import Prose
from razor_dist.identify.settings import PasskeySettings

INDUCTION, ECHO = (1, 0), (2, 0)
"""(layer, KV head)."""
RETRIEVAL = {INDUCTION, ECHO}
HEADS = [(layer, head) for layer in range(3) for head in range(2)]
VOCABULARY = 512
BOS = 0

_DIM, _GROUP = 32, 2
# With this base the pairs of dimensions 6 to 15 hardly turn over thousands of tokens: what is
# written there is compared as it is. Pairs 0 to 3 tell distances.
_THETA = 1e12
_CONTENT = torch.cat([torch.arange(6, 16), torch.arange(22, 32)])
# The hidden state: the token's code, the previous token's, what the induction head recalled, what
# the echo head found, what the others wrote; 1, and 1 for BOS.
_HIDDEN = 112
_CODE, _BEFORE, _RECALLED = torch.arange(0, 20), torch.arange(20, 40), torch.arange(40, 60)
_FOUND, _REST = torch.arange(60, 80), torch.arange(80, 100)
_ONE, _FIRST = 100, 101


def make_planted(path: Path) -> Path:
    """Write the model to ``path`` as float32 safetensors, without tokenizer."""
    config = LlamaConfig(
        hidden_size=_HIDDEN,
        intermediate_size=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=None,
        pad_token_id=None,
        use_cache=False,
        num_hidden_layers=3,
        num_attention_heads=2 * _GROUP,
        num_key_value_heads=2,
        head_dim=_DIM,
        rope_parameters={"rope_type": "default", "rope_theta": _THETA},
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        embedding = model.model.embed_tokens.weight
        embedding[:, _CODE] = torch.randint(0, 2, (VOCABULARY, 20), generator=generator) * 2.0 - 1
        embedding[:, _ONE] = 1.0
        embedding[BOS, _FIRST] = 4.0
        model.lm_head.weight.copy_(torch.randn(VOCABULARY, _HIDDEN, generator=generator))
        first, second, third = (layer.self_attn for layer in model.model.layers)
        _look_back(first, head=0, distance=1)
        _copy(first, head=0, source=_CODE, target=_BEFORE)
        _copy(first, head=1, source=_CODE, target=_REST, strength=0.1)  # with equal scores
        _look_for(second, head=0, wanted=_CODE, offered=_BEFORE)
        _copy(second, head=0, source=_CODE, target=_RECALLED)
        _look_at_first(second, head=1)
        _copy(second, head=1, source=_CODE, target=_REST, strength=0.1)
        _look_for(third, head=0, wanted=_CODE, offered=_CODE)
        _copy(third, head=0, source=_RECALLED, target=_FOUND)
        _look_back(third, head=1, distance=0)
        _copy(third, head=1, source=_CODE, target=_REST, strength=0.1)
    model.save_pretrained(path)
    return path


def _rows(projection: torch.nn.Linear, head: int) -> Tensor:
    return projection.weight[head * _DIM : (head + 1) * _DIM]


def _queries(attention: torch.nn.Module, head: int) -> list[Tensor]:
    return [_rows(attention.q_proj, _GROUP * head + member) for member in range(_GROUP)]


def _look_back(attention: torch.nn.Module, head: int, distance: int) -> None:
    """Queries that are keys turned back by ``distance`` positions."""
    pairs = torch.arange(4)
    angle = -distance * _THETA ** (-pairs / (_DIM / 2))
    # The four pairs of the key point one way at position 0.
    _rows(attention.k_proj, head)[pairs, _ONE] = 1.0
    for query in _queries(attention, head):
        query[pairs, _ONE] = 200 * angle.cos()
        query[pairs + _DIM // 2, _ONE] = 200 * angle.sin()


def _look_at_first(attention: torch.nn.Module, head: int) -> None:
    _rows(attention.k_proj, head)[_CONTENT, _FIRST] = 1.0
    for query in _queries(attention, head):
        query[_CONTENT, _ONE] = 20.0


def _look_for(attention: torch.nn.Module, head: int, wanted: Tensor, offered: Tensor) -> None:
    _rows(attention.k_proj, head)[_CONTENT, offered] = 1.0
    for query in _queries(attention, head):
        query[_CONTENT, wanted] = 8.0


def _copy(
    attention: torch.nn.Module, head: int, source: Tensor, target: Tensor, strength: float = 1.0
) -> None:
    _rows(attention.v_proj, head)[torch.arange(len(source)), source] = strength
    for member in range(_GROUP):
        columns = (_GROUP * head + member) * _DIM + torch.arange(len(source))
        attention.o_proj.weight[target, columns] = 1 / _GROUP


def encode(text: str) -> list[int]:
    """A token for each word and each other sign."""
    words = text.replace(".", " .").replace(",", " ,").replace("?", " ?").split()
    return [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in words]


def passkeys(seed: int = 0, max_tokens: int = 400) -> Passkeys:
    """Samples that the model's context holds: three passkeys of eight words."""
    settings = PasskeySettings(
        passkeys=3, words=8, min_tokens=300, max_tokens=max_tokens, lengths=5, seed=seed
    )
    return Passkeys(prose(), settings, start=[BOS])


def prose() -> Prose:
    return Prose(encode, reference_paragraphs())
