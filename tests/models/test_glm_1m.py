"""GLM-4-9B-1M: a folder laid out as the published one, its settings, and what it takes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig

from razor_dist import LLM, SamplingParams
from razor_dist.api.parsing import parse_request
from razor_dist.api.request import Limits
from razor_dist.cli import main
from razor_dist.config.errors import HeadMapError
from razor_dist.config.schema import ServerConfig
from razor_dist.config.sources import load_config
from razor_dist.engine import build, capacity
from razor_dist.engine.core import EngineCore
from razor_dist.frontend.prompts import PromptEncoder, PromptLimits
from razor_dist.heads.layout import HeadLayout
from razor_dist.models.loader import eos_token_ids, load_model, read_config
from razor_dist.models.shape import ModelShape
from razor_dist.models.tokenizer import load_tokenizer
from razor_dist.parallel.comm import Communicator
from razor_dist.protocol.messages import Token
from tests.tiny_models import make_tiny
from tests.tokenizer import write_glm_letters

CPU, META = torch.device("cpu"), torch.device("meta")
ROOT = Path(__file__).parents[2]
SETTINGS = "configs/glm-4-9b-chat-1m.yaml"
LENGTH = 2**20
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "Me."},
    {"role": "user", "content": "Why?"},
]
# As GLM-4 was trained: nothing between a text and the next role.
CHAT_TEXT = (
    "[gMASK]<sop><|system|>\nBe brief.<|user|>\nWho?<|assistant|>\nMe.<|user|>\nWhy?<|assistant|>"
)
ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in bfloat16, laid out as glm-4-9b-chat-1m-hf."""
    whole = make_tiny("glm_1m", tmp_path_factory.mktemp("whole"))
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.bfloat16)
    path = tmp_path_factory.mktemp("glm-4-9b-chat-1m-hf")
    ids = write_glm_letters(path)
    model.generation_config = GenerationConfig(
        eos_token_id=[ids[token] for token in ENDS], pad_token_id=ids[ENDS[0]], do_sample=True
    )
    model.save_pretrained(path, max_shard_size="64KB")
    return path


@pytest.fixture(scope="module")
def encoder(folder: Path) -> PromptEncoder:
    return PromptEncoder(load_tokenizer(folder))


def spelt(text: str) -> list[int]:
    """Token ids of a text, by the alphabet and not by the tokenizer."""
    special = {"[gMASK]": 102, "<sop>": 104, "<|system|>": 106, "<|user|>": 107, "\n": 99}
    special["<|assistant|>"] = 108
    pieces = re.findall(r"\[gMASK\]|<sop>|<\|\w+\|>|.|\n", text)
    return [special[piece] if piece in special else ord(piece) - 28 for piece in pieces]


def test_a_chat_begins_with_one_gmask_and_one_sop(folder: Path, encoder: PromptEncoder) -> None:
    want = spelt(CHAT_TEXT)
    assert want[:3] == [102, 104, 106] and want.count(102) == want.count(104) == 1
    assert encoder.chat(CHAT) == want
    # As `LLM.prefill_chat` does it.
    assert encoder.text(encoder.chat_text(CHAT), special_tokens=False) == want
    limits = Limits("glm", 8, PromptLimits(4096, 192), {})
    body = json.dumps({"model": "glm", "messages": CHAT, "max_tokens": 3}).encode()
    [prompt] = parse_request("chat", body, encoder, limits).prompts
    assert list(prompt.tokens) == want
    # A plain text has no template, and gets both from the tokenizer.
    body = json.dumps({"model": "glm", "prompt": "Why?", "max_tokens": 3}).encode()
    [prompt] = parse_request("completions", body, encoder, limits).prompts
    assert list(prompt.tokens) == spelt("[gMASK]<sop>Why?")


@pytest.mark.long
def test_an_offline_chat(folder: Path) -> None:
    with LLM(str(folder), attention="full", max_model_len=200, kv_tokens=400) as llm:
        [output] = llm.chat(CHAT, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    assert output.prompt_token_ids == spelt(CHAT_TEXT)
    assert len(output.outputs[0].token_ids) == 2


def mappings() -> Iterator[tuple[range, Path]]:
    """The addresses at which files lie in this process's memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        address, *_, file = line.split(maxsplit=5)
        if file.startswith("/"):
            begin, end = (int(part, 16) for part in address.split("-"))
            yield range(begin, end), Path(file)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_every_weight_is_a_view_of_the_file_that_the_index_names(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {file.name for file in folder.glob("*.safetensors")}
    assert len(files) > 3 and files == set(index.values())
    model = load_model(folder, device=CPU, dtype=torch.bfloat16)
    mapped = [(addresses, file) for addresses, file in mappings() if file.parent == folder]
    for name, parameter in model.named_parameters():
        [file] = [f.name for addresses, f in mapped if parameter.data_ptr() in addresses]
        assert file == index[name], name
    # In another dtype they are the same numbers, and the files are let go of.
    converted = dict(load_model(folder, device=CPU, dtype=torch.float32).named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(converted[name], parameter.float()), name
        assert not any(converted[name].data_ptr() in addresses for addresses, _ in mapped)


def commands() -> list[list[str]]:
    """Commands that the settings' first lines tell the reader to run."""
    comment = "\n".join(
        line.removeprefix("#") for line in (ROOT / SETTINGS).read_text().splitlines()
    )
    lines = comment.replace("\\\n", " ").splitlines()
    found = [shlex.split(line) for line in lines if line.lstrip().startswith("razor-dist ")]
    return [words[1:] for words in found]


def answer(core: EngineCore, prompt: list[int], **params: Any) -> list[Token]:
    core.add("a", prompt, SamplingParams(temperature=0.0, max_tokens=4, **params))
    told = []
    while core.has_work:
        told += [message for message in core.step() if isinstance(message, Token)]
    return told


def test_the_settings_serve_it_and_every_end_token_ends(
    folder: Path, encoder: PromptEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identify, serve = commands()
    assert serve == ["serve", "--config", SETTINGS]
    config = load_config(ServerConfig, env={}, yaml_path=ROOT / SETTINGS)
    assert (config.world_size, config.max_model_len, config.max_num_seqs) == (8, LENGTH, 1)
    assert identify[:3] == ["identify", "razor", config.model]
    # On one rank, with the tiny folder in place of the model; everything else as it stands.
    here: Any = {"model": str(folder), "world_size": 1, "device": "cpu", "max_model_len": 400}
    config = config.model_copy(update=here)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HeadMapError, match=f"cannot read the head map {config.head_map}: No such"):
        build.load(config, Communicator(None), CPU)
    Path("configs/head_maps").mkdir(parents=True)
    replaced = {identify[2]: str(folder), "cuda": "cpu"}
    assert main([*(replaced.get(word, word) for word in identify), "--tokens", "50"]) == 0
    found = json.loads(Path(config.head_map or "").read_text())
    assert found["settings"]["induction_percent"] == 28.0
    assert found["settings"]["echo_percent"] == 2.0

    loaded = build.load(config, Communicator(None), CPU)
    prompt = encoder.chat(CHAT)
    assert loaded.eos_token_ids == (100, 107, 109)  # generation_config.json's, not config.json's
    assert eos_token_ids(read_config(folder)) == (2, 3)
    head: Any = loaded.model.lm_head
    rows = head.weight.clone()
    core = build.start(config, loaded, Communicator(None)).core
    first = answer(core, prompt, ignore_eos=True)[0].token
    for end in loaded.eos_token_ids:
        order = torch.arange(len(rows))
        order[[first, end]] = order[[end, first]]  # what was answered first is now this token
        head.weight = nn.Parameter(rows[order], requires_grad=False)
        core = build.start(config, loaded, Communicator(None)).core
        told = answer(core, prompt)
        assert [m.token for m in told] == [end]
        assert told[0].finish == "stop"
        assert len(answer(core, prompt, ignore_eos=True)) == 4


def memory(world: int, kept: int) -> dict[str, int]:
    """Bytes on each of ``world`` ranks that keep ``kept`` KV heads, of the tensors themselves."""
    config = load_config(ServerConfig, env={}, yaml_path=ROOT / SETTINGS)
    model_config = read_config(ROOT / "configs/shapes/glm-4-9b-chat-1m")
    shape = ModelShape.from_config(model_config)
    assert config.chunked_prefill_size is not None
    whole = kept // shape.kv_heads
    retrieval = [[layer < whole] * shape.kv_heads for layer in range(shape.layers)]
    layout = HeadLayout.from_decision(retrieval, META)
    cache = capacity.RankSizes(config, shape, layout, world, torch.bfloat16).caches(LENGTH)
    caches = capacity.new_caches(layout, shape, cache, META)
    with META:
        model = AutoModelForCausalLM.from_config(model_config, dtype=torch.bfloat16)
    return {
        "weights": sum(parameter.nbytes for parameter in model.parameters()),
        "retrieval": caches.pages.reserved_bytes,
        "local": sum(store.reserved_bytes for store in caches.streaming),
    }


@pytest.mark.parametrize(("world", "kept"), [(1, 48), (1, 160), (8, 48), (8, 160)])
def test_the_documented_memory(world: int, kept: int) -> None:
    text = (ROOT / "docs/million.md").read_text()
    [row] = re.findall(rf"^\| {world} \| {kept} of 160 \|(.*)\|$", text, re.MULTILINE)
    weights, retrieval, local = map(float, row.split("|")[:3])
    found = {name: value / 2**30 for name, value in memory(world, kept).items()}
    documented = {"weights": weights, "retrieval": retrieval, "local": local}
    assert found == pytest.approx(documented, abs=0.006)
