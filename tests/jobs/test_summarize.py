"""``razor-dist summarize``, from files to results."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from razor_dist import cli
from razor_dist.commands.summarize import SummaryConfig, resuming
from razor_dist.config.errors import ConfigError
from razor_dist.config.logs import LOG_ENV
from razor_dist.config.schema import EngineConfig
from razor_dist.frontend.outputs import RequestOutput
from razor_dist.jobs import host_engine
from razor_dist.jobs.results import ResultStore, read_job
from razor_dist.llm.generation import Encoded
from razor_dist.protocol.sampling_params import SamplingParams
from tests.documents import files
from tests.jobs.quoter import Quoter
from tests.jobs.test_summary import document
from tests.ranks import FORKSERVER
from tests.tiny_models import make_tiny, save_head_map
from tests.tokenizer import write_letters

FLAGS = ("--no-ray", "--attention", "full")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Quoter]:
    """The engines that jobs of this process open."""
    engines: list[Quoter] = []

    def open_engine(config: EngineConfig, *_: Any) -> Quoter:
        engines.append(Quoter(config.max_model_len or 512))
        return engines[-1]

    monkeypatch.setattr("razor_dist.jobs.host_engine.HostLLM", open_engine)
    return engines


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    Path("in/long.md").write_text(document(6))
    Path("in/short.pdf").write_bytes(files.pdf("This is fact7 and fact8."))
    Path("in/lines.jsonl").write_text(json.dumps({"id": "line", "text": "fact9"}) + "\n")
    return tmp_path


def summarize(*flags: str, out: str = "out") -> int:
    """Summarise the folder ``in``."""
    return cli.main(["summarize", "in", "--out", out, "--max-tokens", "40", *flags, *FLAGS])


def results(folder: str = "out") -> dict[str, Any]:
    """The records by their documents' ids."""
    return {record["id"].rpartition("#")[0]: record for record in read_job(folder).records}


def test_summaries_of_every_document(
    folder: Path, opened: list[Quoter], capfd: pytest.CaptureFixture[str]
) -> None:
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


def test_a_missing_reader_fails_its_documents_alone(
    folder: Path,
    opened: list[Quoter],
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("in/other.pdf").write_bytes(Path("in/short.pdf").read_bytes())
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
    command = ["summarize", "in/short.pdf", "--out", "out", "--words", "9", *FLAGS]
    assert cli.main([*command, "--template", "ask.txt", "--language", "Latin"]) == 0
    assert "TL;DR in 9 words, Latin: This is fact7" in opened[0].prompts[0]
    assert cli.main([*command, "--template", "ask.txt", "--language", "Greek"]) == 2
    assert 'task.style.language is "Latin" there and "Greek" here' in capfd.readouterr().err
    assert cli.main([*command, "--template", "no.txt"]) == 2
    assert "cannot read the --template file no.txt" in capfd.readouterr().err


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


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The prefix stores of the engines that jobs of this process open; each gets a file."""
    found: list[Path] = []

    def open_engine(config: EngineConfig, *_: Any) -> Quoter:
        found.append(Path(config.prefix_store or ""))
        found[-1].mkdir(parents=True)
        (found[-1] / "prefix").write_text("kept")
        return Quoter(config.max_model_len or 512)

    monkeypatch.setattr("razor_dist.jobs.host_engine.HostLLM", open_engine)
    return found


def test_prefixes_are_removed_while_no_other_run_may_write(
    folder: Path, stores: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = []

    def remove(place: Path, **_: Any) -> None:
        with pytest.raises(ConfigError, match="another process is writing"):
            ResultStore.open(place.parent, read_job(place.parent).settings)
        removed.append(place)

    monkeypatch.setattr("razor_dist.commands.summarize.shutil.rmtree", remove)
    assert summarize() == 0
    assert removed == [Path("out/.prefixes")]


def test_prefixes_of_a_job_are_removed_and_no_others(folder: Path, stores: list[Path]) -> None:
    theirs = Path("prefixes/of the user")
    theirs.mkdir(parents=True)
    assert summarize(out=".") == 0
    assert stores == [folder / ".prefixes/0"] and not stores[0].parent.exists()
    assert theirs.exists()

    assert summarize("--prefix-store", "named/prefixes/{engine}", out="named") == 0
    assert stores[1] == Path("named/prefixes/0") and (stores[1] / "prefix").exists()

    # Another job in the same place leaves what the first one had kept for its next run.
    assert summarize() == 0
    earlier = Path("out/.prefixes/0/prefix")
    earlier.parent.mkdir(parents=True)
    earlier.write_text("kept")
    assert summarize("--words", "9", "--new-folder") == 0
    assert stores[3] == folder / "out-2/.prefixes/0" and not stores[3].parent.exists()
    assert earlier.exists()


@pytest.mark.parametrize(
    ("settings", "documents", "stores"),
    [
        ({"ray": False}, 9, 1),
        ({"ray": False, "engines": 8}, 9, 8),
        ({"ray": False, "engines": 8}, 2, 2),
        ({}, 99, 12),  # as many as Ray has processors for
        ({"world_size": 3, "decode": "replicated", "cpus_per_rank": 0.5}, 99, 8),
        ({"cpus_per_rank": 16}, 9, 1),
    ],
)
def test_the_stores_of_all_engines_take_a_quarter_of_the_free_disk(
    settings: dict[str, Any], documents: int, stores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(free=96 * 2**30)
    monkeypatch.setattr("razor_dist.commands.summarize.shutil.disk_usage", lambda _: free)
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    config = resuming(SummaryConfig(**settings), Path("/out/.prefixes"), documents)
    assert config.prefix_store == "/out/.prefixes/{engine}"
    assert config.prefix_store_gb == pytest.approx(24 / stores)
    bound = SummaryConfig(**settings, prefix_store_gb=1.5)
    assert resuming(bound, Path("/out/.prefixes"), documents).prefix_store_gb == 1.5


@pytest.mark.parametrize(
    ("settings", "address", "keeps"),
    [
        ({}, None, True),
        ({}, "", True),
        ({}, "local", True),
        ({}, "auto", False),
        ({"ray": False}, "auto", True),
        ({"ray_address": "local"}, "auto", True),
        ({"ray_address": "host:6379"}, None, False),
        ({"decode": "tensor"}, None, True),
        ({"world_size": 2}, None, False),
        ({"world_size": 2, "decode": "tensor"}, None, False),
        ({"world_size": 2, "decode": "replicated"}, None, True),
        ({"prefix_cache": False}, None, False),
    ],
)
def test_what_was_read_is_kept_where_it_costs_no_other_way_of_working(
    settings: dict[str, Any],
    address: str | None,
    keeps: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    config = SummaryConfig(**settings)
    assert (resuming(config, tmp_path / "p", 9) != config) == keeps
    bound = SummaryConfig(**settings, prefix_store_gb=1)
    if not keeps:
        with pytest.raises(ConfigError, match="this job makes none by itself"):
            resuming(bound, tmp_path / "p", 9)


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


class Stopping(Quoter):
    """Answers four prompts, notes a fifth, and answers that one when it is closed."""

    def __init__(self, max_model_len: int) -> None:
        super().__init__(max_model_len)
        self._closed = threading.Event()

    def close(self) -> None:
        self._closed.set()

    def generate(self, prompts: Sequence[Encoded], params: SamplingParams) -> list[RequestOutput]:
        outputs = super().generate(prompts, params)
        Path("asked").write_text("\0".join(self.prompts))
        if len(self.prompts) == 5:
            self._closed.wait()
        return outputs


def stopping_job(folder: Path, command: list[str]) -> None:
    """Run a job whose engine stops at the fifth prompt; its log is the file ``told``."""
    os.chdir(folder)
    with open("told", "w") as told:
        os.dup2(told.fileno(), 2)
    # A shell that starts the tests in the background has them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with mock.patch.object(host_engine, "HostLLM", lambda *_: Stopping(300)):
        sys.exit(cli.main(command))


@pytest.mark.long
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_job_that_is_ended_goes_on_with_the_next_part(
    folder: Path, opened: list[Quoter], end: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    Path("in/long.md").write_text(document(12))
    sizes = ["--max-model-len", "300", "--max-tokens", "60"]
    command = ["summarize", "in/long.md", "--out", "out", *sizes, *FLAGS]
    first = FORKSERVER.Process(target=stopping_job, args=(folder, command))
    first.start()
    parts, asked, told = Path("out/parts.jsonl"), Path("asked"), Path("told")

    def in_work() -> bool:
        return parts.exists() and asked.read_text().count("\0") == 4

    while not (in_work() and parts.read_bytes().count(b"\n") == 4):
        assert first.is_alive(), told.read_text()
        time.sleep(0.02)
    while "part 4 of" not in told.read_text():
        time.sleep(0.02)
    before = asked.read_text().split("\0")
    assert first.pid is not None
    os.kill(first.pid, end)
    first.join(120)
    assert first.exitcode == (-signal.SIGKILL if end == signal.SIGKILL else 130)
    assert re.search(r"in/long.md#\w+: part 3 of 12 done \| .* tokens/s, .* left", told.read_text())
    assert ("run it again to continue" in told.read_text()) == (end == signal.SIGINT)
    assert not Path("out/results.jsonl").read_bytes()
    assert parts.read_bytes().count(b"\n") == 4

    with caplog.at_level("INFO"):
        assert cli.main(command) == 0
    assert "4 of 12 parts are there already" in caplog.text
    after = opened[0].prompts
    assert set(before) & set(after) == {before[4]}, "only what was in work"
    assert len(set(before) | {prompt for prompt in after if "Chapter" in prompt}) == 12
    assert results()["in/long.md"]["status"] == "done" and not parts.exists()


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
