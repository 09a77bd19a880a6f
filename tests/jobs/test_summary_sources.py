"""Sentences of summaries point at the places that they came from, also through parts' summaries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from razor_dist import cli
from razor_dist.documents.read import Document, read_document
from razor_dist.documents.structure import Outline
from razor_dist.jobs.results import read_job
from razor_dist.jobs.summary_sources import Json, traced
from razor_dist.jobs.task import PartResult
from tests.documents import files
from tests.jobs.quoter import SENTENCE, Quoter, document, plain_tokenizer
from tests.jobs.test_summary import steps, summarize


def told(answer: dict[str, Any], text: str) -> list[tuple[str, list[dict[str, Any]]]]:
    """The sentences of a summary and their sources, which are where they say."""
    for sentence in answer["sentences"]:
        for source in sentence["sources"]:
            assert text[source["start"] : source["end"]] == source["text"]
    whole = answer["summary"]
    return [(whole[s["start"] : s["end"]], s["sources"]) for s in answer["sentences"]]


def test_every_sentence_points_at_its_passage() -> None:
    text = "\n \n" + document(3)
    result = summarize(Quoter(4096), text, sources=True)
    found = told(result, text)
    assert [words for words, _ in found] == ["Of fact0.", "Of fact1.", "Of fact2."]
    for number, (_, [source]) in enumerate(found):
        assert source["text"] == f"fact{number} {SENTENCE.strip()}"
        assert source["weight"] == pytest.approx(1)
        assert source["headings"] == [f"Chapter {number}"]
    assert all(sentence["grounded"] == pytest.approx(1) for sentence in result["sentences"])
    assert "sentences" not in summarize(Quoter(4096), text)


def test_the_template_is_no_source_and_a_text_model_has_sources() -> None:
    text = document(2)
    template = "What is said of fact9 ? Read {kind}: {document}"
    for llm in (Quoter(4096), Quoter(4096, plain_tokenizer())):
        found = told(summarize(llm, text, sources=True, template=template), text)
        assert [len(sources) for words, sources in found if words == "Of fact9."] == [0]
        places = [[s["text"] for s in sources] for _, sources in found[1:3]]
        assert places == [[f"fact{n} {SENTENCE.strip()}"] for n in range(2)]


@pytest.mark.parametrize(("chapters", "context", "levels"), [(6, 512, 1), (60, 300, 2)])
def test_a_summary_of_summaries_points_through_the_parts(
    chapters: int, context: int, levels: int
) -> None:
    text = document(chapters)
    result = summarize(Quoter(context), text, sources=True, max_tokens=60)
    parts = result["part_summaries"]
    assert result["levels"] >= levels and len(parts) == result["parts"] > 1
    assert sum(len(part["sentences"]) for part in parts) >= chapters
    for part in parts:
        for words, [source] in told(part, text):
            fact = words[len("Of ") : -1]
            assert source["text"].startswith(f"{fact} ")
            assert source["headings"] == [f"Chapter {fact.removeprefix('fact')}"]
    found = 0
    for sentence, (words, sources) in zip(result["sentences"], told(result, text), strict=True):
        if not words.endswith("."):
            continue  # cut off
        [through], [source] = sentence["parts"], sources
        part = parts[through["part"] - 1]
        own = part["sentences"][through["sentence"]]
        assert part["summary"][own["start"] : own["end"]] == words
        assert through["weight"] == source["weight"] == pytest.approx(1)
        assert source["text"].startswith(f"{words[len('Of ') : -1]} ")
        found += 1
    assert found > 5


def test_weights_multiply_on_the_way_to_the_document() -> None:
    def source(start: int, weight: float) -> dict[str, Any]:
        return {"start": start, "end": start + 5, "weight": weight, "text": "x" * 5}

    def through(sentences: list[Json], summaries: list[Json]) -> list[Json]:
        text = Document("")
        found = traced({"sentences": sentences}, text, Outline(text), summaries)["sentences"]
        assert isinstance(found, list)
        return found

    one = {"start": 0, "end": 9, "grounded": 0.7, "sources": [source(50, 0.6), source(80, 0.4)]}
    two = {"start": 10, "end": 20, "grounded": 0.2, "sources": []}
    three = {"start": 0, "end": 20, "grounded": 0.9, "sources": [source(80, 0.9)]}
    summaries = [{"sentences": [one, two]}, {"sentences": [three]}]
    looked_up = [
        {"of": 0, "start": 0, "end": 9, "weight": 0.5},
        {"of": 1, "start": 2, "end": 12, "weight": 0.3},
        {"of": 0, "start": 10, "end": 20, "weight": 0.2},
    ]
    [sentence] = through([{"start": 0, "end": 4, "sources": looked_up}], summaries)
    assert [(p["part"], p["sentence"], p["weight"]) for p in sentence["parts"]] == [
        (1, 0, 0.5),
        (2, 0, 0.3),
        (1, 1, 0.2),
    ]
    places = [(s["start"], pytest.approx(s["weight"])) for s in sentence["sources"]]
    assert places == [(80, 0.5 * 0.4 + 0.3 * 0.9), (50, 0.5 * 0.6)]
    # A level above, what was looked at is told in sentences of the parts, not of their summaries.
    above = [{"of": 0, "start": 0, "end": 4, "weight": 0.5}]
    [again] = through([{"start": 0, "end": 3, "sources": above}], [{"sentences": [sentence]}])
    assert [(p["part"], p["weight"]) for p in again["parts"]] == [(1, 0.25), (2, 0.15), (1, 0.1)]


def test_stored_parts_keep_their_sources() -> None:
    text = document(60)
    updates, result = steps(Quoter(300), text, {}, max_tokens=60, sources=True)
    parts = [update for update in updates if isinstance(update, PartResult)]
    done = {part.key: json.loads(json.dumps(part.result)) for part in parts[:5]}
    again = Quoter(300)
    _, repeated = steps(again, text, done, max_tokens=60, sources=True)
    assert repeated == result and len(again.prompts) == len(parts) + 1 - 5


def test_places_know_pages_and_headings() -> None:
    pages = ["One is first.", "", "Two has two. It goes on.", "Three is last."]
    read = read_document(files.pdf(*pages), "pdf")
    outline = Outline(read)
    for words, page in (("One", 1), ("Two", 3), ("It goes", 3), ("Three", 4), ("last", 4)):
        assert outline.at(read.text.index(words)) == {"page": page}
    book = read_document(files.epub(), "epub")
    assert Outline(book).at(book.text.index(files.SECOND)) == {"headings": [files.TITLE]}
    text = (
        "Before.\n\n# A\n\n## B\n\nx1\n\n### C\n\n```\n# no\n```\n\nx2\n\n## D\n\nx3\n\n# E\n\nx4"
    )
    marked = Outline(Document(text))
    assert marked.at(0) == {}
    path = [marked.at(text.index(f"x{n}"))["headings"] for n in range(1, 5)]
    assert path == [["A", "B"], ["A", "B", "C"], ["A", "D"], ["E"]]
    plain = "Title\n\nCHAPTER I. The fox\n\nIt was a fox.\n\nCHAPTER II\n\nIt was old."
    found = [Outline(Document(plain)).at(plain.index(f"It was {w}")) for w in ("a", "old")]
    assert found == [{"headings": ["CHAPTER I. The fox"]}, {"headings": ["CHAPTER II"]}]


def test_a_shells_prompt_is_no_heading() -> None:
    page = b"<h1>Apt</h1><pre># apt update\n# apt upgrade</pre><p>It is done.</p>"
    read = read_document(page, "html")
    assert read.text == "# Apt\n\n # apt update\n # apt upgrade\n\nIt is done."
    assert Outline(read).at(len(read.text) - 1) == {"headings": ["Apt"]}


def test_the_command_tells_pages_and_chapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "razor_dist.jobs.host_engine.HostLLM", lambda config, *_: Quoter(config.max_model_len)
    )
    Path("long.md").write_text(document(6))
    Path("short.pdf").write_bytes(files.pdf("Nothing is here.", "This is fact7.", "And fact8."))
    sizes = ["--max-model-len", "512", "--max-tokens", "60"]
    command = ["summarize", "long.md", "short.pdf", "--out", "out", "--sources", "--markdown"]
    assert cli.main([*command, *sizes, "--no-ray", "--attention", "full"]) == 0
    results = {r["result"]["id"]: r["result"] for r in read_job("out").records}
    sentences = results["short.pdf"]["sentences"]
    assert [[s["page"] for s in one["sources"]] for one in sentences] == [[2], [3]]
    pages = {path.name.split("-")[0]: path.read_text() for path in Path("out/pages").iterdir()}
    assert '1. "Of fact7."\n    - page 2 (1.00): "This is fact7."' in pages["short.pdf"]
    part = '\n    - part 1, sentence 2 (1.00): "Of fact1."\n'
    place = f'    - Chapter 1 (1.00): "fact1 {SENTENCE.strip()}"'
    assert f'2. "Of fact1."{part}{place}' in pages["long.md"]
