"""Resuming summarize: stored prefixes and finished parts are used by the next run."""

from __future__ import annotations

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
from razor_dist.config.errors import ConfigError, EngineError
from razor_dist.config.schema import EngineConfig
from razor_dist.frontend.outputs import RequestOutput
from razor_dist.jobs import host_engine
from razor_dist.jobs.results import ResultStore, read_job
from razor_dist.llm.generation import Encoded
from razor_dist.protocol.sampling_params import SamplingParams
from tests.jobs.quoter import Quoter, document
from tests.jobs.summarizing import FLAGS, results, summarize
from tests.ranks import FORKSERVER


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The prefix stores of the engines that jobs of this process open; each gets a file."""
    found: list[Path] = []

    def open_engine(config: EngineConfig, *_: Any) -> Quoter:
        found.append(Path(config.prefix_store or ""))
        found[-1].mkdir(parents=True, exist_ok=True)
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


def test_prefixes_that_are_kept_for_a_failed_document_are_told_of(
    folder: Path, stores: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ("--max-model-len", "300")
    with mock.patch.object(Quoter, "stream", side_effect=[EngineError("a rank died")] * 3):
        assert summarize(*flags, "--attempts", "1") == 3
    assert "kept out/.prefixes (0.0 GiB)" not in capfd.readouterr().err

    def fail_at_last(self: Quoter, prompts: Any, params: SamplingParams) -> list[RequestOutput]:
        if "summaries of the consecutive" in self._tokenizer.decode(prompts[0].ids):
            raise EngineError("a rank died")
        return generate(self, prompts, params)

    generate = Quoter.generate
    with mock.patch.object(Quoter, "generate", fail_at_last):
        assert summarize(*flags, "--attempts", "1", "--retry-failed") == 3
    assert "kept out/.prefixes (0.0 GiB) for documents that are not" in capfd.readouterr().err
    # A run of other documents leaves them for a later one.
    other = ["summarize", "in/short.txt", "--out", "out", "--max-tokens", "40", *flags, *FLAGS]
    assert cli.main(other) == 0
    assert "kept out/.prefixes (0.0 GiB) for documents that are not" in capfd.readouterr().err
    assert summarize(*flags, "--retry-failed") == 0
    assert "kept" not in capfd.readouterr().err and not Path("out/.prefixes").exists()


@pytest.mark.long
def test_prefixes_of_a_job_are_removed_and_no_others(folder: Path, stores: list[Path]) -> None:
    theirs = Path("prefixes/of the user")
    theirs.mkdir(parents=True)
    assert summarize(out=".") == 0
    assert stores == [folder / ".prefixes/0"] and not stores[0].parent.exists()
    assert theirs.exists()

    assert summarize("--prefix-store", "named/prefixes/{engine}", out="named") == 0
    assert stores[1] == Path("named/prefixes/0") and (stores[1] / "prefix").exists()

    # What a run without a store of the user's has left goes with the last document, too.
    (folder / "named/.prefixes").mkdir()
    assert summarize("--prefix-store", "named/prefixes/{engine}", out="named") == 0
    assert not (folder / "named/.prefixes").exists()

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
    settings: dict[str, Any],
    documents: int,
    stores: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = SimpleNamespace(free=96 * 2**30)
    monkeypatch.setattr("razor_dist.commands.summarize.shutil.disk_usage", lambda _: free)
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    config = resuming(SummaryConfig(**settings), Path("/out/.prefixes"), documents)
    assert config.prefix_store == "/out/.prefixes/{engine}"
    assert config.prefix_store_gb == pytest.approx(24 / stores)
    bound = SummaryConfig(**settings, prefix_store_gb=1.5)
    assert resuming(bound, Path("/out/.prefixes"), documents).prefix_store_gb == 1.5
    # The next run has the bound of the first, of which some is taken now.
    (tmp_path / "0").mkdir()
    with (tmp_path / "0" / "prefix").open("wb") as file:
        file.truncate(8 * 2**30)
    free.free = 88 * 2**30
    again = resuming(SummaryConfig(**settings), tmp_path, documents)
    assert again.prefix_store_gb == pytest.approx(24 / stores)
    # Stores of engines that this run does not open keep what they have.
    (tmp_path / "0").rename(tmp_path / "12")
    fewer = resuming(SummaryConfig(**settings), tmp_path, documents)
    assert fewer.prefix_store_gb == pytest.approx((24 - 8) / stores)


@pytest.mark.parametrize(
    ("settings", "stores"),
    [
        ({}, 4),
        ({"world_size": 2, "decode": "replicated"}, 2),
        ({"cpus_per_rank": 64}, 2),
        ({"device": "cpu"}, 99),
    ],
)
def test_on_gpus_as_many_engines_have_a_store_as_gpus_hold(
    settings: dict[str, Any], stores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(free=96 * 2**30)
    monkeypatch.setattr("razor_dist.commands.summarize.shutil.disk_usage", lambda _: free)
    monkeypatch.setattr("os.cpu_count", lambda: 128)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    config = resuming(SummaryConfig(**settings), Path("/out/.prefixes"), 99)
    assert config.prefix_store_gb == pytest.approx(24 / stores)


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
