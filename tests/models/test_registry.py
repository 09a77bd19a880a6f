"""Names of models: what is found, and what is said when nothing is."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from razor_dist.errors import ModelError
from razor_dist.models.registry import resolve_model
from tests.tiny_models import make_tiny


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*args: object, **kwargs: object) -> str:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)


def test_local_folder_is_itself(tmp_path: Path, no_hub: None) -> None:
    path = make_tiny("llama", tmp_path / "model")
    assert resolve_model(str(path)) == path


@pytest.mark.parametrize("name", ["./nope", "/nope/model", "nope", "../a/b", "~/nope", "a/b/c"])
def test_missing_path_asks_no_hub(name: str, no_hub: None) -> None:
    with pytest.raises(ModelError, match=r"there is no such folder.*'smollm2'"):
        resolve_model(name)


def test_file_is_no_model(tmp_path: Path, no_hub: None) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ModelError, match="is a file; give the folder"):
        resolve_model(str(file))


def test_folder_without_config(tmp_path: Path, no_hub: None) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


def test_folder_without_weights(tmp_path: Path, no_hub: None) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"has no \*\.safetensors weights"):
        resolve_model(str(tmp_path))


def test_pickles_are_refused_by_name(tmp_path: Path, no_hub: None) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"pickle only \(pytorch_model\.bin\)"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("trust", [False, True])
def test_hub_id_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trust: bool) -> None:
    path = make_tiny("llama", tmp_path / "snapshot")
    asked = {}

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked[name] = allow_patterns
        return str(path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert resolve_model("org/name", trust_remote_code=trust) == path
    assert "*.safetensors" in asked["org/name"]
    assert "*.bin" not in asked["org/name"]
    assert ("*.py" in asked["org/name"]) == trust


def test_unreachable_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*args: object, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("no network\nand some advice")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(ModelError, match=r"neither a folder.*\(no network\); 'smollm2'"):
        resolve_model("org/name")
