"""Tests ask for what is promised: they touch few private names of the package, and ever fewer."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST = 109  # lower it with the number that is found
SETTERS = {"setattr", "delattr", "object", "patch"}  # of pytest's monkeypatch and unittest.mock


def parsed(*folders: str) -> Iterator[tuple[Path, ast.AST]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                yield path, node


def defined(node: ast.AST) -> str | None:
    """The name that a node defines, if it does; not that of a library, such as ``_replace``."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
    return None


def touched(node: ast.AST) -> Iterator[str]:
    """Names that a node reads of another object or module, or replaces there."""
    match node:
        case ast.Attribute(value=ast.Name(id="self" | "cls")):
            return
        case ast.Attribute(attr=name):
            yield name
        case ast.ImportFrom(names=names):
            yield from (alias.name for alias in names)
        case ast.Call(func=ast.Attribute(attr=setter), args=given) if setter in SETTERS:
            for one in given[:2]:
                if isinstance(one, ast.Constant) and isinstance(one.value, str):
                    yield one.value.rpartition(".")[2]


def test_few_private_names_are_touched() -> None:
    names = {defined(node) for _, node in parsed("razor_dist", "evals", "kernels")}
    found = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {name}"
        for path, node in parsed("tests")
        for name in touched(node)
        if name.startswith("_") and not name.endswith("__") and name in names
    ]
    assert len(found) <= MOST, "\n".join(found)
