"""What the documents say of the repository's files is true of those that are in it."""

from __future__ import annotations

import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
# A test may be named with its file, or after it, with "::" or without.
TEST = re.compile(r"(?:tests/[\w/]+\.py::)?(test_\w+)")


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """Files under version control, without links to others and empty ones."""
    listing = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True
    )
    if listing.returncode != 0:
        pytest.skip(f"no git checkout: {listing.stderr.strip()}")
    entries = (line.split(maxsplit=3) for line in listing.stdout.splitlines())
    empty = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"  # git's name of no content
    return [path for mode, content, _, path in entries if mode != "120000" and content != empty]


def tree() -> dict[str, str]:
    """The README's tree: what it says of every path."""
    text = (ROOT / "README.md").read_text()
    [block] = re.findall(r"## What each file is for\n\n```\n(.*?)```", text, re.DOTALL)
    said: dict[str, str] = {}
    folders: list[str] = []
    for line in block.splitlines():
        name, _, purpose = line.strip().partition(" ")
        depth = (len(line) - len(line.lstrip())) // 2
        path = "".join([*folders[:depth], name])
        assert path not in said, f"{path} is there twice"
        said[path] = purpose.strip()
        if name.endswith("/"):
            folders[depth:] = [name]
    return said


def test_the_readmes_tree_has_a_line_for_every_file(tracked: list[str]) -> None:
    said = tree()
    files = [path for path in said if not path.endswith("/")]
    wanted = [f for f in tracked if f.startswith(("razor_dist/", "kernels/", "evals/"))]
    wanted += [f for f in tracked if f.startswith(("launch/", "configs/"))]
    missing = [f for f in wanted if not any(fnmatch(f, pattern) for pattern in files)]
    assert not missing, "add a line to the tree in README.md"
    gone = [pattern for pattern in files if not any(fnmatch(f, pattern) for f in tracked)]
    assert not gone, "no such file: drop the line from the tree in README.md"
    assert all(said[path] for path in files)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        path = document.parent / target if target else document
        assert path.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles]


def test_the_documents_name_files_and_tests_that_exist(tracked: list[str]) -> None:
    tests = "\n".join((ROOT / f).read_text() for f in tracked if fnmatch(f, "tests/*.py"))
    for document in DOCUMENTS:
        for words in re.findall(r"`([^`\n]+)`", document.read_text()):
            if named := TEST.fullmatch(words):
                assert f"def {named[1]}(" in tests, f"{document.name}: {words}"
            path = words.partition("::")[0]
            if re.fullmatch(r"[\w./-]+\.(py|json|yaml)", path) and "/" in path:
                found = any(f == path or f.endswith(f"/{path}") for f in tracked)
                assert found, f"{document.name}: {path}"
