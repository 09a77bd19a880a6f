"""Documents that a command line names."""

from __future__ import annotations

import errno
import gzip
import os
import pickle
from pathlib import Path

import pytest

from razor_dist.config.errors import ConfigError, DocumentError
from razor_dist.documents.collect import collect
from razor_dist.jobs.results import ResultStore


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("in/b.txt", "in/deep/a.md", "in/picture.png", "in/.hidden/c.txt", "GPL-3"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}")
    (tmp_path / "in/lines.jsonl").write_text(
        '{"id": "x", "text": "first"}\n\n{"id": 7, "text": "second"}\n{"id": "y"}\nno JSON\n'
    )
    return tmp_path


def test_folders_files_and_lines(folder: Path) -> None:
    sources, left_out = collect(["GPL-3", "in", "in/b.txt"])
    ids = ["GPL-3", "in/b.txt", "in/deep/a.md", "x", "7", "in/lines.jsonl:4", "in/lines.jsonl:5"]
    assert [source.id for source in sources] == ids
    assert sorted(map(str, left_out)) == ["in/.hidden/c.txt", "in/picture.png"]
    copies = pickle.loads(pickle.dumps(sources))
    texts = [source.read().text for source in copies[:5]]
    assert texts == ["text of GPL-3", "text of in/b.txt", "text of in/deep/a.md", "first", "second"]
    with pytest.raises(DocumentError, match="the line has no text"):
        copies[5].read()
    with pytest.raises(DocumentError, match="the line is not valid JSON"):
        copies[6].read()


def test_a_name_that_is_no_utf_8_is_escaped(folder: Path) -> None:
    """A tokenizer refuses it otherwise, and so does an output's encoding."""
    with open(b"in/caf\xe9.txt", "w") as file:
        file.write("text")
    [source] = collect(["in/caf*.txt"]).sources
    assert source.id == source.path == r"in/caf\xe9.txt" and source.read().text == "text"


def test_links_to_folders_are_followed_once_each(folder: Path) -> None:
    for name in ("other/x.txt", "other/inner/y.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("text")
    links = {"a": "deep", "other": "../other", "again": "../other/inner", "loop": "..", ".h": ".."}
    for name, target in links.items():
        Path("in", name).symlink_to(target)
    before = collect(["in/deep", "in/b.txt", "in/lines.jsonl", "GPL-3", "other"]).sources
    sources, left_out = collect(["in"])
    assert {source.digest for source in sources} == {source.digest for source in before}
    assert len(sources) == len(before)
    found = {source.id for source in sources}
    assert found >= {"in/deep/a.md", "in/again/y.txt", "in/loop/GPL-3", "in/loop/other/x.txt"}
    assert left_out[Path("in/.h")] == "hidden"


def test_what_cannot_be_reached_is_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("in/closed").mkdir()
    Path("in/broken.txt").symlink_to("nowhere.txt")
    Path("in/turns.txt").symlink_to("turns.txt")
    scan, stat = os.scandir, Path.stat

    def deny(path: str | Path) -> None:
        if os.fspath(path) in ("in/closed", "in/deep/a.md"):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))

    # Root has access to everything, and tests may run as root.
    monkeypatch.setattr(os, "scandir", lambda path: deny(path) or scan(path))
    monkeypatch.setattr(Path, "stat", lambda self, **k: deny(self) or stat(self, **k))
    sources, left_out = collect(["in"])
    assert [source.id for source in sources[:2]] == ["in/b.txt", "x"]
    problems = {path.name: problem for path, problem in left_out.items()}
    assert problems["closed"] == problems["a.md"] == "Permission denied"
    assert problems["broken.txt"] == "No such file or directory"
    assert problems["turns.txt"] == "Too many levels of symbolic links"
    assert problems["c.txt"] == "hidden"
    assert problems["picture.png"] == "not a kind of document that can be read"
    assert Path("in/broken.txt") in collect(["in/*.txt"]).left_out
    with pytest.raises(ConfigError, match="cannot read in/closed: Permission denied"):
        collect(["in/closed"])


def test_patterns(folder: Path) -> None:
    sources, left_out = collect(["in/**/*.??*"])
    assert [source.id for source in sources[:2]] == ["in/b.txt", "in/deep/a.md"]
    assert [str(path) for path in left_out] == ["in/picture.png"]
    sources, left_out = collect(["in/*"])
    assert "in/deep/a.md" not in [source.id for source in sources]
    assert left_out[Path("in/deep")] == "a folder: name it, or end the pattern with /**"
    assert Path("in/deep") not in collect(["in/**"]).left_out


def write_job(folder: Path) -> None:
    with ResultStore.open(folder, {}) as store:
        store.append({"id": "x", "status": "done", "result": {}})
        store.append_part("y", "key", {})
    for name in (f"pages/in-x.txt-{'0a' * 6}-iso8859-1.md", ".prefixes/0/x"):
        folder.joinpath(name).parent.mkdir(parents=True)
        folder.joinpath(name).write_text("of the job")


@pytest.mark.parametrize("named", ["in", "in/*", "in/**", "in/**/*.??*"])
def test_what_jobs_wrote_is_left_out(folder: Path, named: str) -> None:
    before = collect([named])
    for job in ("in", "in/out", "in/out-2", "in/deep/out"):
        write_job(folder / job)
    assert collect([named]) == before
    [page] = collect(["in/out/pages"]).sources
    assert page.id.startswith("in/out/pages/in-x.txt-")
    for name in ("mine.md", "inner/mine.md"):
        path = Path("in/pages", name)
        path.parent.mkdir(exist_ok=True)
        path.write_text("of the user")
    mine = {source.id for source in collect(["in"]).sources if source.id.endswith("mine.md")}
    assert mine == {"in/pages/mine.md", "in/pages/inner/mine.md"}


def test_binary_files_without_a_suffix_and_other_encodings(folder: Path) -> None:
    Path("in/program").write_bytes(b"\x7fELF\0")
    Path("in/utf-16").write_text("é", encoding="utf-16")
    Path("in/old.txt").write_bytes(b"caf\xe9")
    sources, left_out = collect(["in"], "latin1")
    assert Path("in/program") in left_out
    found = {source.id: source for source in sources}
    assert found["in/utf-16"].read().text == "é" and found["in/old.txt"].read().text == "café"
    assert {id for id, source in found.items() if source.encoding} == {"in/old.txt"}
    for encoding in ("latin-one", "undefined", "idna", "punycode"):
        with pytest.raises(ConfigError, match=f"unknown encoding '{encoding}'"):
            collect(["in"], encoding)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("data", "needs"),
    [
        (b"plain", False),
        (b"", False),
        ("é".encode("utf-8-sig"), False),
        ("é".encode("utf-16"), False),
        ("é".encode("utf-16")[:-1], True),
        ("é".encode("utf-16-le"), True),
        (b"caf\xe9", True),
        ("日本".encode("iso2022_jp"), True),
    ],
)
def test_another_encoding_is_of_files_that_need_it(
    folder: Path, data: bytes, needs: bool, packed: bool
) -> None:
    file = Path("in/x.txt.gz" if packed else "in/x.txt")
    file.write_bytes(gzip.compress(data) if packed else data)
    [source] = collect([str(file)], "cp1252").sources
    assert source.encoding == ("cp1252" if needs else None)


def test_a_broken_archive_is_the_same_with_another_encoding(folder: Path) -> None:
    whole = gzip.compress(b"text" * 99)
    for data in (b"no archive", whole[:-9], whole[:12] + b"x" * 90):
        Path("in/x.txt.gz").write_bytes(data)
        assert collect(["in/x.txt.gz"], "latin-1") == collect(["in/x.txt.gz"])


def test_a_file_that_changed_is_another(folder: Path) -> None:
    [before] = collect(["in/b.txt"]).sources
    [line, *_] = collect(["in/lines.jsonl"]).sources
    Path("in/b.txt").write_text("TEXT of in/b.txt")
    Path("in/lines.jsonl").write_text('{"id": "x", "text": "FIRST"}\n')
    assert collect(["in/b.txt"]).sources[0].digest != before.digest
    for source in (before, line):
        with pytest.raises(DocumentError, match="was changed since the job began"):
            source.read()


def test_a_file_that_is_gone_is_told_of_with_the_others(folder: Path) -> None:
    [source] = collect(["in/b.txt"]).sources
    Path("in/b.txt").unlink()
    with pytest.raises(DocumentError, match="cannot be opened: No such file"):
        source.read()


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        (["in/*.epub"], r"no file matches the pattern in/\*.epub"),
        (["in/*.png"], "holds no document; these are read: .txt"),
        (["in/picture.png"], "cannot be read; these are"),
        (["x" * 300], "cannot read x+: File name too long"),
        (["missing.txt"], "missing.txt: no such file or folder"),
        (["empty.jsonl"], "no line with a document"),
        (["pipe"], "pipe is no file; write what comes from it to one, and name that"),
        (["pipe.jsonl"], "pipe.jsonl is no file"),
        (["twice.jsonl"], "the id 'x': line 1 of twice.jsonl and line 2 of twice.jsonl"),
    ],
)
def test_inputs_that_name_nothing_are_refused(
    folder: Path, inputs: list[str], problem: str
) -> None:
    Path("empty.jsonl").write_text("\n")
    for pipe in ("pipe", "pipe.jsonl"):
        os.mkfifo(pipe)
    Path("twice.jsonl").write_text('{"id": "x", "text": "a"}\n{"id": "x", "text": "b"}\n')
    with pytest.raises(ConfigError, match=problem):
        collect(inputs)
