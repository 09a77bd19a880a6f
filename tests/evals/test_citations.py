"""Citations of a server by Anthropic's client: what is asked, what counts, and one real run."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pypdfium2  # type: ignore[import-untyped]
import pytest
from anthropic.types import CitationCharLocation, CitationContentBlockLocation, CitationPageLocation

from razor_dist import cli
from razor_dist.config.errors import ConfigError
from razor_dist.evals.sources.citations import CitationsTask, exact, figures, page, sent
from razor_dist.evals.sources.config import CitationsConfig

NEEDLE = "The special magic number of Paris is 123456."
TEXT = f"One ends.\n\nTwo \N{LEFT DOUBLE QUOTATION MARK}is\N{RIGHT DOUBLE QUOTATION MARK}. {NEEDLE}"


def of_document(index: int, **place: Any) -> dict[str, Any]:
    return {"cited_text": NEEDLE, "document_index": index, "document_title": None, **place}


@pytest.mark.parametrize("which", [0, 1])
def test_characters_and_blocks_are_counted_as_code_points(which: int) -> None:
    documents = sent("mixed", (1500, 50, which), TEXT)
    chinese, last = documents
    assert "老城" in chinese.source["data"] and "\r\n" in chinese.source["data"]
    if which:
        blocks = [block["text"] for block in last.source["content"]]
        assert len(blocks) == 2 and NEEDLE in blocks[1]

        def cited(shift: int) -> Any:
            place = {"start_block_index": 1 + shift, "end_block_index": 2 + shift}
            kind = "content_block_location"
            return CitationContentBlockLocation(**of_document(1, **place), type=kind)
    else:
        text = last.source["data"]
        assert "\r\n\r\n" in text and text.count("\N{DRAGON}") == 2
        begin = text.index(NEEDLE)

        def cited(shift: int) -> Any:
            place = {"start_char_index": begin + shift, "end_char_index": len(text) + shift}
            return CitationCharLocation(**of_document(1, **place), type="char_location")

    assert exact(cited(0), documents)
    assert not exact(cited(1), documents)  # as a count of UTF-16 units would be, and more
    assert not exact(cited(0).model_copy(update={"document_index": 0}), documents)


def test_pages_are_those_of_the_file() -> None:
    prose = "A line of prose that goes on for a while. " * 120
    [document] = sent("pdf", (1500, 50, 0), f"{prose}\n\n{NEEDLE}\n\n{prose}")
    file = pypdfium2.PdfDocument(base64.b64decode(document.source["data"]))
    [number] = [n for n, p in enumerate(file, 1) if "Paris" in p.get_textpage().get_text_bounded()]
    assert len(file) > 2 and number > 1

    def cited(first: int) -> Any:
        place = {"start_page_number": first, "end_page_number": first + 1}
        return CitationPageLocation(**of_document(0, **place), type="page_location")

    found = [exact(cited(n), [document]) for n in range(1, len(file) + 1)]
    assert found == [n == number for n in range(1, len(file) + 1)]


def test_what_is_asked() -> None:
    task = CitationsTask.plan(CitationsConfig(haystack="reference"))
    ids = [item.id for item in task.items()]
    assert len(ids) == len(set(ids)) == 2 * (50 + 20) + (10 + 10)
    assert ids[:3] == ["text/1500/0/0/needle", "text/1500/0/0/absent", "pdf/1500/0/0/needle"]
    some = task.config.model_copy(update={"kinds": ("pdf",), "absent_lengths": ()})
    assert {item.id for item in CitationsTask(some, task.haystack).items()} == {
        name for name in ids if name.startswith("pdf") and name.endswith("needle")
    }


def test_prose_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Too short.")
    with pytest.raises(ConfigError, match=r"the haystack .* has no prose: give texts with"):
        CitationsTask.plan(CitationsConfig(haystack=str(tmp_path)))


def test_shares_are_of_what_they_say() -> None:
    def result(right: bool, passage: list[bool], absent: bool = False) -> dict[str, Any]:
        own = {"kind": "text", "absent": absent, "right": right, "streamed": True}
        return own | {"cited": passage, "passage": passage, "exact": [True for _ in passage]}

    found = figures(
        [
            result(True, [True]),
            result(True, [True, False]),
            result(True, []),
            result(False, [False]),
            result(False, [], absent=True),
        ]
    )
    assert {name: (sum(yes), len(yes)) for name, yes in found["text"].items()} == {
        "right": (3, 4),
        "cited": (2, 3),
        "passage": (1, 2),
        "wrong, cited": (1, 1),
        "absent, not cited": (1, 1),
        "exact": (4, 4),
        "streamed": (5, 5),
    }
    assert "| text | 3 of 4 (30 to 95 %) | 2 of 3 (21 to 94 %) |" in page(found)


@pytest.mark.slow
def test_the_command_asks_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # of no use for this host
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    places = ["--lengths", "400", "--depths", "50", "--needles", "1", "--haystack", "reference"]
    out = ["--absent-lengths", "400", "--out", str(tmp_path / "run")]
    assert cli.main(["eval", "citations", *places, *out]) == 0
    results = json.loads((tmp_path / "run/citations.json").read_text())
    there = {one["kind"]: one for one in results if not one["absent"]}
    assert set(there) == {"text", "pdf", "mixed"}
    for one in there.values():
        # The first is the number's; the model may add a sentence, which cites other prose.
        assert one["right"] and one["passage"][0] and all(one["exact"])
    assert all(one["streamed"] for one in results)
