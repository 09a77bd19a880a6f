"""Find a model's local folder by the model's name."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from razor_dist.config.errors import ModelError
from razor_dist.models import smollm2

# The files of a hub repository that serving needs; never a pickle.
_WEIGHTS = "*.safetensors"
_HUB_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
# Mistral's repositories have their weights in a second layout, which would double a download.
_NOT_NEEDED = ["consolidated*"]
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(name: str, *, trust_remote_code: bool = False, weights: bool = True) -> Path:
    """Find a model's local folder, fetching or converting the model if need be.

    ``name`` is ``smollm2`` (embedded), a local folder with ``config.json`` and safetensors weights,
    or a hub id ``org/name``; a folder that exists is preferred to a hub id of the same name. With
    ``trust_remote_code`` the Python files of a hub repository are fetched too; without ``weights``,
    its safetensors are not. Raise `ModelError` if there is no such model here or on the hub, or it
    has no safetensors weights.
    """
    patterns = _HUB_FILES + (["*.py"] if trust_remote_code else [])
    if (folder := _local_folder(name)) or weights:
        return _with_weights(folder or _fetch(name, [*patterns, _WEIGHTS]))
    return _with_config(_fetch(name, patterns))


def local_model(name: str) -> Path | None:
    """The folder that `resolve_model` returns; None if it must be fetched or converted first.

    Raise `ModelError` if `resolve_model` would without fetching or converting.
    """
    folder = smollm2.converted() if name == smollm2.NAME else _local_folder(name)
    return None if folder is None else _with_weights(folder)


def config_folder(name: str) -> Path:
    """Find a folder as `resolve_model` does, but fetch only ``config.json``.

    ``name`` may also be one of `shapes`, with or without ``configs/shapes/`` before it.
    """
    shape = shapes().get(name.removeprefix("configs/shapes/"))
    if shape is not None and not Path(name).expanduser().is_dir():
        return shape
    return _with_config(_local_folder(name) or _fetch(name, ["config.json"]))


def shapes() -> dict[str, Path]:
    """The shipped folders that hold a ``config.json`` and no weights, by name."""
    folder = Path(str(files("razor_dist").joinpath("configs", "shapes")))
    return {shape.name: shape for shape in sorted(folder.iterdir())}


def display_name(name: str) -> str:
    """A model's name in files and messages: a folder's last part, also of ``.``."""
    path = Path(name).expanduser()
    return path.resolve().name if name != smollm2.NAME and path.is_dir() else name


def _local_folder(name: str) -> Path | None:
    if name == smollm2.NAME:
        return smollm2.embedded_model()
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelError(f"model {name!r} is a file; give the folder that holds config.json")
    if not HUB_ID.fullmatch(name):
        raise ModelError(
            f"model {name!r}: there is no such folder; give a local folder, a hub id such as "
            f"org/name, or {smollm2.NAME!r}, the embedded model; for plan and bench shape also "
            f"a shape that is shipped: {', '.join(shapes())}"
        )
    return None


def _with_config(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelError(f"the model folder {folder} has no config.json")
    return folder


def _with_weights(folder: Path) -> Path:
    if any(_with_config(folder).glob("*.safetensors")):
        return folder
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"the model folder {folder} holds its weights as a pickle only ({pickles[0]}), which "
            "can run code when it is read; convert them to safetensors"
        )
    raise ModelError(f"the model folder {folder} has no *.safetensors weights")


def _fetch(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=_NOT_NEEDED))
    except Exception as error:  # the HTTP client's, which differ between versions
        # The first line says what happened; the rest is advice for another audience.
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"model {name!r} is neither a folder here nor reachable on the Hugging Face hub "
            f"({cause}); {smollm2.NAME!r} is the embedded model and needs no network"
        ) from error
