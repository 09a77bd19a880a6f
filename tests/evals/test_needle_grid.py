"""The needle grid: its documents, its methods, and the committed results."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from razor_dist.config.errors import ConfigError
from razor_dist.config.sources import load_config
from razor_dist.evals.grid import GridTask, place_seed
from razor_dist.evals.methods import FULL_METHOD, methods_of
from razor_dist.evals.needle.config import GridConfig, NeedleConfig, NeedleGridConfig, Place
from razor_dist.evals.needle.presets import Fact, exact_number, number_facts
from razor_dist.evals.needle.results import NeedleResults
from razor_dist.evals.needle.task import NeedleTask
from razor_dist.evals.settings import shipped_methods
from razor_dist.evals.sources.citations import CitationsTask
from razor_dist.evals.sources.config import CitationsConfig, SourcesConfig
from razor_dist.evals.sources.task import SourcesTask
from razor_dist.evals.texts import Haystack

LENGTHS = (1500, 2500, 4000, 5000, 7000)
DEPTHS = (0, 25, 50, 75, 100)
GRID = shipped_methods("grid_smollm2")
COMMITTED = Path(__file__).parents[2] / "docs/benchmarks/needle_grid.json"


def encode(text: str) -> list[int]:
    """One token a character."""
    return [ord(letter) for letter in text]


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


@pytest.fixture(scope="module")
def haystack() -> Haystack:
    return Haystack("reference", encode)


def hidden(haystack: Haystack, place: Place, seed: int = 0) -> tuple[list[int], int, Fact]:
    """The document at a place, where its needle begins, and the needle."""
    length, depth, _ = place
    own = place_seed(place, seed)
    [fact] = number_facts([depth], own)
    ids = haystack.hide(length, [(fact.sentence, depth)], own)
    return ids, decode(ids).index(f" {fact.sentence}"), fact


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_document_has_its_length_and_its_needle(
    haystack: Haystack, length: int, depth: int
) -> None:
    ids, position, fact = hidden(haystack, (length, depth, 0))
    assert len(ids) == length
    text = decode(ids)
    assert text.count(fact.answer) == 1
    # A sentence end is never further off than half the longest sentence.
    assert abs(position / length - depth / 100) < 500 / length
    assert depth > 0 or position == 0
    assert depth < 100 or text.endswith(fact.sentence)


def test_needles_of_one_depth_are_neighbours(haystack: Haystack) -> None:
    first, second = number_facts([50, 50], 1)
    ids = haystack.hide(2500, [(first.sentence, 50), (second.sentence, 50)], 0)
    assert f" {first.sentence} {second.sentence}" in decode(ids)


def test_documents_repeat_for_a_seed_and_differ_between_places(haystack: Haystack) -> None:
    places = [(1500, depth, needle) for depth in (25, 26) for needle in range(5)]
    documents = [hidden(haystack, place, seed) for place in places for seed in (0, 1)]
    assert documents[0] == hidden(haystack, places[0])
    assert len({tuple(ids) for ids, _, _ in documents}) == len(documents)
    assert len({fact.answer for _, _, fact in documents}) == len(documents)


def test_a_documents_city_says_nothing_of_its_text(tmp_path: Path) -> None:
    sentences = [f"Sentence {n} is of some length, so that it counts as prose." for n in range(100)]
    (tmp_path / "a.txt").write_text(" ".join(sentences))
    haystack = Haystack(str(tmp_path), encode)
    begins: dict[str, list[int]] = {}
    for seed in range(200):
        [fact] = number_facts([50], seed)
        text = decode(haystack.hide(60, [], seed))
        begins.setdefault(fact.subject, []).append(int(text.split()[1]))
    assert len(begins) == 20
    assert min(max(own) - min(own) for own in begins.values()) > 25


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
    assert exact_number(answer, "123456") == right


def test_folder_of_texts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \.txt files"):
        Haystack(str(tmp_path), encode)
    prose = "A sentence of some length is what a haystack is made of. " * 10
    (tmp_path / "a.txt").write_text(f"{prose}\n\nshort\n\n    indented code\n")
    haystack = Haystack(str(tmp_path), encode)
    for length in (400, 4000):  # the longer one begins the text anew
        assert len(haystack.hide(length, [("Here.", 25)], 0)) == length
    with pytest.raises(ConfigError, match="too short"):
        haystack.hide(6, [("Here.", 25)], 0)
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(ConfigError, match="has no prose"):
        Haystack(str(tmp_path), encode)


@pytest.mark.parametrize(
    "plan",
    [
        lambda haystack: GridTask.plan(GridConfig(haystack=haystack), [FULL_METHOD]),
        lambda haystack: NeedleTask.plan(NeedleConfig(haystack=haystack)),
        lambda haystack: SourcesTask.plan(SourcesConfig(haystack=haystack)),
    ],
    ids=["grid", "needle", "sources"],
)
def test_a_plan_wants_prose(plan: Callable[[str], Any], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Too short.")
    with pytest.raises(ConfigError, match=r"the haystack .* has no prose: give texts with"):
        plan(str(tmp_path))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            lambda: GridTask.plan(GridConfig(lengths=(1500, 8100)), [FULL_METHOD]),
            "lengths: 8100 is beyond smollm2, which holds 8192 tokens, 132 of them",
        ),
        (
            lambda: SourcesTask.plan(SourcesConfig(lengths="9000", haystack="reference")),
            "lengths: 9000 is beyond smollm2",
        ),
        (
            lambda: CitationsTask.plan(CitationsConfig(lengths="9000", haystack="reference")),
            "lengths: 9000 is beyond smollm2",
        ),
        (
            lambda: GridTask.plan(GridConfig(), [FULL_METHOD], preset="words"),
            "preset words is for the needle model",
        ),
    ],
    ids=["grid", "sources", "citations", "words"],
)
def test_what_does_not_fit_the_model_is_refused_first(
    plan: Callable[[], Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan()


def test_folders_of_before_go_on() -> None:
    """The ids of a grid's items name methods by these fingerprints."""
    known = {
        "full": ("all", "e4d31b03b44a"),
        "exact-256": ("22", "2bd190043266"),
        "exact-256-nocomp": ("22", "e67d4810c70c"),
        "local-512c-28": ("39", "58b362d7ecd2"),
        "local-512-28": ("39", "581dba487587"),
        "local-256-28": ("39", "5c78ed14cd0c"),
        "local-512c": ("22", "5ef71beec04e"),
        "local-512": ("22", "f8e77d9b6836"),
        "local-256": ("22", "533e8ba516b8"),
        "streaming-256": ("none", "88d5cda26622"),
    }
    own = {"full/32": ("all", "55d21c9b3ffa"), "local-512-28/32": ("39", "d801ac7b8596")}
    for names, wanted in ((None, known), (tuple(own), own)):
        config = load_config(NeedleGridConfig, {"methods": names})
        found = methods_of(config, config.method_settings, as_written=True)
        assert {method.name: (method.kept, method.fingerprint) for method in found} == wanted
    # What another run changes in them is another method.
    config = load_config(NeedleGridConfig, {"compensation": False})
    changed = methods_of(config, config.method_settings, as_written=True)
    assert [m.name for m in changed if m.fingerprint == known[m.name][1]] == [
        "full", "exact-256-nocomp"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attention": "full"}, "attention is what methods differ in"),
        ({"retrieval_share": "1/32"}, "retrieval_share is 0.03125, but full attention reads all"),
        ({"head_map": "mine.json"}, "head_map is for methods without one of their own, but"),
        ({"methods": {"a": {"selector": "quest"}}}, "methods: a: selector needs retrieval_share"),
    ],
)
def test_settings_that_reach_no_method_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        methods_of(config := NeedleGridConfig(**values), config.method_settings)


def test_all_stands_among_others() -> None:
    config = NeedleGridConfig(methods="full,all,full/32", head_map="mine.json")  # full/32's
    assert list(config.method_settings) == [*GRID, "full/32"]


def result(method: str, length: int, depth: int, score: float, **changes: Any) -> dict[str, Any]:
    cell = {"depth": depth, "needle": 0, "expected": "1", "answer": "", "score": score}
    timing = {"prefill_seconds": 0.5}
    about = {"method": method, "length": length, "repeat": 0, "kv_bytes": 1, "timing": timing}
    return {**about, "cells": [cell | changes]}


def test_results_are_tabled() -> None:
    results = [result("full", 1500, 25, 1), result("full", 1500, 75, 0)]
    results += [result("own", 1500, 25, 0), result("own", 1500, 75, 1)]
    results += [result("own", 2500, 25, 1) | {"kv_bytes": 3 << 20}]
    assert NeedleResults(results).table({"full": [], "own": []}).splitlines() == [
        "| method | 1500 | 2500 | all | lost | gained | KV at 2500, MiB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| full | 1/2 | - | 1/2 | 0 | 0 | - |",
        "| own | 1/2 | 1/1 | 2/3 | 1 | 1 | 3 |",
    ]


def test_the_committed_results_are_of_this_grid() -> None:
    """The page's figures were made with the methods and questions of this code.

    Its documents are of version 1, whose cities were drawn by the haystack's seed.
    """
    stored = json.loads(COMMITTED.read_text())
    results = []
    for cell in stored["cells"]:
        place = cell["length"], cell["depth"], cell["needle"]
        assert cell["method"] in GRID and place[0] in LENGTHS and place[1] in DEPTHS
        draw = random.Random(place_seed(place, stored["seed"]))
        draw.sample(range(20), 1)
        assert cell["expected"] == str(draw.randrange(100_000, 1_000_000))
        score = exact_number(cell["answer"], cell["expected"])
        assert score == cell["right"]
        one = result(cell["method"], place[0], place[1], score, needle=place[2])
        results.append(one | {"kv_bytes": cell["kv_bytes"]})
    methods = {cell["method"] for cell in stored["cells"]}
    table = NeedleResults(results).table({name: [] for name in GRID if name in methods})
    assert table in COMMITTED.with_suffix(".md").read_text()
