"""The needle test as a job, by a reader that finds what it keeps; and once by the real engine."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import razor_dist
from razor_dist import cli
from razor_dist.config.errors import ConfigError, HeadMapError
from razor_dist.evals.needle.config import NeedleConfig
from razor_dist.evals.needle.model import HEAD_MAP, build_needle_model
from razor_dist.evals.needle.report import compare, write_report
from razor_dist.evals.needle.results import NeedleRun, median_of
from razor_dist.evals.needle.task import NeedleTask
from razor_dist.evals.report import note_run
from razor_dist.evals.suites.config import RulerConfig
from razor_dist.evals.suites.job import SuiteTask
from razor_dist.heads.head_map import HeadMap, shipped_head_map
from razor_dist.jobs.job import run_task
from razor_dist.jobs.pool import EnginePool, JobEngine
from razor_dist.jobs.results import read_job
from tests.evals.needle.readers import Reader, readers

SMALL: dict[str, Any] = {
    "context_lengths": (1500, 3000),
    "document_depth_percents": (0, 50, 100),
    "methods": ("full", "streaming"),
    "haystack": "noise",
}


def run(folder: Path, **settings: Any) -> tuple[NeedleRun, list[Reader]]:
    made: list[Reader] = []
    task = NeedleTask.plan(NeedleConfig(**(SMALL | settings)))
    task = pickle.loads(pickle.dumps(task))  # as it travels to an engine
    summary = run_task(task, folder, readers(task, made))
    assert summary.failed == 0
    return NeedleRun(folder), made


@pytest.mark.parametrize("query", ["after", "before", "middle"])
@pytest.mark.parametrize("preset", ["number", "duoattention", "razorattention"])
def test_what_is_kept_is_found(tmp_path: Path, preset: str, query: str) -> None:
    found, (full, streaming) = run(tmp_path, preset=preset, query=query)
    right = 1.0 if preset == "number" else 11 / 12
    assert found.scores("full") == [[right] * 2] * 3
    lost = [row[0] < 0.2 for row in found.scores("streaming")]
    assert lost == [True, True, False], "a window holds the last of the text"
    assert full.most == streaming.most == 3000, "a length is that of prompt and answer"
    assert full.read == streaming.read, "every method is asked the same"
    assert found.summary("streaming").lost == 4 and found.summary("full").lost == 0
    assert found.scores("streaming")[2] == found.scores("full")[2]
    assert found.summary("streaming").kv_bytes == 305


def test_prompts_are_those_of_the_paper(tmp_path: Path) -> None:
    _, (full, _) = run(tmp_path / "a", preset="duoattention", document_depth_percents=(50,))
    begin = "<|im_start|> This is a very long story book: <book> "
    needle = (
        " Remember, the best thing to do in San Francisco is eat a sandwich and sit in Dolores "
        "Park on a sunny day."
    )
    for text in full.read:
        assert text.startswith(begin) and text.count(needle) == 1
        assert abs(text.index(needle) / len(text) - 0.5) < 0.1
    _, (full, _) = run(
        tmp_path / "b", preset="duoattention", query="middle", document_depth_percents=(50,)
    )
    assert (
        " Q: What is the best thing to do in San Francisco? A: The best thing to do in San "
        "Francisco is eat a sandwich" in full.read[0]
    )


def test_cells_of_a_document_share_its_prefill(tmp_path: Path) -> None:
    apart, (full, _) = run(tmp_path / "apart", needles=3, repeats=2)
    assert len(full.read) == 2 * 3 * 2 and apart.summary("full").cells == 2 * 3 * 3 * 2
    assert all(text.count("The special magic number of") == 3 for text in full.read)
    together, (full, _) = run(tmp_path / "together", needles=3, share_depths=True)
    assert len(full.read) == 2 and together.summary("full").cells == 2 * 3 * 3
    assert apart.summary("full").score == together.summary("full").score == 1
    assert len(set(full.read)) == 2
    # Each needle of a document is another's, and its answer its own.
    expected = [c.expected for c in together.cells if (c.method, c.length) == ("full", 3000)]
    assert len(set(expected)) == 9


def test_each_question_before_its_document_reads_it_anew(tmp_path: Path) -> None:
    _, (full, _) = run(tmp_path, needles=2, query="before", document_depth_percents=(20, 80))
    assert len(full.read) == 2 * 2 * 2
    assert all(text.startswith("What is the special magic number of") for text in full.read)


def test_a_report_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path)
    (tmp_path / "report.md").mkdir()
    assert cli.main(["eval", "report", str(tmp_path)]) == 2
    said = f"razor-dist: cannot write {tmp_path / 'report.md'}: Is a directory"
    assert said in capsys.readouterr().err


def test_a_second_run_asks_nothing_and_other_settings_are_refused(tmp_path: Path) -> None:
    run(tmp_path)
    _, made = run(tmp_path)
    assert made == []
    with pytest.raises(ConfigError, match=r"task\.seed is 0 there and 1 here"):
        run(tmp_path, seed=1)


def test_needles_of_one_document_are_one_sample(tmp_path: Path) -> None:
    settings = {"needles": 2, "context_lengths": (2000,), "document_depth_percents": (0, 50, 100)}
    found, _ = run(tmp_path, **settings)
    documents = found.by_document("full")
    assert len(documents) == 3 and found.summary("full").cells == 6
    assert documents.keys() == found.by_document("streaming").keys()
    page = write_report(tmp_path).split("## Document by document")[1]
    assert "| full | 3 | 1.000 (0.292 to 1.000) | - | - | - | - |" in page
    assert re.search(r"\| streaming \| 3 \| 0.333 \(.*\) \| 3 \| 0 \| 0.25 \| -66.7 \(", page)


@pytest.mark.long
def test_the_report_can_be_rebuilt_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for seed, folder in enumerate(folders):
        run(folder, seed=seed)
        note_run(folder, NeedleConfig(**SMALL))
    page = write_report(folders[0])
    assert "| full | 1.000 | 1.000 | 1.000 | 6/6 | - | - |" in page
    assert "| streaming | 0.333 | 0.333 | 0.333 | 6/6 | 4 | 0 |" in page
    names = {path.name for path in folders[0].iterdir()} - {"lock"}
    pictures = {"heatmap.png", "difference.png"}
    files = {"job.json", "results.jsonl", "config.json", "environment.json", "summary.json"}
    assert names == files | pictures | {"report.md"}
    before = {name: (folders[0] / name).read_bytes() for name in names}
    assert before["heatmap.png"].startswith(b"\x89PNG")
    for name in (*pictures, "summary.json", "report.md"):
        (folders[0] / name).unlink()
    out = tmp_path / "both"
    assert cli.main(["eval", "report", *map(str, folders), "--out", str(out)]) == 0
    assert {name: (folders[0] / name).read_bytes() for name in names} == before
    said = capsys.readouterr().out
    assert "| first | streaming | 0.333 |" in said and "| second | full | 1.000 |" in said
    assert said == (out / "report.md").read_text()
    assert {path.name for path in out.iterdir()} == pictures | {"summary.json", "report.md"}
    environment = json.loads(before["environment.json"])
    assert [set(entry) >= {"cpu", "torch", "began"} for entry in environment["runs"]] == [True]
    with pytest.raises(ConfigError, match="the same name"):
        compare([folders[0], folders[0]], out)


def test_a_copy_that_is_not_installed_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a Ray job runs, whose working directory was uploaded."""

    def version(name: str) -> str:
        if name in ("razor-dist", "kvpress"):
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr("razor_dist.evals.report.version", version)
    note_run(tmp_path, NeedleConfig(**SMALL))
    [noted] = json.loads((tmp_path / "environment.json").read_text())["runs"]
    assert noted["razor_dist"] == razor_dist.__version__


def test_a_run_of_another_commit_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package, folder = tmp_path / "checkout" / "package", tmp_path / "results"
    package.mkdir(parents=True)
    folder.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setattr("razor_dist.__file__", str(package / "__init__.py"))

    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        command = ["git", "-C", str(package), *who, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def noted() -> str | None:
        note_run(folder, NeedleConfig(**SMALL))
        runs = json.loads((folder / "environment.json").read_text())["runs"]
        commit: str | None = runs[-1]["commit"]
        return commit

    assert noted() is None
    git("init")
    assert noted() is None, "in a checkout, but no part of it"
    git("add", ".")
    git("commit", "-m", "first")
    git("tag", "v1")
    first = git("rev-parse", "HEAD")
    assert noted() == first
    assert not caplog.records
    (package / "__init__.py").write_text("x = 1\n")
    assert noted() == f"{first}-dirty"
    [record] = caplog.records
    assert f"of several commits: {first} earlier, {first}-dirty now" in record.getMessage()


def test_an_interrupted_run_has_its_settings_and_a_report(tmp_path: Path) -> None:
    """Interrupt a job whose second method fails throughout and whose third has not begun."""
    methods = ("full", "streaming", "razor")
    config = NeedleConfig(**SMALL | {"methods": methods})
    task = NeedleTask.plan(config)
    made: list[Reader] = []

    @contextmanager
    def interrupted(task: NeedleTask) -> Iterator[EnginePool]:
        with readers(task, made) as pool:

            def open_engine(name: str, *place: Any) -> JobEngine:
                noted = json.loads((tmp_path / "config.json").read_text())
                assert noted["methods"] == list(methods), "written before any work"
                if name == "razor":
                    raise ConfigError("no such head map")
                engine = pool.open_engine(name, *place)
                if name == "streaming":
                    made[-1].prefill = Mock(side_effect=RuntimeError("out of memory"))
                return engine

            yield EnginePool(open_engine, 1)

    with pytest.raises(ConfigError, match="no such head map"):
        run_task(task, tmp_path, interrupted(task), on_open=partial(note_run, config=config))
    assert len(json.loads((tmp_path / "environment.json").read_text())["runs"]) == 1
    page = write_report(tmp_path)
    assert "| full | 1.000 | 1.000 | 1.000 | 6/6 | - | - | 0 |" in page
    assert "| streaming | - | - | - | 0/6 | - | - | 6 | - | - |" in page
    assert "| razor | - | - | - | 0/6 | - | - | 0 | - | - |" in page
    [failed] = [
        line for line in page.splitlines() if line.endswith(": RuntimeError: out of memory")
    ]
    assert failed.count("`streaming/") == 6 and "`streaming/3000/0/0`" in failed
    assert (tmp_path / "heatmap.png").exists() and not (tmp_path / "difference.png").exists()


@pytest.mark.long
def test_mistakes_of_the_commands_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: str) -> str:
        assert cli.main(["eval", *arguments]) == 2
        return capfd.readouterr().err

    needle = ("needle", "--out", str(tmp_path / "new"))
    assert "preset must be one of" in refused(*needle, "--preset", "duo")
    assert "must be at least 0" in refused(*needle, "--document-depth-percent-min", "-1")
    assert "holds 8192 tokens" in refused(*needle, "--context-lengths", "9000")
    assert "preset words is for the needle model" in refused(*needle, "--preset", "words")
    assert "holds no .txt files" in refused(*needle, "--haystack", str(tmp_path))
    # The embedded model that is converted already stays the one that is found.
    caches = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    monkeypatch.setenv("XDG_CACHE_HOME", caches)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert f"{tmp_path}/texts holds no .txt files" in refused(*needle, "--haystack", "~/texts")
    (tmp_path / "texts/a.txt").mkdir(parents=True)
    said = refused(*needle, "--haystack", "~/texts")
    assert f"cannot read {tmp_path}/texts/a.txt: Is a directory" in said
    published = ("published", "--out", str(tmp_path / "new"), "--data=~/sets")
    assert f"{tmp_path}/sets holds no .json or .jsonl files" in refused(*published)
    assert not (tmp_path / "new").exists()
    assert "holds no results" in refused("report", str(tmp_path))
    assert "give --out" in refused("report", str(tmp_path), str(tmp_path))
    old = str(tmp_path / "old")
    run(Path(old))
    said = refused("report", old, str(tmp_path / "older"), "--out", old)
    assert f"--out {old} holds a run, whose own report" in said
    flags = ["--haystack", "noise", "--methods", "full", "--context-lengths", "1500"]
    said = refused("needle", "--no-ray", "--out", old, *flags)
    assert "holds results of other settings" in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": "full,streaming/32"}, "methods: streaming/32: retrieval_share is of retriev"),
        (
            {"methods": "full,razor/32", "kv_dtype": "int4"},
            "methods: razor/32: retrieval_share re",
        ),
    ],
)
def test_a_share_that_no_engine_would_take_is_refused_first(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        NeedleTask.plan(NeedleConfig(**SMALL | changes))
    with pytest.raises(ConfigError, match=message):
        SuiteTask.plan(RulerConfig(lengths=2000, haystack="reference", **changes))


def test_a_report_shows_in_what_methods_differ(tmp_path: Path) -> None:
    methods = {"razor": {}, "razor | 1/32": {"retrieval_share": 1 / 32}}
    run(tmp_path, methods=methods, context_lengths=1500)
    table = write_report(tmp_path).split("## Engines")[1]
    assert r"| razor \| 1/32 |" in table
    assert "| compensation | retrieval_share |" in table
    assert [row.split(" | ")[-2:] for row in table.splitlines() if row[:7] == "| razor"] == [
        ["True", "0.0 |"], ["True", "0.03125 |"]
    ]  # fmt: skip


def test_a_map_of_another_method_is_not_duos(tmp_path: Path) -> None:
    own = shipped_head_map("smollm2")
    assert HeadMap.load(own).method == "razor"
    with pytest.raises(HeadMapError, match="made by method 'razor', not duo"):
        NeedleTask.plan(NeedleConfig(methods="duo", duo_head_map=str(own)))
    named = NeedleConfig(methods="duo", duo_head_map="smollm2-duo", haystack="noise")
    assert NeedleTask.plan(named).engines["duo"].head_map == str(shipped_head_map("smollm2-duo"))


@pytest.mark.long
def test_the_needle_model_finds_all_and_streaming_what_its_window_holds(tmp_path: Path) -> None:
    model, out = build_needle_model(tmp_path / "model"), tmp_path / "out"
    command = f"eval needle --model {model} --head-map {model / HEAD_MAP} --no-ray --out {out}"
    command += " --methods razor,streaming --preset words --share-depths"
    command += " --context-lengths 1024,1536 --document-depth-percents 0,50,100"
    command += " --window-min 256 --window-ratio none --threads 1 --kv-tokens 1600"
    # Every rank has all windows, and half of the retrieval heads' keys and values.
    command += " --world-size 2 --decode replicated"
    # All chunks are as long, however slow the machine is.
    command += " --chunked-prefill-size 256 --max-step-ms 1e6"
    assert cli.main(command.split()) == 0
    found = NeedleRun(out)
    assert found.scores("razor") == [[1, 1]] * 3
    assert found.scores("streaming") == [[0, 0], [0, 0], [1, 1]]
    records = read_job(out).records
    assert [len(record["result"]["cells"]) for record in records] == [3] * 4
    razor, streaming = (found.summary(method) for method in ("razor", "streaming"))
    assert razor.kv_bytes is not None and streaming.kv_bytes is not None
    assert razor.kv_bytes > streaming.kv_bytes > 0
    assert (out / "heatmap.png").exists() and not (out / "difference.png").exists()
    assert "| razor | 1K | " in (out / "report.md").read_text().split("## Costs")[1]

    def of_512_tokens(method: str, *keys: str) -> int:
        short, long = (median_of(found.results_at(method, n), *keys) for n in (1024, 1536))
        return int(long - short)

    # Keys and values of one head of dimension 32 in float32, of half of the tokens on each rank.
    kv, query, partial = 2 * 32 * 4, 32 * 4, (32 + 1) * 4
    assert of_512_tokens("razor", "kv_bytes") == 512 * kv // 2
    assert of_512_tokens("streaming", "kv_bytes") == 0
    # A chunk's own keys and values pass to the other rank, and its group's two queries, whose
    # partial results come back: the first chunks are over, whose earlier keys travel instead.
    assert of_512_tokens("razor", "prefill_bytes", "ring") == 512 * (kv + 2 * (query + partial))
    assert of_512_tokens("streaming", "prefill_bytes", "ring") == 0
    assert of_512_tokens("razor", "prefill_bytes", "halo") > 0
