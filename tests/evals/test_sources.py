"""Sources of needles, measured on the embedded model; and the arithmetic of the baselines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from razor_dist import cli
from razor_dist.evals.needle.sources_report import bm25, roc_auc


@pytest.mark.slow
def test_the_command_finds_a_needle_and_misses_none(tmp_path: Path) -> None:
    places = [
        "--lengths",
        "400",
        "--absent-lengths",
        "400",
        "--depths",
        "50",
        "--needles",
        "1",
        "--haystack",
        "reference",
    ]
    command = ["eval", "sources", *places, "--out", str(tmp_path / "run")]
    assert cli.main(command) == 0
    found = json.loads((tmp_path / "run/sources.json").read_text())
    assert (found["asked"], found["right"], found["absent"]) == (1, 1, 1)
    there, absent = found["answers"]
    assert there["rank"] == 1 and there["expected"] in there["sources"][0]["text"]
    assert there["grounded"] > absent["grounded"]
    rows = {row["heads"]: row for row in found["heads"]}
    assert rows["4 strongest"]["top_right"] == 1
    assert set(rows) > {"1 strongest", "all 117", "4 random", "BM25"}
    assert "| 4 strongest | 100 % |" in (tmp_path / "run/report.md").read_text()
    # What is there is not run again.
    assert cli.main(command) == 0


def test_bm25_prefers_rare_words_and_short_sentences() -> None:
    sentences = [text.split() for text in ("a b c", "a x", "a x y z w v u t", "a a a")]
    scores = bm25(["a", "x"], sentences)
    assert sorted(range(4), key=lambda i: -scores[i])[:2] == [1, 2]
    # One sentence of mean length with one of the word: idf * 2.2 / 2.2.
    assert bm25(["q"], [["q"]]) == [pytest.approx(0.28768207)]
    assert bm25([], [["a"]]) == [0.0]


def test_roc_auc() -> None:
    assert roc_auc([0.9, 0.8], [0.1]) == 1
    assert roc_auc([0.5], [0.5]) == 0.5
    assert roc_auc([0.1, 0.7], [0.5]) == 0.5
