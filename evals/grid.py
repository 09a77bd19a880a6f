"""A grid of needles: documents, settings to try on them, and the file of the answers.

A document hides one needle. It is prefilled and kept; the question continues it, so with
``prefill: exact`` it is asked after the cache was compressed. Results go to a JSON file as they
come; a cell that is there, with the same settings, is not run again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from razor_dist.engine.prompts import PromptEncoder
from razor_dist.errors import ConfigError, ModelError
from razor_dist.evals.haystack import Document, Haystack, Needle, draw_needle
from razor_dist.heads.head_map import Flags

NEEDLES = (0, 1)
"""Which needle of a length and depth; each hides another number in another text."""
FULL = "full"
"""The name of the method that others are measured against."""
ANSWER_TOKENS = 32

Place = tuple[int, int, int]
"""Length, depth and which needle."""

_MARK = "<<document>>"


@dataclass(frozen=True)
class Method:
    """Settings to try.

    Attributes
    ----------
    name : str
    settings : mapping
        Of the engine, its own; those that all methods share are the grid's. A ``head_map`` here is
        a name for people: what decides is `retrieval`.
    retrieval : tuple, optional
        ``[layers][KV heads]`` bool: which KV heads keep the whole context. None with ``attention``
        full or streaming, which say it.
    """

    name: str
    settings: Mapping[str, Any]
    retrieval: Flags | None = None

    @property
    def shares_prefill(self) -> bool:
        """Whether a document's keys and values are those of full attention."""
        own = self.settings
        return own.get("attention") == "full" or own.get("prefill") == "exact"

    def fingerprint(self, model: str, prompt: Sequence[Sequence[int]]) -> str:
        """Of all that decides the answer to a prompt."""
        about = [model, self.settings, self.retrieval, prompt, ANSWER_TOKENS]
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]


FULL_METHOD = Method(FULL, {"attention": "full"})


@dataclass(frozen=True)
class Cell:
    """One question and its answer.

    Attributes
    ----------
    method : str
    length : int
        Tokens of the document.
    depth : int
        Percent of the document before the needle.
    needle : int
        Which of `NEEDLES`.
    expected, answer : str
    right : bool
    kv_bytes : int
        Measured bytes of KV cache that the document holds once prefilled.
    prefill_seconds : float
        Of the whole document, on a machine that may have been busy. Methods with exact prefill may
        have shared it.
    settings : str
        `Method.fingerprint`.
    """

    method: str
    length: int
    depth: int
    needle: int
    expected: str
    answer: str
    right: bool
    kv_bytes: int
    prefill_seconds: float
    settings: str

    @property
    def place(self) -> Place:
        """Which document."""
        return self.length, self.depth, self.needle

    @property
    def key(self) -> tuple[str, int, int, int]:
        """What a newer result replaces."""
        return self.method, *self.place


class Results:
    """The cells in a JSON file, complete after each `add`; one process at a time may write it.

    Parameters
    ----------
    path : Path
    about : mapping
        What all cells share; written before them.
    order : sequence of str
        Methods in the order in which to list them; others follow.

    Raises
    ------
    ConfigError
        If the file holds the results of something else, or is no file of results.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], order: Sequence[str] = ()) -> None:
        self.path, self._about = path, dict(about)
        self._order = {name: rank for rank, name in enumerate(order)}
        self._cells: dict[tuple[str, int, int, int], Cell] = {}
        self._report: Mapping[str, Any] = {}
        if path.exists():
            try:
                stored = json.loads(path.read_text())
                cells = [Cell(**cell) for cell in stored["cells"]]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{path} is no file of results ({error}); give another"
                ) from error
            for name, value in self._about.items():
                if stored.get(name) != value:
                    raise ConfigError(
                        f"{path} holds results with {name} {stored.get(name)!r}, not {value!r}; "
                        "give another --out"
                    )
            self._cells = {cell.key: cell for cell in cells}

    @property
    def cells(self) -> list[Cell]:
        """All cells, in the order of methods, lengths and depths."""
        last = len(self._order)
        return sorted(self._cells.values(), key=lambda c: (self._order.get(c.method, last), *c.key))

    def has(self, key: tuple[str, int, int, int], settings: str) -> bool:
        """Whether a cell was run with these settings."""
        cell = self._cells.get(key)
        return cell is not None and cell.settings == settings

    def add(self, cells: Iterable[Cell]) -> None:
        """Store cells, in place of older ones of the same key."""
        self._cells.update((cell.key, cell) for cell in cells)
        self._write()

    def conclude(self, report: Mapping[str, Any]) -> None:
        """Store what follows from the cells, under names of its own."""
        self._report = report
        self._write()

    def _write(self) -> None:
        lines = ",\n".join("  " + json.dumps(asdict(cell)) for cell in self.cells)
        text = json.dumps({**self._about, **self._report}, indent=1).removesuffix("\n}")
        partial = self.path.with_suffix(".tmp")
        partial.write_text(f'{text},\n "cells": [\n{lines}\n ]\n}}\n')
        os.replace(partial, self.path)


class Prompter:
    """Splits a prompt where its document ends.

    A model with a chat template is asked in a user's message. One without is a base model: it gets
    document and question as they are, and the answer's beginning, as RULER does.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase or None

    Raises
    ------
    ModelError
        If there is no tokenizer: documents are texts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        if tokenizer is None:
            raise ModelError(
                "the model has no tokenizer, so it can be asked for no needles: put its "
                "tokenizer.json and tokenizer_config.json into its folder"
            )
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer)
        self.is_chat = bool(getattr(tokenizer, "chat_template", None))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; nothing is put before or after them."""
        return self._encoder.text(text, special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of an answer."""
        text: Any = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return str(text)

    def _chat(self, after: str) -> tuple[list[int], list[int]]:
        text = self._encoder.chat_text([{"role": "user", "content": _MARK + after}])
        head, _, tail = text.partition(_MARK)
        return self.encode(head), self.encode(tail)

    def document(self, document: Document) -> list[int]:
        """Token ids up to the document's end."""
        begin = self._chat("")[0] if self.is_chat else self._encoder.text("")
        return begin + document.ids

    def question(self, needle: Needle) -> list[int]:
        """Token ids from there to where the answer begins."""
        question = f"\n\n{needle.question}"
        if self.is_chat:
            return self._chat(question)[1]
        return self.encode(f"{question} Answer: The {needle.subject} is")


@dataclass(frozen=True)
class GridSettings:
    """Which documents.

    Attributes
    ----------
    lengths : tuple of int
        In tokens.
    depths : tuple of int
        In percent of the text before the needle.
    needles : int
        Documents of each length and depth, 1 or 2.
    haystack : str
        See `open_haystack`.
    seed : int

    Raises
    ------
    ConfigError
        If a value is out of range.
    """

    lengths: tuple[int, ...] = (2500, 5000)
    depths: tuple[int, ...] = (10, 30, 50, 70, 90)
    needles: int = 2
    haystack: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ConfigError(f"lengths must be numbers of tokens, got {list(self.lengths)}")
        if not self.depths or not all(0 <= depth <= 100 for depth in self.depths):
            raise ConfigError(f"depths must be percents from 0 to 100, got {list(self.depths)}")
        if not 1 <= self.needles <= len(NEEDLES):
            raise ConfigError(f"needles must be from 1 to {len(NEEDLES)}, got {self.needles}")

    def documents(self, haystack: Haystack) -> dict[Place, Document]:
        """The grid's documents, short ones first."""
        places = itertools.product(self.lengths, self.depths, NEEDLES[: self.needles])
        return {place: make_document(haystack, place, self.seed) for place in sorted(places)}


def make_document(haystack: Haystack, place: Place, seed: int) -> Document:
    """The grid's document at a place; the same for every method."""
    length, depth, needle = place
    own_seed = ((seed * 100_003 + length) * 101 + depth) * len(NEEDLES) + needle
    return haystack.document(length, [draw_needle(depth, own_seed)], own_seed)


@dataclass(frozen=True)
class Score:
    """A method over documents.

    Attributes
    ----------
    right, total : int
        Answers.
    lost, gained : int
        Needles that full attention finds and the method does not, and the opposite, where both
        were asked.
    kv_bytes : float
        Median over the longest documents, measured; 0 if there are none.
    by_length : dict
        For each length, right answers and all.
    """

    right: int
    total: int
    lost: int
    gained: int
    kv_bytes: float
    by_length: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, method: str, cells: Sequence[Cell]) -> Score:
        """Count among ``cells``, which hold those of other methods too."""
        full = {cell.place: cell.right for cell in cells if cell.method == FULL}
        longest = max((cell.length for cell in cells), default=0)
        own = [cell for cell in cells if cell.method == method]
        lengths = sorted({cell.length for cell in own})
        return cls(
            right=sum(cell.right for cell in own),
            total=len(own),
            lost=sum(full.get(cell.place, False) and not cell.right for cell in own),
            gained=sum(cell.right and not full.get(cell.place, True) for cell in own),
            kv_bytes=statistics.median(
                [cell.kv_bytes for cell in own if cell.length == longest] or [0]
            ),
            by_length={
                length: (
                    sum(cell.right for cell in own if cell.length == length),
                    sum(cell.length == length for cell in own),
                )
                for length in lengths
            },
        )

    @property
    def accuracy(self) -> float | None:
        """Right answers of all; None if nothing was asked."""
        return self.right / self.total if self.total else None

    def row(self, lengths: Sequence[int]) -> list[str]:
        """The columns that `score_heads` names; a hyphen where nothing was run."""
        parts = [self.by_length.get(length, (0, 0)) for length in lengths]
        return [
            *(_of(*part) for part in parts),
            _of(self.right, self.total),
            str(self.lost),
            str(self.gained),
            f"{self.kv_bytes / 2**20:.0f}" if self.kv_bytes else "-",
        ]


def score_heads(lengths: Sequence[int]) -> list[str]:
    """Headings of `Score.row`."""
    return [*map(str, lengths), "all", "lost", "gained", f"KV at {max(lengths)}, MiB"]


def _of(right: int, total: int) -> str:
    return f"{right}/{total}" if total else "-"


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first row is its head."""
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body])


def table(cells: Sequence[Cell]) -> str:
    """A Markdown table of right answers, methods by lengths: see `Score`."""
    methods = list(dict.fromkeys(cell.method for cell in cells))
    lengths = sorted({cell.length for cell in cells})
    rows = [[method, *Score.of(method, cells).row(lengths)] for method in methods]
    return markdown([["method", *score_heads(lengths)], *rows])
