"""``razor-dist summarize``, from files to results."""

from __future__ import annotations

import json
import os
import sys
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest

from razor_dist import cli
from razor_dist.config.logs import LOG_ENV
from razor_dist.config.schema import EngineConfig
from razor_dist.documents.collect import collect
from razor_dist.jobs.results import read_job
from razor_dist.jobs.style import Style
from razor_dist.jobs.summarize import SummaryTask
from tests.documents import files
from tests.jobs.quoter import Quoter
from tests.jobs.summarizing import FLAGS, results, summarize
from tests.tiny_models import make_tiny, save_head_map
from tests.tokenizer import write_letters


@pytest.mark.long
def test_summaries_of_every_document(
    folder: Path, opened: list[Quoter], capfd: pytest.CaptureFixture[str]
) -> None:
    short = Path("in/short.txt").rename("in/short.pdf")
    short.write_bytes(files.pdf("This is fact7 and fact8."))
    assert summarize("--markdown") == 0
    found = results()
    job = json.loads(Path("out/job.json").read_text())
    for id, summary, parts in (
        ("in/long.md", "fact0 fact1 fact2 fact3 fact4 fact5", 2),
        ("in/short.pdf", "fact7 fact8.", 1),
        ("line", "fact9", 1),
    ):
        record, result = found[id], found[id]["result"]
        assert (result["id"], result["summary"], result["parts"]) == (id, summary, parts)
        assert result["finish_reason"] == "stop" and result["tokens"] > 0
        assert record["settings"] == job["hash"] and record["run"]["seconds"] >= 0
    assert found["line"]["result"]["source"] == "in/lines.jsonl"
    pages = {path.name.rpartition("-")[0]: path.read_text() for path in Path("out/pages").iterdir()}
    assert pages.keys() == {"in-long.md", "in-short.pdf", "line"}
    assert "\n\nfact7 fact8.\n" in pages["in-short.pdf"]
    assert "- read as: 2 parts, each summarised" in pages["in-long.md"]
    assert "## Part 2 of 2" in pages["in-long.md"]
    assert "3 of 3 documents summarised" in capfd.readouterr().out

    Path("in/lines.jsonl").write_text(json.dumps({"id": "line", "text": "fact10"}) + "\n")
    assert summarize("--markdown") == 0
    assert len(opened) == 2 and len(opened[1].prompts) == 1


def test_pages_of_names_that_are_long_or_not_utf8(folder: Path, opened: list[Quoter]) -> None:
    Path(os.fsdecode(b"in/caf\xe9.txt")).write_text("This is fact10.")
    long = {"id": "\N{CJK UNIFIED IDEOGRAPH-9577}" * 200, "text": "fact11"}
    Path("in/lines.jsonl").write_text(json.dumps(long) + "\n")
    assert summarize("--markdown") == 0
    pages = [path.read_text(encoding="utf-8") for path in Path("out/pages").iterdir()]
    assert len(pages) == 4 and any(page.startswith("# in/caf\\xe9.txt\n") for page in pages)


def test_equal_texts_with_names_that_differ_little_have_a_page_each(
    folder: Path, opened: list[Quoter], capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("a b.txt", "a,b.txt", "a;b.txt"):
        Path("in", name).write_text("fact10")
    for _ in range(2):
        assert summarize("--markdown") == 0
        assert "6 pages beside it" in capfd.readouterr().out
        heads = [path.read_text().splitlines()[0] for path in Path("out/pages").iterdir()]
        assert len(heads) == 6
        assert {"# in/a b.txt", "# in/a,b.txt", "# in/a;b.txt"} <= set(heads)


@pytest.mark.parametrize("out", ["out", "in", "in/out"])
def test_nothing_is_summarised_twice_nor_results_among_the_documents(
    folder: Path, opened: list[Quoter], out: str
) -> None:
    assert summarize("--markdown", out=out) == 0
    before = Path(out, "results.jsonl").read_bytes()
    assert summarize("--markdown", out=out) == 0
    assert len(opened) == 1 and Path(out, "results.jsonl").read_bytes() == before


@pytest.mark.long
def test_documents_that_cannot_be_read_are_skipped(
    folder: Path, opened: list[Quoter], capfd: pytest.CaptureFixture[str]
) -> None:
    Path("in/a.pdf").write_bytes(files.pdf("x", password="secret"))
    Path("in/b.epub").write_bytes(files.epub()[:200])
    Path("in/c.txt").write_text("\n")
    Path("in/d.png").write_text("x")
    assert summarize() == 3
    told = capfd.readouterr()
    assert "skipped in/a.pdf: is encrypted" in told.err
    assert "skipped in/b.epub: cannot be read as epub: " in told.err
    assert "skipped in/c.txt: holds no text" in told.err
    assert "in/d.png: left out, not a kind of document" in told.err
    assert "3 of 6 documents summarised" in told.out
    assert "3 failed; --retry-failed tries them again" in told.err
    found = results()
    assert found["in/c.txt"]["error"] == {"type": "DocumentError", "message": "holds no text"}
    assert found["in/long.md"]["status"] == "done"

    # What is mended is summarised; what was recorded of the broken file does no harm any more.
    for name in ("a.pdf", "b.epub"):
        Path("in", name).unlink()
    Path("in/c.txt").write_text("fact1")
    assert summarize() == 0


@pytest.mark.long
def test_a_missing_reader_fails_its_documents_alone(
    folder: Path,
    opened: list[Quoter],
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("in/short.txt").unlink()
    for name in ("short", "other"):
        Path(f"in/{name}.pdf").write_bytes(files.pdf("This is fact7 and fact8."))
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "pypdfium2", None)
        assert summarize() == 3
    told = capfd.readouterr()
    assert "skipped in/short.pdf: pdf documents are read with pypdfium2, which is not" in told.err
    assert "2 of 4 documents summarised" in told.out and "--retry-failed" not in told.err
    # The reason is said once, before the model is loaded.
    warnings = [of.message for of in caplog.records if of.levelname == "WARNING"]
    assert ["are read with pypdfium2" in warning for warning in warnings] == [True]
    # Once it is installed, the same command reads them.
    assert summarize() == 0


def test_a_template_and_a_folder_of_other_settings(
    folder: Path, opened: list[Quoter], capfd: pytest.CaptureFixture[str]
) -> None:
    Path("ask.txt").write_text("TL;DR in {words} words, {language}: {document}")
    command = ["summarize", "in/short.txt", "--out", "out", "--words", "9", *FLAGS]
    assert cli.main([*command, "--template", "ask.txt", "--language", "Latin"]) == 0
    assert "TL;DR in 9 words, Latin: This is fact7" in opened[0].prompts[0]
    assert cli.main([*command, "--template", "ask.txt", "--language", "Greek"]) == 2
    assert 'task.style.language is "Latin" there and "Greek" here' in capfd.readouterr().err
    assert cli.main([*command, "--template", "no.txt"]) == 2
    assert "cannot read the --template file no.txt" in capfd.readouterr().err


def test_tokens_are_counted_without_a_download_of_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = make_tiny("llama", folder / "snapshot")
    write_letters(snapshot)
    snapshot.joinpath("model.safetensors").unlink()

    def fetch(name: str, allow_patterns: list[str], **_: object) -> str:
        assert name == "org/name"
        assert not any(fnmatch("model.safetensors", one) for one in allow_patterns)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    engines = {"default": EngineConfig(model="org/name", attention="full")}
    task = SummaryTask(engines, Style(), collect(["in/long.md"]).sources)
    with caplog.at_level("INFO"):
        [item] = task.measured(task.items())
    assert item.size > len(Path("in/long.md").read_text())  # a token for each letter, and answers
    assert "documents: 1, of " in caplog.text


def test_mistakes_are_told_before_an_engine_is_opened(
    folder: Path, opened: list[Quoter], capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["summarize", "in/*.docx", "--out", "out", *FLAGS]) == 2
    assert "no file matches the pattern in/*.docx" in capfd.readouterr().err
    assert cli.main(["summarize", "in", "--out", "out", "--words", "0", *FLAGS]) == 2
    assert "words must be at least 1, got 0" in capfd.readouterr().err
    assert cli.main(["summarize", "", "--out", "out", *FLAGS]) == 2
    assert "an input is empty; name a folder" in capfd.readouterr().err
    assert not opened and not Path("out").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("env", "level", "style"),
    [({}, "info", "text"), ({"LEVEL": "debug", "FORMAT": "json"}, "debug", "json")],
)
def test_the_log_is_as_the_environment_says(
    folder: Path,
    opened: list[Quoter],
    env: dict[str, str],
    level: str,
    style: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in LOG_ENV:
        monkeypatch.setenv(name, "")  # as it is now it shall be again
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(f"RAZOR_LOG_{name}", value)
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(
        "razor_dist.commands.options.set_up_logging", lambda *given: told.append(given)
    )
    assert summarize() == 0
    assert told == [(level, style)]
    monkeypatch.setenv("RAZOR_LOG_LEVEL", "loud")
    assert summarize() == 2


def test_on_a_real_engine(folder: Path, tmp_path: Path) -> None:
    """A random model: what it says means nothing, but the parts must fit."""
    model = make_tiny("llama", tmp_path / "tiny")  # its own: the shared one has no tokenizer
    write_letters(model)
    save_head_map(model, ((True, True),) * 4, model / "heads.json")
    text = "# A\n\n" + "word " * 150 + "\n\n# B\n\n" + "text " * 150
    Path("in/long.md").write_text(text)
    command = ["summarize", "in/long.md", "--out", "out", "--model", str(model), "--no-ray"]
    command += ["--head-map", str(model / "heads.json"), "--sources"]
    sizes = ["--max-model-len", "1024", "--max-tokens", "8", "--threads", "1"]
    assert cli.main([*command, *sizes]) == 0
    [record] = read_job("out").records
    result = record["result"]
    assert (result["parts"], result["levels"]) == (2, 1)
    assert len(result["part_summaries"]) == 2
    assert all(part["finish_reason"] in ("stop", "length") for part in result["part_summaries"])
    for answer in [result, *result["part_summaries"]]:
        said, spans = answer["summary"], answer["sentences"]
        words = [said[sentence["start"] : sentence["end"]] for sentence in spans]
        assert "".join("".join(words).split()) == "".join(said.split())
        for source in [source for sentence in spans for source in sentence["sources"]]:
            assert text[source["start"] : source["end"]] == source["text"]
