"""The store of results: what a crash may leave, and what may not be mixed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from razor_dist.config.errors import ConfigError
from razor_dist.jobs.results import PARTS, RESULTS, ResultStore, json_line, read_job

SETTINGS: dict[str, Any] = {"task": {"lengths": [1, 2]}, "engines": {"razor": {"model": "m"}}}


def record(id: str, status: str = "done", **result: Any) -> dict[str, Any]:
    return {"id": id, "status": status, "result": result, "error": None, "run": {}}


def ids(folder: Path) -> list[str]:
    return [record["id"] for record in read_job(folder).records]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with ResultStore.open(folder, SETTINGS) as store:
        store.append(record("x", text="größer\n\u2028\ud800"))
        store.append(record("y"))
        assert ids(folder) == ["x", "y"], "on the disk at once"
    with ResultStore.open(folder, SETTINGS) as store:
        assert list(store.records) == ["x", "y"]
        assert store.records["x"]["result"] == {"text": "größer\n\u2028\ud800"}
        assert store.records["x"]["settings"] == store.settings_hash
    assert read_job(folder).settings == SETTINGS


@given(cut=st.integers(0, 200))
@settings(deadline=None, max_examples=40)
def test_a_torn_last_line_is_dropped(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("torn")
    with ResultStore.open(folder, SETTINGS) as store:
        for id in "abc":
            store.append(record(id, text="ä"))
    path = folder / RESULTS
    whole = path.read_bytes()
    torn = whole[: max(0, len(whole) - cut)]
    path.write_bytes(torn)
    left = list("abc")[: torn.count(b"\n")]
    assert ids(folder) == left, "a reader drops it too, and leaves the file alone"
    assert path.read_bytes() == torn
    with ResultStore.open(folder, SETTINGS) as store:
        assert list(store.records) == left
        for id in "abc":
            if id not in left:
                store.append(record(id, text="ä"))
    assert path.read_bytes() == whole


def test_a_killed_writer_leaves_whole_lines(tmp_path: Path) -> None:
    code = (
        "import sys; from tests.jobs.test_results import *\n"
        "store = ResultStore.open(Path(sys.argv[1]), SETTINGS)\n"
        "for n in range(10**6):\n"
        "    store.append(record(str(n), text='x' * 3000)); print(n, flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    told = [int(process.stdout.readline()) for _ in range(20)]
    with pytest.raises(ConfigError, match="another process is writing"):
        ResultStore.open(tmp_path, SETTINGS)
    process.kill()
    told += [int(line) for line in process.stdout]
    process.wait()
    with ResultStore.open(tmp_path, SETTINGS) as store:  # the lock died with its holder
        found = [int(id) for id in store.records]
    assert found == list(range(len(found)))
    assert len(found) >= len(told), "what was told to be written was written"


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ResultStore.open(tmp_path, SETTINGS) as store:
        store.append(record("a"))
        write = os.write

        def half(file: int, data: bytes) -> int:
            monkeypatch.setattr(os, "write", full)
            return write(file, data[:10])

        def full(file: int, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", half)
        with pytest.raises(ConfigError, match=r"cannot write to .*: No space left on device; what"):
            store.append(record("b"))
        monkeypatch.undo()
        store.append(record("b"))
    assert ids(tmp_path) == ["a", "b"]


def test_a_full_disk_while_results_are_put_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with ResultStore.open(tmp_path, SETTINGS) as store:
        store.append(record("a"))
        store.append(record("b"))
        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(ConfigError, match=r"cannot write .*results\.jsonl: No space left"):
            store.finish("ba")
    assert ids(tmp_path) == ["a", "b"]


def test_the_current_folder_can_have_a_new_one_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    ResultStore.open(".", SETTINGS).close()
    with ResultStore.open(".", {"task": {}, "engines": {}}, new_folder=True) as store:
        assert store.folder == tmp_path / "here-2"


def test_other_settings_are_refused_with_what_differs(tmp_path: Path) -> None:
    ResultStore.open(tmp_path, SETTINGS).close()
    other = {"task": {"lengths": [1, 3], "seed": 4}, "engines": {"razor": {"model": "n"}}}
    with pytest.raises(ConfigError) as error:
        ResultStore.open(tmp_path, other)
    said = str(error.value)
    assert 'engines.razor.model is "m" there and "n" here' in said
    assert "task.lengths is [1, 2] there and [1, 3] here" in said
    assert "task.seed is not set there and 4 here" in said
    assert "--new-folder" in said


def test_a_folder_goes_on_with_more_of_its_kind(tmp_path: Path) -> None:
    more: dict[str, Any] = {**SETTINGS, "task": {"lengths": [1, 2, 3]}}

    def extends(there: Any, here: Any) -> bool:
        return bool(there["task"]["lengths"] == here["task"]["lengths"][:2])

    with ResultStore.open(tmp_path, SETTINGS) as store:
        store.append(record("a"))
        store.append_part("b", "1", {})
    with ResultStore.open(tmp_path, more, extends=extends) as store:
        assert set(store.records) == set("a") and store.parts() == {"b": {"1": {}}}
        store.append(record("b"))
        store.finish("ba")
    assert ids(tmp_path) == ["b", "a"]
    assert read_job(tmp_path).settings == more
    ResultStore.open(tmp_path, more).close()
    with pytest.raises(ConfigError, match="holds results of other settings"):
        ResultStore.open(tmp_path, SETTINGS, extends=extends)
    with ResultStore.open(tmp_path, SETTINGS, new_folder=True, extends=extends) as store:
        assert store.folder != tmp_path


def test_a_new_folder_when_asked(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ResultStore.open(folder, SETTINGS, new_folder=True).close()
    for number, expected in [(1, "run-2"), (2.0, "run-3"), (1, "run-2"), (2, "run-4")]:
        settings = {**SETTINGS, "task": number}
        with ResultStore.open(folder, settings, new_folder=True) as store:
            assert store.folder == tmp_path / expected
    with ResultStore.open(folder, SETTINGS, new_folder=True) as store:
        assert store.folder == folder


def test_failures_are_forgotten_when_asked_and_lines_ordered(tmp_path: Path) -> None:
    with ResultStore.open(tmp_path, SETTINGS) as store:
        for id, status in [("c", "done"), ("b", "failed"), ("a", "done")]:
            store.append(record(id, status))
        assert store.drop_failed() == 1
        store.append(record("b"))
        assert ids(tmp_path) == ["c", "a", "b"]
        store.finish(["a", "b"])
        assert ids(tmp_path) == list(store.records) == ["a", "b", "c"]
        store.append(record("d"))
    assert ids(tmp_path) == ["a", "b", "c", "d"]
    assert {path.name for path in tmp_path.iterdir()} == {"job.json", "lock", RESULTS}


def test_parts_are_kept_until_their_item_is_done(tmp_path: Path) -> None:
    with ResultStore.open(tmp_path, SETTINGS) as store:
        assert store.parts() == {}
        for id, key in ("a1", "a2", "b1", "c1"):
            store.append_part(id, key, {"n": key})
    path = tmp_path / PARTS
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with ResultStore.open(tmp_path, SETTINGS) as store:
        assert store.parts() == {"a": {"1": {"n": "1"}, "2": {"n": "2"}}, "b": {"1": {"n": "1"}}}
        store.append_part("c", "1", {"n": "1"})
        assert path.read_bytes() == whole
        store.append(record("a"))
        store.append(record("b", "failed"))
        store.finish("ab")
        assert set(store.parts()) == {"b", "c"}, "both may be gone on with"
        store.drop_failed()
        store.append(record("b"))
        store.append(record("c"))
        store.finish("abc")
        assert not path.exists()
        for id in ("d#1", "e#1"):
            store.append_part(id, "1", {})
        store.finish(["d#2"])
        assert set(store.parts()) == {"e#1"}, "d has changed"
    assert ids(tmp_path) == ["a", "b", "c"]


def test_parts_of_finished_items_do_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    with ResultStore.open(tmp_path, SETTINGS) as store:
        store.append_part("open", "1", {"n": 1})
        for item in range(120):
            for part in range(100):
                store.append_part(str(item), str(part), {})
            store.append(record(str(item)))
            assert store.parts() == {"open": {"1": {"n": 1}}}
    assert 1 < len((tmp_path / PARTS).read_bytes().splitlines()) < 3000
    with ResultStore.open(tmp_path, SETTINGS) as store:
        assert len(store.records) == 120 and store.parts()["open"] == {"1": {"n": 1}}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{}\n", "line 2 of .* is not a record"),
        (b"nonsense\n", "line 2 of .* is not a record"),
        (json_line(record("a") | {"settings": "x"}), "line 2 of .* is of other settings"),
        (None, "line 2 of .* is a second result of 'a'"),
    ],
)
def test_damaged_results_are_refused(tmp_path: Path, line: bytes | None, message: str) -> None:
    with ResultStore.open(tmp_path, SETTINGS) as store:
        store.append(record("a"))
    path = tmp_path / RESULTS
    path.write_bytes(path.read_bytes() + (path.read_bytes() if line is None else line))
    for opener in (read_job, lambda folder: ResultStore.open(folder, SETTINGS)):
        with pytest.raises(ConfigError, match=message):
            opener(tmp_path)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no results of a job"):
        read_job(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        ResultStore.open(tmp_path / "file", SETTINGS)
    for name in (PARTS, RESULTS):
        (tmp_path / name).write_text("of another program")
        with pytest.raises(ConfigError, match=rf"has a {name}, but no job\.json that"):
            ResultStore.open(tmp_path, SETTINGS)
        assert (tmp_path / name).read_text() == "of another program"
        (tmp_path / name).unlink()
    (tmp_path / "job.json").write_text("[]")
    with pytest.raises(ConfigError, match="is not a job's header"):
        ResultStore.open(tmp_path, SETTINGS)
    header = {"format": 2, "hash": "", "settings": {}}
    (tmp_path / "job.json").write_text(json.dumps(header))
    with pytest.raises(ConfigError, match="format 2; this version knows 1"):
        read_job(tmp_path)
    (tmp_path / "job.json").write_text(json.dumps(header | {"format": 1}))
    with pytest.raises(ConfigError, match="changed by hand"):
        read_job(tmp_path)
