"""The identify command, end to end on a tiny model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from PIL import Image

from razor_dist import cli
from razor_dist.config.errors import ConfigError, HeadMapError, ModelError
from razor_dist.config.schema import EngineConfig
from razor_dist.evals.fidelity.model import FidelityModel
from razor_dist.evals.grid import Check, place_seed
from razor_dist.evals.needle.config import GridConfig
from razor_dist.evals.needle.model import HEAD_MAP, build_needle_model
from razor_dist.evals.needle.presets import number_facts
from razor_dist.heads.head_map import HeadMap
from razor_dist.heads.plot import plot_head_map
from razor_dist.models.loader import model_fingerprint, read_config
from razor_dist.models.shape import ModelShape
from tests.heads.command import identify_heads
from tests.tiny_models import make_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


def _identify(model: Path, out: Path, *options: str) -> str:
    return identify_heads("razor", model, "--out", out, "--tokens", 40, *options)


def test_writes_a_map_and_a_picture(model: Path, tmp_path: Path) -> None:
    out, picture = tmp_path / "map.json", tmp_path / "map.png"
    text = _identify(model, out, "--plot", str(picture))
    found = HeadMap.load(out)
    config = read_config(model)
    found.validate(ModelShape.from_config(config), model_fingerprint(config))
    assert found.model == "tiny-llama"
    assert found.settings["tokens"] == found.settings["tokens_requested"] == 40
    # 14 % of 4 x 8 query heads is 4.48, and at least one echo head.
    assert [len(found.selected[kind]) for kind in ("induction", "echo")] == [4, 1]
    assert "40 random tokens x 4;" in text
    assert f"{found.selected_fraction:.1%}" in text and f"{found.kv_fraction:.1%}" in text
    with Image.open(picture) as image:
        assert image.width > 800 and len(image.getcolors(1 << 24) or ()) > 50


def test_says_how_many_tokens_fit(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "map.json"
    text = _identify(model, out, "--tokens", "2500")
    assert "190 random tokens x 4, the most that fit; 2500 asked" in text
    assert HeadMap.load(out).settings["tokens"] == 190


def test_a_seed_decides_everything(model: Path, tmp_path: Path) -> None:
    files = [tmp_path / f"{i}.json" for i in range(3)]
    for file, seed in zip(files, ("7", "7", "8"), strict=True):
        _identify(model, file, "--seed", seed)
    same, again, other = (HeadMap.load(file) for file in files)
    assert same == again
    assert same.scores != other.scores


def test_missing_folder_is_noticed_before_the_work(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        _identify(model, tmp_path / "no" / "map.json")


@pytest.mark.long
def test_verify_records_what_the_map_loses(
    letters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, prose = tmp_path / "map.json", "A sentence of some length is what a haystack is made of. "
    (tmp_path / "prose.txt").write_text(prose * 10)
    options = ["--verify", "--verify-tokens", "400", "--verify-window", "150", "--seed", "1"]
    options += ["--haystack", str(tmp_path)]
    text = _identify(letters, out, *options)
    found = HeadMap.load(out).verification
    assert found is not None
    assert found.found_full == 0, "the model is random"
    assert "full attention finds none, so this verifies nothing" in text
    assert (found.documents, found.tokens, found.seed, found.dtype) == (5, 400, 1, "float32")
    assert found.haystack == str(tmp_path)
    assert found.settings["window_min"] == 150 and found.settings["prefill"] == "local"
    assert found.fidelity is not None and found.fidelity.tokens == 199
    assert found.fidelity.kl > 0 and 0 < found.fidelity.same < 1
    assert f"tokens of prose: a loss of {found.fidelity.loss:.3f} nats per token" in text
    kept = HeadMap.load(out).kv_fraction
    assert kept < found.kv_bytes / found.kv_bytes_full < 1
    assert f"verified on {found}" in text
    assert f"full attention finds {found.found_full}, this map {found.found}; " in text
    assert cli.main(["heads", "show", str(out)]) == 0
    assert f"verified on {found}" in capsys.readouterr().out


@pytest.mark.long
def test_verify_counts_the_needles_that_a_map_loses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the needle model, whose one retrieval head finds what no window holds."""
    folder = build_needle_model(tmp_path / "needle")
    (tmp_path / "prose.txt").write_text("Rain may come and go again before noon there. " * 80)
    ask_for_numbers(folder, GridConfig(lengths=(600,), needles=1, haystack=str(tmp_path)))
    # Of 600 tokens the window holds the last 100 to 115 and the question: the needle at 90 %.
    config = EngineConfig(model=str(folder), window_min=100, window_ratio=None, block=16)
    check = Check.plan(config, 600, str(tmp_path), seed=0)
    whole = HeadMap.load(folder / HEAD_MAP)
    without = dataclasses.replace(whole, retrieval=((False, False), (False, False)))
    counts = [
        (found.found_full, found.found, found.lost, found.gained)
        for found in (check.run(head_map, print) for head_map in (whole, without))
    ]
    assert counts == [(5, 5, 0, 0), (5, 1, 4, 0)]
    refusal = ModelError("its logits are cubed")
    monkeypatch.setattr(FidelityModel, "measure", Mock(side_effect=refusal))
    said: list[str] = []
    found = check.run(whole, said.append)
    assert (found.found, found.fidelity) == (5, None)
    assert said[-1] == "prose is not compared: its logits are cubed"


def ask_for_numbers(folder: Path, settings: GridConfig) -> None:
    """Teach the needle model's tokenizer the numbers and the questions of a grid.

    The model says what followed the prompt's last word before. A base model's question ends in
    "The special magic number of Oslo is": the numbers become words, and the question's other "is"
    part of another word.
    """
    file = folder / "tokenizer.json"
    fields = json.loads(file.read_text())
    vocabulary = fields["model"]["vocab"]
    for word, place in zip(
        ("academic", "accept", "accurate", "achieve", "acquire"), settings.places, strict=True
    ):
        [fact] = number_facts([place[1]], place_seed(place, settings.seed))
        vocabulary[fact.answer] = vocabulary.pop(word)
    joined = {"type": "Replace", "pattern": {"String": "What is"}, "content": "what"}
    fields["normalizer"] = {"type": "Sequence", "normalizers": [joined, fields["normalizer"]]}
    file.write_text(json.dumps(fields))
    (folder / "chat_template.jinja").unlink()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--verify-tokens", "400"], "--verify-tokens needs --verify"),
        (["--haystack", "."], "--haystack needs --verify"),
        (["--verify", "--verify-tokens", "4000"], "holds documents of 1 to 3964"),
        (["--verify"], "nothing: a streaming head's window of at least 4000"),
        (
            ["--verify", "--verify-tokens", "100", "--verify-window", "50"],
            "more --verify-tokens, up to 3964",
        ),
    ],
)
def test_a_verification_that_cannot_be_is_refused_before_the_work(
    options: list[str], message: str, letters: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        _identify(letters, tmp_path / "map.json", *options)
    assert not (tmp_path / "map.json").exists()


def test_without_a_tokenizer_nothing_is_verified(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no tokenizer, so it can be asked nothing"):
        _identify(model, tmp_path / "map.json", "--verify", "--verify-window", "100")


def test_nothing_to_draw(tmp_path: Path) -> None:
    shape = ModelShape(
        layers=1, query_heads=2, kv_heads=1, head_dim=8, vocab_size=8, max_positions=8
    )
    with pytest.raises(HeadMapError, match="has no scores to draw"):
        plot_head_map(HeadMap.uniform("full", shape), tmp_path / "map.png")
