"""Names of models: what is found, and what is said when nothing is."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from razor_dist.config.errors import ModelError
from razor_dist.models.registry import config_folder, display_name, resolve_model
from tests.tiny_models import make_tiny

Find = Callable[[str], Path]


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*args: object, **kwargs: object) -> str:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)


def test_local_folder_is_itself(tmp_path: Path, no_hub: None) -> None:
    path = make_tiny("llama", tmp_path / "model")
    assert resolve_model(str(path)) == path


# Whether weights are wanted or not, a name means the same.
either = pytest.mark.parametrize("find", [resolve_model, config_folder])


@either
@pytest.mark.parametrize("name", ["./nope", "/nope/model", "nope", "../a/b", "~/nope", "a/b/c"])
def test_missing_path_asks_no_hub(find: Find, name: str, no_hub: None) -> None:
    with pytest.raises(ModelError, match=r"there is no such folder.*'smollm2'"):
        find(name)


@either
def test_a_file_is_refused(find: Find, tmp_path: Path, no_hub: None) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ModelError, match="is a file; give the folder"):
        find(str(file))


@either
def test_folder_without_config(find: Find, tmp_path: Path, no_hub: None) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        find(str(tmp_path))


def test_folder_without_weights(tmp_path: Path, no_hub: None) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert config_folder(str(tmp_path)) == tmp_path
    with pytest.raises(ModelError, match=r"has no \*\.safetensors weights"):
        resolve_model(str(tmp_path))


def test_pickles_are_refused_by_name(tmp_path: Path, no_hub: None) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"pickle only \(pytorch_model\.bin\)"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("trust", [False, True])
def test_hub_id_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trust: bool, weights: bool
) -> None:
    path = make_tiny("llama", tmp_path / "snapshot")
    asked = {}

    def fetch(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked[name] = allow_patterns
        assert fnmatch("consolidated.safetensors", *ignore_patterns)  # Mistral's, the same weights
        return str(path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    if not weights:
        path.joinpath("model.safetensors").unlink()
    assert resolve_model("org/name", trust_remote_code=trust, weights=weights) == path
    assert any(fnmatch("model.safetensors", one) for one in asked["org/name"]) == weights
    assert "*.bin" not in asked["org/name"]
    assert ("*.py" in asked["org/name"]) == trust


def test_of_a_hub_id_the_configuration_alone_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(name: str, allow_patterns: list[str], **_: object) -> str:
        assert (name, allow_patterns) == ("org/name", ["config.json"])
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert config_folder("org/name") == tmp_path


def test_a_folder_is_called_by_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny" / "smollm2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "tiny")
    assert display_name(".") == display_name(f"{tmp_path}/tiny/") == "tiny"
    assert display_name("org/name") == "org/name"
    # The embedded model, although there is a folder of that name.
    assert display_name("smollm2") == "smollm2"
    assert display_name("./smollm2") == "smollm2"


class ProxyError(Exception):
    """As the HTTP client of huggingface_hub has it: neither an `OSError` nor the hub's."""


@either
@pytest.mark.parametrize("error", [LocalEntryNotFoundError, ProxyError])
def test_unreachable_hub(
    find: Find, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(*args: object, **kwargs: object) -> str:
        raise error("no network\nand some advice")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(ModelError, match=r"neither a folder.*\(no network\); 'smollm2'"):
        find("org/name")
