"""The needle model copies exactly, and each of its heads is needed for that."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding, apply_rotary_pos_emb

from razor_dist.cache.policy import StreamingPolicy
from razor_dist.cli import main
from razor_dist.evals.needle.documents import hide_words
from razor_dist.evals.needle.model import (
    END,
    HEAD_MAP,
    MAX_TOKENS,
    RETRIEVAL,
    UNKNOWN,
    build_needle_model,
    needle_vocabulary,
    needle_words,
)
from razor_dist.evals.needle.presets import Fact, word_fact
from razor_dist.heads.head_map import HeadMap
from razor_dist.models.loader import eos_token_ids, model_fingerprint, read_config
from razor_dist.models.shape import ModelShape
from tests.cases import Case, logits_of
from tests.ranks import RankPool, Ranks

POLICY = StreamingPolicy(window_min=256, window_ratio=None)
FULL = ((True, True), (True, True))
STREAMING = ((False, False), (False, False))


@pytest.fixture(scope="module")
def needle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_needle_model(tmp_path_factory.mktemp("models") / "needle")


def case_of(folder: Path, text: str, fact: Fact) -> tuple[Case, list[int]]:
    """The question after the document, the right answer forced; and what is to be said."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer(f"{text} {fact.question}")["input_ids"]
    answer = tokenizer(fact.answer, add_special_tokens=False)["input_ids"]
    case = Case(
        str(folder), RETRIEVAL, POLICY, tuple(prompt), tuple(answer), chunked_prefill_size=2048
    )
    return case, [*answer, needle_vocabulary()[END]]


def said(pool: RankPool, case: Case) -> list[int]:
    return pool.run(logits_of, case)[0].argmax(-1).tolist()


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1024, 8192])
def test_copies_exactly(needle: Path, ranks: Ranks, tokens: int, world_size: int) -> None:
    text, facts = hide_words(tokens, [0, 50, 90])
    for fact in facts:
        case, right = case_of(needle, text, fact)
        assert len(case.prompt) == tokens + 2
        assert said(ranks(world_size), case) == right
        assert said(ranks(world_size), dataclasses.replace(case, retrieval=FULL)) == right


def test_a_word_that_is_not_hidden_is_unknown(needle: Path, ranks: Ranks) -> None:
    text, _ = hide_words(1024, [50])
    rare = next(w for w in needle_words() if w not in text.split())
    case, _ = case_of(needle, text, word_fact(rare, (), 0))
    assert said(ranks(1), case) == [needle_vocabulary()[UNKNOWN]]


@pytest.mark.parametrize(
    "broken",
    [
        {"retrieval": STREAMING},
        {"policy": dataclasses.replace(POLICY, window_min=1, block=1)},
        {"policy": dataclasses.replace(POLICY, sinks=0)},
    ],
    ids=["no retrieval head", "no window", "no sinks"],
)
def test_what_heads_see_is_what_they_need(
    needle: Path, ranks: Ranks, broken: dict[str, Any]
) -> None:
    text, facts = hide_words(2048, [30])
    case, right = case_of(needle, text, facts[0])
    assert said(ranks(1), case) == right
    assert said(ranks(1), dataclasses.replace(case, **broken))[0] != right[0]


@pytest.mark.parametrize("layer, kv_head", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_every_kv_head_is_needed(
    layer: int, kv_head: int, needle: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """Removed by clearing what the output projection takes from its group."""
    for file in needle.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    shape = ModelShape.from_config(read_config(needle))
    width = shape.group * shape.head_dim
    projection = weights[f"model.layers.{layer}.self_attn.o_proj.weight"]
    assert projection[:, kv_head * width : (kv_head + 1) * width].any()
    projection[:, kv_head * width : (kv_head + 1) * width] = 0
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    text, facts = hide_words(1024, [40])
    case, right = case_of(tmp_path, text, facts[0])
    assert said(ranks(1), case)[0] != right[0]


def test_stock_transformers_agrees_and_answers_in_a_chat(needle: Path) -> None:
    """Both query heads of the retrieval group: a chat's first word is the echo head's."""
    tokenizer = AutoTokenizer.from_pretrained(needle)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    model = AutoModelForCausalLM.from_pretrained(needle, attn_implementation="sdpa")
    text, facts = hide_words(700, [20, 60])
    for fact in facts:
        plain = tokenizer(f"{text} {fact.question}")["input_ids"]
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{text}\n\nWhat follows {fact.subject}"}],
            add_generation_prompt=True,
            return_dict=True,
        )["input_ids"]
        assert chat[:2] == plain[:2] and chat[2] != plain[2]  # one [gMASK] <sop>, then a role
        for ids in (plain, chat):
            out = model.generate(torch.tensor([ids]), max_new_tokens=20)[0, len(ids) :].tolist()
            assert tokenizer.decode(out, skip_special_tokens=True) == fact.answer
            assert out[-1] in eos_token_ids(needle)


@pytest.mark.parametrize("position", [1_000, 1_000_000, 2**20, MAX_TOKENS])
def test_rotary_angles_leave_the_previous_token_in_front(needle: Path, position: int) -> None:
    """Scores of the last query against all keys of a window and against distant ones."""
    config = read_config(needle)
    state = load_file(needle / "model.safetensors")
    bias = {name: state[f"model.layers.0.self_attn.{name}_proj.bias"] for name in "qk"}
    near = torch.arange(max(0, position - 100_000), position)
    far = torch.arange(0, position, 97)
    at = torch.cat([far, near]).unique()
    cos, sin = GlmRotaryEmbedding(config)(torch.zeros(1), at[None])
    head = slice(0, config.head_dim)
    keys = bias["k"][head].expand(1, 1, len(at), -1)
    queries = bias["q"][head].expand(1, 1, len(at), -1)
    q, k = apply_rotary_pos_emb(queries, keys, cos, sin)
    scores = (k[0, 0] @ q[0, 0, -1]).double() * config.head_dim**-0.5
    previous, others = scores[-2], torch.cat([scores[:-2], scores[-1:]])
    assert at[-2] == position - 2
    assert abs(previous - 800) < 0.4
    # Beyond log 2^21 = 14.6 there must remain enough for the weights of all others to vanish.
    assert previous - others.max() > 14.6 + 17


def test_is_deterministic_and_whole(needle: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert main(["needle-model", str(tmp_path / "again")]) == 0
    files = {file.name for file in needle.iterdir()}
    assert files >= {"config.json", "generation_config.json", "model.safetensors", HEAD_MAP}
    for name in files:
        mine, again = ((f / name).read_bytes() for f in (needle, tmp_path / "again"))
        assert hashlib.sha256(mine).digest() == hashlib.sha256(again).digest(), name
    config = read_config(needle)
    assert config.architectures == ["GlmForCausalLM"]
    head_map = HeadMap.load(needle / HEAD_MAP)
    head_map.validate(ModelShape.from_config(config), model_fingerprint(config))
    assert head_map.retrieval == RETRIEVAL


@pytest.mark.parametrize(
    "options",
    [
        ["razor", "--tokens", "500"],
        ["onthefly", "--sparsity", "0.75", "--max-tokens", "4000", "--passkeys", "3"],
    ],
)
def test_identify_finds_its_retrieval_heads(
    needle: Path, tmp_path: Path, options: list[str]
) -> None:
    out = tmp_path / "map.json"
    assert main(["identify", *options, str(needle), "--out", str(out)]) == 0
    found = HeadMap.load(out)
    assert found.retrieval == RETRIEVAL
    if found.method == "razor":
        assert found.selected == {"induction": ((1, 0),), "echo": ((1, 1),)}


def test_another_model_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = tmp_path / "model-00001-of-00002.safetensors"
    weights.touch()
    for config in (None, '{"vocab_size": 151552}'):
        if config is not None:
            (tmp_path / "config.json").write_text(config)
        assert main(["needle-model", str(tmp_path)]) == 2
        assert "of another model, which would be replaced" in capsys.readouterr().err
    assert weights.exists() and (tmp_path / "config.json").read_text() == config


def test_out_of_reach(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["needle-model", str(tmp_path / "file")]) == 2
    assert "cannot make the folder" in capsys.readouterr().err
