"""A hash of a model's folder, by which a resumed job recognises the model."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import BinaryIO, Final

from razor_dist.config.errors import ModelError

# Files beside the weights that decide token ids, prompts and sampling defaults.
_FILES: Final = (
    *("config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer*", "chat_template*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "*.py"),
)
_TENSORS: Final = 4096  # the most tensors of a file that are sampled
_SAMPLE: Final = 64  # bytes of a tensor, from its middle
_NO_HEADER: Final = 4096  # bytes that are read if the header's length is beyond the file


def content_hash(model: str) -> str | None:
    """Hash the files of a model's local folder; None for a hub id and the embedded model.

    Weights enter by their names, dtypes, shapes and a few bytes of each tensor, in which fine-tunes
    differ; so gigabytes need not be read. Raise `ModelError` if a file cannot be read.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return None
    found = hashlib.sha256()
    try:
        for path in sorted({path for pattern in _FILES for path in folder.glob(pattern)}):
            if path.is_file():
                found.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                found.update(path.name.encode() + _weights(file))
    except OSError as error:
        raise ModelError(f"cannot read {error.filename or folder}: {error.strerror}") from None
    return found.hexdigest()[:16]


def _weights(file: BinaryIO) -> bytes:
    """The digest of a safetensors file's header and samples.

    Any other file, such as a Git LFS pointer, enters by its first bytes.
    """
    length, size = file.read(8), os.fstat(file.fileno()).st_size
    says = int.from_bytes(length, "little")
    header = file.read(says if says < size else _NO_HEADER)
    found = hashlib.sha256(header)
    try:
        tensors = [t["data_offsets"] for name, t in json.loads(header).items() if name[:2] != "__"]
    except ValueError:  # a damaged file, which loading refuses
        tensors = []
    for begin, end in sorted(tensors)[:: 1 + len(tensors) // _TENSORS]:
        file.seek(len(length) + len(header) + (begin + end) // 2)
        found.update(file.read(_SAMPLE))
    return found.digest()
