"""The documents name files, tests and headings that exist."""

from __future__ import annotations

import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
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
