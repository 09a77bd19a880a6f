"""``razor-dist heads``, end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from transformers import LlamaConfig, Qwen3Config

from razor_dist import cli
from razor_dist.config.schema import EngineConfig
from razor_dist.heads.head_map import HeadMap, shipped_head_map
from razor_dist.models.loader import model_fingerprint, read_config
from tests.heads.test_criteria import SCORES, save_scores
from tests.heads.test_duo_pattern import GATES, write

SMOLLM2 = str(shipped_head_map("smollm2-14-1"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration and no weights, for maps of 3 layers and 2 KV heads."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    LlamaConfig(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2).save_pretrained(
        folder
    )
    return folder


def run(*arguments: object) -> int:
    return cli.main(["heads", *map(str, arguments)])


def test_import_and_export(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = write(tmp_path / "pattern", [[0.25, 1.01], [1, 0.5], [1, 0]]), tmp_path / "a.json"
    assert run("import", folder, "--model", model, "--out", out, "--sparsity", 0.3) == 0
    shown = capsys.readouterr().out
    assert "clipped 1 gates" in shown
    assert "sparsity 0.3: kept 4 of 6 KV heads (66.7%) on 3 of 3 layers" in shown
    found = HeadMap.load(out)
    assert found.kv_scores["gate"] == GATES
    assert found.fingerprint == model_fingerprint(LlamaConfig.from_pretrained(model))

    assert run("export", out, tmp_path / "exported") == 0
    assert "the map's gates" in capsys.readouterr().out
    again = tmp_path / "b.json"
    assert run("import", tmp_path / "exported", "--model", model, "--out", again) == 0
    assert HeadMap.load(again).retrieval == found.retrieval
    assert run("export", SMOLLM2, tmp_path / "flags") == 0
    assert "1 for every KV head" in capsys.readouterr().out


def test_a_map_is_for_the_frequencies_that_serve_will_have(tmp_path: Path) -> None:
    folder, out = write(tmp_path / "pattern", GATES), tmp_path / "a.json"
    Qwen3Config(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2).save_pretrained(
        tmp_path / "qwen"
    )
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    given = "import", folder, "--model", tmp_path / "qwen", "--out", out
    for flags, scaling in (((), None), (("--rope-scaling", json.dumps(yarn)), yarn)):
        assert run(*given, *flags) == 0
        options = EngineConfig(model=str(tmp_path / "qwen"), rope_scaling=scaling).model_options
        config = read_config(tmp_path / "qwen", **options)
        assert HeadMap.load(out).fingerprint == model_fingerprint(config)


def test_import_of_kvzip_files(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, out = [tmp_path / f"{name}.pt" for name in ("qa", "code")], tmp_path / "a.json"
    for file, scores in zip(files, (SCORES, [[0.5, 0], [0, 0.875], [0, 0]]), strict=True):
        save_scores(file, scores)
    assert run("import", *files, "--model", model, "--out", out) == 0
    assert "sparsity 0.4: kept 4 of 6 KV heads" in capsys.readouterr().out
    found = HeadMap.load(out)
    assert found.method == "kvzip" and found.settings["files"] == ["qa.pt", "code.pt"]
    assert found.retrieval == ((False, True), (True, True), (True, False))
    assert run("import", tmp_path, *files, "--model", model, "--out", out) == 2
    assert "one folder of a pattern, or .pt files" in capsys.readouterr().err


def test_mistakes_are_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "pattern", GATES[:2])
    assert run("import", folder, "--model", model, "--out", tmp_path / "a.json") == 2
    error = capsys.readouterr().err
    assert "2 lines of gates, but 'tiny' has 3 layers" in error and error.count("\n") == 1
    for wrong, message in ((tmp_path, "has no config.json"), ("./none", "there is no such folder")):
        assert run("import", folder, "--model", wrong, "--out", tmp_path / "a.json") == 2
        assert message in capsys.readouterr().err
    assert run("show", tmp_path / "none.json") == 2
    assert run("compare", SMOLLM2) == 2


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = shipped_head_map("smollm2")
    assert run("compare", SMOLLM2, other) == 0
    shown = capsys.readouterr().out
    assert "22 (24.4%)" in shown and "KV, kept" in shown and "100.0%" in shown
    assert run("compare", SMOLLM2, other, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [one["kept_heads"] for one in result["maps"]] == [22, 39]
    assert result["pairs"][0]["kv_heads"]["both"] == 22
    assert result["pairs"][0]["correlations"]["echo"] == pytest.approx(1.0)


def test_a_doubt_goes_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text(Path(SMOLLM2).read_text().replace("sha256:", "sha256:0"))
    assert run("compare", SMOLLM2, other, "--json") == 0
    shown = capsys.readouterr()
    assert "warning: " in shown.err and "different configurations" in shown.err
    assert json.loads(shown.out)["warnings"]


def test_show(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", SMOLLM2) == 0
    shown = capsys.readouterr().out
    assert "model   smollm2 (sha256:" in shown and "method  razor" in shown
    assert "induction_percent: 14" in shown
    assert "selected 41 of 270 query heads (15.2%)" in shown
    assert "kept 22 of 90 KV heads (24.4%) on 12 of 30 layers" in shown
    assert "\n 7  ··■  1\n" in shown

    out, picture = tmp_path / "a.json", tmp_path / "a.png"
    run("import", write(tmp_path / "pattern"), "--model", model, "--out", out)
    assert run("show", out, "--plot", picture) == 0
    assert "gate, of KV heads" in capsys.readouterr().out
    with Image.open(picture) as image:
        assert image.width > 500 and len(image.getcolors(1 << 24) or ()) > 50


def test_a_picture_that_cannot_be_written_is_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("show", SMOLLM2, "--plot", tmp_path / "none" / "a.png") == 2
    shown = capsys.readouterr()
    assert "No such file or directory" in shown.err and not shown.out


def test_a_picture_does_not_replace_its_head_map(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, link = tmp_path / "map.json", tmp_path / "link.png"
    own.write_bytes(Path(SMOLLM2).read_bytes())
    link.symlink_to(own)
    for picture in (own, link):
        assert run("show", own, "--plot", picture) == 2
        assert "is the head map itself" in capsys.readouterr().err
    assert own.read_bytes() == Path(SMOLLM2).read_bytes()


def test_what_needs_no_model_does_not_import_torch() -> None:
    code = (
        "import sys; from razor_dist.cli import main;"
        "main(['heads', '--help']); main(['heads', 'import', '--help']);"
        f"main(['heads', 'show', {SMOLLM2!r}]); main(['heads', 'compare', *[{SMOLLM2!r}] * 2]);"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
