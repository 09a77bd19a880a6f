"""Sizes of files, classes and functions, which a reader has to hold in the head at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("razor_dist", "evals", "kernels", "launch", "tests")
FILE_LINES, CLASS_LINES, FUNCTION_LINES, PARAMETERS = 400, 250, 60, 7


def too_large(path: Path) -> Iterator[str]:
    source = path.read_text(encoding="utf-8")
    if (lines := source.count("\n")) > FILE_LINES:
        yield f"{lines} lines"
    if "tests" in path.relative_to(ROOT).parts:  # cases and scenarios are long, and read one by one
        return
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (node.end_lineno or 0) - node.lineno + 1
        if isinstance(node, ast.ClassDef):
            if lines > CLASS_LINES:
                yield f"{node.name}: {lines} lines"
        elif "kernels" not in path.parts:  # a kernel is one function, its tensors are parameters
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            given = [one.arg for one in every if one.arg not in ("self", "cls")]
            if lines > FUNCTION_LINES or len(given) > PARAMETERS:
                yield f"{node.name}: {lines} lines, {len(given)} parameters"


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_is_read_at_once_is_small(folder: str) -> None:
    found = {path: list(too_large(path)) for path in (ROOT / folder).rglob("*.py")}
    assert found
    assert not {path: large for path, large in found.items() if large}


@pytest.mark.parametrize(("page", "most"), [("README.md", 150), ("docs/architecture.md", 350)])
def test_pages_that_are_read_first_are_short(page: str, most: int) -> None:
    assert (ROOT / page).read_text(encoding="utf-8").count("\n") <= most
