"""The needle grid: documents, scoring, the results file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.documents.haystack import Haystack, Needle, draw_needle, open_haystack
from razor_dist.evals.grid import make_document
from razor_dist.evals.grid_results import Cell, Results, table
from razor_dist.evals.needle_grid import DEPTHS, LENGTHS, METHODS, NEEDLES, method


def encode(text: str) -> list[int]:
    """One token a character."""
    return [ord(letter) for letter in text]


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


@pytest.fixture(scope="module")
def haystack() -> Haystack:
    return open_haystack("reference", encode)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_document_has_its_length_and_its_needle(
    haystack: Haystack, length: int, depth: int
) -> None:
    document = make_document(haystack, (length, depth, 0), seed=0)
    assert len(document.ids) == length
    (needle,), (position,) = document.needles, document.positions
    assert needle.depth == depth
    text = decode(document.ids)
    assert text.count(needle.number) == 1
    assert text.startswith(f" {needle.sentence}", position)
    # A sentence end is never further off than half the longest sentence.
    assert abs(position / length - depth / 100) < 500 / length


def test_extreme_depths_are_the_ends(haystack: Haystack) -> None:
    first, last = (make_document(haystack, (2500, depth, 0), seed=0) for depth in (0, 100))
    assert first.positions == (0,)
    assert decode(last.ids).endswith(last.needles[0].sentence)


def test_needles_of_one_depth_are_neighbours(haystack: Haystack) -> None:
    first, second = draw_needle(50, 1), draw_needle(50, 2)
    document = haystack.document(2500, [first, second], 0)
    assert f" {first.sentence} {second.sentence}" in decode(document.ids)


def test_documents_repeat_for_a_seed_and_differ_between_places(haystack: Haystack) -> None:
    places = [(1500, depth, needle) for depth in (25, 26) for needle in range(5)]
    documents = [make_document(haystack, place, seed) for place in places for seed in (0, 1)]
    assert documents[0] == make_document(haystack, places[0], 0)
    assert len({tuple(d.ids) for d in documents}) == len(documents)
    assert len({d.needles[0].number for d in documents}) == len(documents)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("The special magic number of Oslo is 123456.", True),
        ("123,456", True),
        ("123 456", True),
        ("It is **123456**.", True),
        ("1234567", False),
        ("9123456", False),
        ("123457", False),
        ("12345 6", False),
        ("", False),
    ],
)
def test_scoring(answer: str, right: bool) -> None:
    assert Needle("special magic number of Oslo", "123456", 50).found_in(answer) is right


def test_folder_of_texts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \.txt files"):
        open_haystack(str(tmp_path), encode)
    prose = "A sentence of some length is what a haystack is made of. " * 10
    (tmp_path / "a.txt").write_text(f"{prose}\n\nshort\n\n    indented code\n")
    haystack = open_haystack(str(tmp_path), encode)
    assert len(haystack.document(400, [draw_needle(25, 0)], 0).ids) == 400
    with pytest.raises(ConfigError, match=r"tokens, .* are needed"):
        haystack.document(4000, [draw_needle(25, 0)], 0)
    with pytest.raises(ConfigError, match="too short"):
        haystack.document(20, [draw_needle(25, 0)], 0)


def test_methods_are_engine_settings() -> None:
    kept = {"smollm2-14-1": 22, "smollm2": 39}
    for name, settings in METHODS.items():
        EngineConfig(**{key: value for key, value in settings.items() if key != "head_map"})
        found = method(name)
        assert found.settings == settings
        if "head_map" in settings:
            assert found.retrieval is not None
            assert sum(map(sum, found.retrieval)) == kept[settings["head_map"]]
        else:
            assert found.retrieval is None


def test_results_are_kept_replaced_and_tabled(tmp_path: Path) -> None:
    cell = Cell("full", 1500, 25, 0, "123456", "123456", True, 1, 0.5, "abc")
    path = tmp_path / "grid.json"
    Results(path, {"seed": 0}, list(METHODS)).add([cell, replace(cell, depth=75, right=False)])
    with pytest.raises(ConfigError, match="holds results with seed 0, not 1"):
        Results(path, {"seed": 1})
    again = Results(path, {"seed": 0}, list(METHODS))
    assert again.has(cell.key, "abc")
    assert not again.has(cell.key, "another")
    more = replace(cell, method="exact-256", kv_bytes=3 << 20)
    wrong, unmatched = replace(more, right=False), replace(more, length=2500)
    again.add([replace(cell, settings="another"), wrong, replace(more, depth=75), unmatched])
    assert len(again.cells) == 5
    assert again.has(cell.key, "another")
    assert table(again.cells).splitlines() == [
        "| method | 1500 | 2500 | all | lost | gained | KV at 2500, MiB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| full | 1/2 | - | 1/2 | 0 | 0 | - |",
        "| exact-256 | 1/2 | 1/1 | 2/3 | 1 | 1 | 3 |",
    ]


def test_the_committed_results_are_of_this_grid() -> None:
    """What the page shows was run with the methods, documents and questions of this code."""
    path = Path(__file__).parents[2] / "docs/benchmarks/needle_grid.json"
    stored = json.loads(path.read_text())
    about = {name: value for name, value in stored.items() if name != "cells"}
    results = Results(path, about, order=list(METHODS))
    assert len(results.cells) == len(stored["cells"])
    for cell in results.cells:
        assert cell.method in METHODS
        assert cell.length in LENGTHS
        assert cell.depth in DEPTHS
        assert cell.needle < NEEDLES
        needle = Needle("", cell.expected, cell.depth)
        assert needle.found_in(cell.answer) == cell.right
    page = (path.parent / "needle_grid.md").read_text()
    assert table(results.cells) in page
