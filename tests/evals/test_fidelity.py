"""Fidelity of tiny models: figures against stock transformers, resumption, what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from transformers import CohereConfig, NanoChatConfig, PretrainedConfig

from razor_dist import cli
from razor_dist.cache.policy import StreamingPolicy
from razor_dist.config.errors import ConfigError, HeadMapError, ModelError
from razor_dist.config.schema import EngineConfig
from razor_dist.evals.fidelity import report
from razor_dist.evals.fidelity.config import FidelityConfig
from razor_dist.evals.fidelity.model import FidelityModel, Figures, Scored
from razor_dist.evals.fidelity.task import FidelityTask, Text
from razor_dist.evals.methods import FULL_METHOD, Method, methods_of
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.heads.decision import Flags
from razor_dist.jobs.results import read_job
from razor_dist.models.tokenizer import load_tokenizer
from tests.logits import literal_logits, stock_logits
from tests.tiny_models import save_head_map, write_random
from tests.tokenizer import write_letters

HEADS: Flags = ((True, False), (False, False), (True, True), (False, True))
WINDOW = {"window_min": 30, "window_ratio": 5, "block": 16, "sink_tokens": 4}
PROMPT, END = 100, 230
SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "vocab_size": 192, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
    **{"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False},
}


@pytest.fixture(scope="module")
def model(letters: Path) -> FidelityModel:
    settings = {"attention": "full", "threads": 1, "chunked_prefill_size": 64}
    return FidelityModel(EngineConfig(model=str(letters), **settings))


@pytest.fixture(scope="module")
def text() -> Scored:
    generator = torch.Generator().manual_seed(1)
    return Scored(tuple(torch.randint(4, 99, (END,), generator=generator).tolist()), PROMPT)


def _methods(config: FidelityConfig) -> list[Method]:
    return methods_of(config, config.method_settings)


def masked_logits(letters: Path, text: Scored, mask: Tensor) -> Tensor:
    """Logits ``[N, V]`` of transformers' own model, under a mask ``[N, N]``."""
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    return stock_logits(letters, text.ids, attention_mask=added[None, None])


def assert_figures_are(found: Figures, text: Scored, full: Tensor, own: Tensor) -> None:
    at = slice(text.positions.start, text.positions.stop)
    following = torch.tensor(text.ids[text.prompt + 1 :])
    p, q = full[at].double().log_softmax(-1), own[at].double().log_softmax(-1)
    kl = kl_div(q, p, reduction="none", log_target=True).sum(-1)
    assert kl.mean() > 1e-3  # it does make a difference
    torch.testing.assert_close(found.kl.double(), kl, rtol=1e-3, atol=1e-5)
    for loss, logits in ((found.loss_full, full), (found.loss, own)):
        wanted = cross_entropy(logits[at].double(), following, reduction="none")
        torch.testing.assert_close(loss.double(), wanted, rtol=0, atol=1e-4)
    assert found.same.tolist() == (p.argmax(-1) == q.argmax(-1)).tolist()
    whole = found.summary()
    assert whole["tokens"] == len(kl) == END - PROMPT - 1
    assert whole["kl"] == pytest.approx(kl.mean().item(), abs=1e-5)
    assert whole["same"] == found.same.double().mean().item() < 1


def test_full_attention_differs_from_itself_in_nothing(model: FidelityModel, text: Scored) -> None:
    figures, cost = model.measure(FULL_METHOD, text)
    # Logits of fewer rows at once differ in their last bits.
    assert figures.kl.max() < 1e-6 and figures.same.all()
    torch.testing.assert_close(figures.loss, figures.loss_full, rtol=0, atol=1e-5)
    assert cost["kv_bytes"] == cost["kv_bytes_full"] > 0


@pytest.mark.parametrize(
    "config",
    [
        # Command R, whose logits are scaled behind the output layer, and NanoChat: a soft cap.
        CohereConfig(logit_scale=0.0625, **SIZES),
        NanoChatConfig(final_logit_softcapping=2.0, **SIZES),
    ],
    ids=lambda config: str(config.model_type),
)
def test_logits_that_are_changed_behind_the_output_layer(
    config: PretrainedConfig, text: Scored, tmp_path: Path
) -> None:
    write_letters(write_random(config, tmp_path))
    settings = {"attention": "full", "threads": 1, "chunked_prefill_size": 64}
    model = FidelityModel(EngineConfig(model=str(tmp_path), **settings))
    figures, _ = model.measure(FULL_METHOD, text)
    assert figures.kl.max() < 1e-6
    logits = stock_logits(tmp_path, text.ids)[PROMPT:-1]
    wanted = cross_entropy(logits, torch.tensor(text.ids[PROMPT + 1 :]), reduction="none")
    torch.testing.assert_close(figures.loss_full, wanted, rtol=0, atol=1e-4)
    model.replay.model.register_forward_hook(_cubed)
    with pytest.raises(ModelError, match="does more than scale them"):
        model.measure(FULL_METHOD, dataclasses.replace(text, prompt=PROMPT + 1))


def _cubed(_: object, __: object, output: Any) -> None:
    output.logits = output.logits**3


@pytest.mark.long
@pytest.mark.parametrize("one_by_one", [False, True], ids=["prefill", "decode"])
def test_razor_is_as_far_from_full_as_its_literal_definition(
    model: FidelityModel, letters: Path, text: Scored, one_by_one: bool
) -> None:
    figures, cost = model.measure(Method("razor", WINDOW, HEADS), text, one_by_one=one_by_one)
    policy = StreamingPolicy(30, window_ratio=5, window_max=None, sinks=4, block=16)
    own = literal_logits(letters, text.ids, HEADS, policy)
    assert_figures_are(figures, text, stock_logits(letters, text.ids), own)
    assert 0 < cost["kv_bytes"] < cost["kv_bytes_full"]


@pytest.mark.parametrize("prefill", ["local", "exact"])
def test_streaming_is_stock_transformers_with_a_mask(
    model: FidelityModel, letters: Path, text: Scored, prefill: str
) -> None:
    own = {"attention": "streaming", "prefill": prefill, "compensation": False}
    figures, _ = model.measure(Method("streaming", {**WINDOW, **own}), text)
    query, key = torch.arange(END)[:, None], torch.arange(END)[None]
    least = torch.clamp(-(-(query + 1) // 5), min=30)
    begin = 16 * ((query + 1 - least) // 16)
    seen = (key < 4) | (key >= begin)
    if prefill == "exact":
        seen |= query < PROMPT
    mask = seen & (key <= query)
    full = stock_logits(letters, text.ids)
    assert_figures_are(figures, text, full, masked_logits(letters, text, mask))


def test_a_dtype_of_keys_and_values_is_measured_alone(model: FidelityModel, text: Scored) -> None:
    figures, cost = model.measure(Method("bf16", {"attention": "full", "kv_dtype": "bf16"}), text)
    assert 0 < figures.summary()["kl"] < 1e-3
    assert cost["kv_bytes"] == cost["kv_bytes_full"] / 2


@pytest.mark.long
def test_a_budget_is_filled_by_a_maps_own_scores(
    model: FidelityModel, letters: Path, text: Scored, tmp_path: Path
) -> None:
    scores = tuple((float(flags[0]), float(flags[1])) for flags in HEADS)
    gates = {"method": "duo", "kv_scores": {"gate": scores}}
    head_map = save_head_map(letters, HEADS, tmp_path / "map.json", **gates)
    own = {"head_map": str(head_map), **WINDOW}
    settings = {"as it is": own, "half": {**own, "percent": 50}, "less": {**own, "percent": 20}}
    as_it_is, half, less = _methods(FidelityConfig(model=str(letters), methods=settings))
    assert (half.retrieval, as_it_is.retrieval) == (HEADS, HEADS)
    assert less.retrieval is not None and sum(map(sum, less.retrieval)) == 2
    figures, cost = model.measure(half, text)
    assert torch.equal(figures.kl, model.measure(as_it_is, text)[0].kl)
    assert model.measure(less, text)[1]["kv_bytes"] < cost["kv_bytes"]


@pytest.mark.long
def test_a_run_goes_on_with_other_methods_and_texts(
    model: FidelityModel,
    letters: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    opens_here: Callable[[object], None],
) -> None:
    opens_here(model)
    read: list[int] = []
    hook = model.replay.model.register_forward_pre_hook(
        lambda _, __, inputs: read.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    (tmp_path / "one.py").write_text("def f(x): return x * 2  # twice\n" * 9)
    (tmp_path / "two.txt").write_text("It is a truth universally acknowledged, that. " * 6)
    out = tmp_path / "run"
    shared = ["--model", str(letters), "--no-ray", "--out", str(out), "--tokens", "200"]
    shared += ["--window-min", "30", "--window-ratio", "5", "--block", "16", "--ranges", "2"]

    def run(texts: list[str], methods: str) -> int:
        read.clear()
        command = ["eval", "fidelity", *(str(tmp_path / name) for name in texts), *shared]
        assert cli.main([*command, "--methods", methods]) == 0
        return sum(tokens for tokens in read if tokens > 1)

    with monkeypatch.context() as drawing:
        drawing.setattr(report, "draw", lambda *args: None)  # takes a second
        # Full attention reads each text once for all methods; the last token is not read.
        assert run(["one.py"], "full,streaming") == 199 + 99 + 199
        assert run(["one.py"], "full,streaming") == 0
    assert run(["one.py", "two.txt"], "streaming") == 199 + 199
    hook.remove()
    records = [record["result"] for record in read_job(out).records]
    assert [(r["text"], r["method"]) for r in records] == [
        ("one.py", "streaming"),
        ("two.txt", "streaming"),
        ("one.py", "full"),
    ]
    for result in records:
        parts, whole = result["ranges"], result["all"]
        assert [(r["begin"], r["end"]) for r in parts] == [(100, 149), (149, 199)]
        for key in ("kl", "loss", "same"):
            mean = sum(r[key] * r["tokens"] for r in parts) / whole["tokens"]
            assert whole[key] == pytest.approx(mean, abs=1e-12)
    summary = json.loads((out / "fidelity.json").read_text())
    assert [r["all"] for r in summary["results"]] == [r["all"] for r in records]
    page, picture = (out / "report.md").read_text(), (out / "fidelity.svg").read_bytes()
    row = next(line for line in page.splitlines() if line.startswith("| full |"))
    assert row.endswith("| 100.0% | +0.0000 ± 0.0000 | 0.0000 | 0.000 | 100.00% |"), row
    assert b"one.py" in picture and picture.count(b">streaming<") == 1
    capsys.readouterr()
    assert cli.main(["eval", "report", str(out)]) == 0
    assert capsys.readouterr().out.strip() == page.strip()
    assert (out / "fidelity.svg").read_bytes() == picture
    # Other ranges would be another table.
    other = ["eval", "fidelity", str(tmp_path / "one.py"), *shared[:-1], "3"]
    assert cli.main([*other, "--methods", "streaming"]) == 2
    assert "holds results of other settings" in capsys.readouterr().err
    # Another window is another method, and another text of the same name another text.
    (tmp_path / "one.py").write_text("def g(x): return x * 3  # thrice\n" * 9)
    other = ["eval", "fidelity", str(tmp_path / "one.py"), *shared, "--window-min", "40"]
    assert cli.main([*other, "--methods", "streaming"]) == 0
    page = (out / "report.md").read_text()
    assert len({line for line in page.splitlines() if line.startswith("## one.py (")}) == 2
    assert len({line[:27] for line in page.splitlines() if line.startswith("| streaming (")}) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"methods": ("razr",)}, "methods: unknown method 'razr'; give full, razor, streaming, "),
        ({"world_size": 2}, "world_size is 2, but eval fidelity compares in one process"),
        ({"tokens": 100, "prompt_tokens": 99}, "prompt_tokens is 99, but of 100 tokens 2"),
        (
            {"repeat_at": (2000,), "prompt_tokens": 3000},
            "prompt_tokens is 3000, but the prompt must end before the last copy, of 256 tokens "
            "(repeat_tokens) up to 2000 (repeat_at)",
        ),
        ({"repeat_at": (900, 2000), "prompt_tokens": 1745}, "prompt_tokens is 1745, but the "),
        ({"attention": "razor"}, "attention is what methods differ in"),
        ({"retrieval_share": 0.5}, "retrieval_share is 0.5, but full attention reads all blocks"),
        ({"methods": {"a": {"page_size": 16}}}, "methods: a: page_size is no setting of a method"),
        ({"methods": {"a": {"window_min": 0}}}, "methods: a: window_min must be at least 1, got 0"),
        (
            {"methods": {"a": {"attention": "full", "percent": 5}}},
            "methods: a: percent is of no use with attention: full",
        ),
        (
            {"methods": {"a": {"selector": "mass"}}, "head_map": "MAP"},
            "methods: a: selector needs retrieval_share",
        ),
        (
            {"methods": {"a": {"retrieval_share": "1/0"}}, "head_map": "MAP"},
            "methods: a: retrieval_share must be a number between 0 and 1, such as 1/32, got '1/0'",
        ),
        (
            {"methods": {"a": {"retrieval_share": 0.1, "selector": "mas"}}, "head_map": "MAP"},
            "methods: a: selector must be of slower, keys-4bit, slower-4bit, slower-unrounded, ",
        ),
        (
            {"methods": {"a": {"retrieval_share": 0.1, "kv_dtype": "int8"}}, "head_map": "MAP"},
            "methods: a: retrieval_share reads keys of the model's own dtype, but kv_dtype is int8",
        ),
        (
            {"methods": {"a": {"attention": "streaming", "retrieval_share": 0.1}}},
            "methods: a: retrieval_share is of no use with attention: streaming",
        ),
        ({"methods": ("/no/map.json",)}, "methods: map: cannot read the head map /no/map.json"),
        ({"methods": ("razor",)}, "methods: razor: no head map is shipped for the model"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(map(str, value)),
)
def test_settings_that_are_refused(
    letters: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    if settings.get("head_map") == "MAP":
        head_map = save_head_map(letters, HEADS, tmp_path / "map.json")
        settings = settings | {"head_map": str(head_map)}
    with pytest.raises((ConfigError, HeadMapError)) as error:
        _methods(FidelityConfig(model=str(letters), **settings))
    assert str(error.value).startswith(message)


def test_copying_is_of_methods_that_read_every_text() -> None:
    figures = dict.fromkeys(("kl", "same", "loss", "loss_full", "right", "right_full"), 0.5)
    parts: list[dict[str, Any]] = [{"begin": 9, "end": 50, "tokens": 41, **figures}]
    parts.append({"begin": 50, "end": 99, "tokens": 49, "copied": [1.0, 1.0], **figures})
    texts = {
        "one": [{"method": name, "ranges": parts} for name in ("a", "b")],
        "two": [{"method": "b", "ranges": parts}],  # a is not done
    }
    page = "\n".join(report._copying(texts))
    assert "| b |" in page and "| a |" not in page


@pytest.mark.parametrize(
    ("prompt", "copies", "read"),
    [
        (1744, [range(1744, 2000)], "-"),  # nothing but a copy is compared
        (640, [range(800, 900), range(900, 1000)], "10.0%"),
        (640, [range(800, 900), range(1000, 1100)], "30.0%"),
    ],
)
def test_copies_stand_beside_the_last_text(
    letters: Path, prompt: int, copies: list[range], read: str
) -> None:
    lengths = {"repeat_at": [copy.stop for copy in copies], "repeat_tokens": len(copies[0])}
    FidelityConfig(model=str(letters), methods=("full",), prompt_tokens=prompt, **lengths)
    text = Text("one", Scored((0,) * copies[-1].stop, prompt), tuple(copies))
    figures = dict.fromkeys(("kl", "same", "loss", "loss_full", "right", "right_full"), 0.5)
    ranges: list[dict[str, Any]] = []
    for number, (begin, end, copied) in enumerate(text.parts(6), start=1):
        shares = dict.fromkeys(("blocks", "tiles"), number / 10)
        part = {"begin": begin, "end": end, "tokens": end - begin, **shares, **figures}
        ranges.append(part | ({"copied": [1.0, 1.0]} if copied else {}))
    page = "\n".join(report._copying({"one": [{"method": "a", "ranges": ranges}]}))
    found, by_length = (line.split(" | ") for line in page.splitlines() if line.startswith("| a |"))
    assert found[1] == found[2] == read and found[3] == f"{len(ranges) / 10:.1%}"
    assert found[-2:] == (["-", "- |"] if read == "-" else ["0.5000", "0.500 |"])
    assert len(by_length) == 1 + len(ranges)


def test_of_a_long_text_the_beginning_alone_is_tokenised(letters: Path, tmp_path: Path) -> None:
    file = tmp_path / "long.txt"
    file.write_text("Much. " * 200_000)
    config = FidelityConfig(model=str(letters), methods=("streaming",), tokens=3000)
    with patch.object(PromptEncoder, "text", autospec=True, side_effect=PromptEncoder.text) as text:
        [found] = FidelityTask.plan(config, [file]).texts
    [call] = text.call_args_list
    assert len(call.args[1]) < 1_100_000
    assert list(found.scored.ids) == PromptEncoder(load_tokenizer(letters)).text("Much. " * 500)


def test_texts_that_are_refused(letters: Path, tmp_path: Path) -> None:
    short, other = tmp_path / "short.txt", tmp_path / "other" / "short.txt"
    short.write_text("Not much.")
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    config = FidelityConfig(model=str(letters), methods=("streaming",), tokens=200)
    for files, message in (
        ([short], "short.txt has 9 tokens, fewer than the 200 wanted"),
        ([short, other], "two texts are named short.txt; rename one"),
        ([latin], r"latin.txt is not UTF-8 text \(byte 3\); convert it"),
        ([tmp_path / "none.txt"], f"cannot read the text {tmp_path}/none.txt: No such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            FidelityTask.plan(config, files)
    with pytest.raises(ConfigError, match=r"tokens is 5000, but .* holds 4095"):
        FidelityTask.plan(config.model_copy(update={"tokens": 5000}), [short])
