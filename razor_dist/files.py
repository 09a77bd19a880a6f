"""Files that are whole whenever a process or the machine ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from razor_dist.config.errors import ConfigError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A draft to be written, which takes a file's place at the end of the ``with`` block.

    After a crash, whenever it comes, the file is the old one or the new one, whole.
    """
    draft = path.with_name(f"{path.name}.new")
    try:
        yield draft
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder as durable as what the files hold."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(*files: Path | None) -> None:
    """Refuse files that could not be written once hours of work are done; None is passed over.

    Raises `ConfigError` if the folder of one is missing, or it is a folder itself.
    """
    for file in files:
        if file is None:
            continue
        folder = file.absolute().parent
        if not folder.is_dir():
            raise ConfigError(f"cannot write {file}: there is no folder {folder}")
        if file.is_dir():
            raise ConfigError(f"cannot write {file}: it is a folder")
