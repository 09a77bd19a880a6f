"""The documents name files, tests and headings that exist."""

from __future__ import annotations

import argparse
import ast
import re
import runpy
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from razor_dist.cli import COMMANDS, FOREIGN_FLAGS, command_line

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
# What these two tell of need not be there any more.
HISTORY = {"LOG.md", "CHANGELOG.md"}
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


def test_the_code_names_pages_that_exist(tracked: list[str]) -> None:
    for file in tracked:
        if not file.endswith((".md", ".jsonl", ".png")) and not file.startswith("docs/"):
            for page in re.findall(r"docs/[\w/]+\.md", (ROOT / file).read_text(errors="ignore")):
                assert page in tracked, f"{file}: {page}"


# Names of other programs, of their files and fields.
OF_OTHERS = """
    FONTCONFIG_FILE RAY_AUTH_TOKEN argparse.py attention_factor capitals capitals_written
    common_words_extraction.py constants.py evaluate.py freq_words_extraction.py niah.py qa.py
    sched_autogroup_enabled scrape_config simple_evaluate variable_tracking.py weights_only
    ask.py bad_words curl CLAUDE_CODE_MAX_RETRIES model_auto_compact_token_limit stream_max_retries
    OpenAIChatCompletionsModel OpenAIResponsesModel createOpenAI extractReasoningMiddleware
"""
WORD = re.compile(r"\w+")


def test_the_documents_name_what_the_code_has(tracked: list[str]) -> None:
    """Each word in backticks is a word of a file; `Class.member` is defined by that class."""
    code = [f for f in tracked if not f.endswith((".md", ".jsonl", ".svg", ".png"))]
    texts = {f: (ROOT / f).read_text(errors="ignore") for f in code}
    words = {f: set(WORD.findall(text)) for f, text in texts.items()}
    members: dict[str, set[str]] = {}
    for f in code:
        for node in ast.walk(ast.parse(texts[f] if f.endswith(".py") else "")):
            if isinstance(node, ast.ClassDef):
                members.setdefault(node.name, set()).update(_members(node))
    known = {word for f in code for word in (*words[f], Path(f).name)} | set(OF_OTHERS.split())
    unknown = set()
    for document in DOCUMENTS:
        text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
        for name in re.findall(r"`([A-Za-z][\w.]*)(?:\(\))?`", text):
            first, *rest = name.split(".")
            of_file = name in known or rest in (["py"], ["h"], ["cpp"], ["js"])
            there = name in known if of_file else {first, *rest} <= known
            if first in members and rest:
                there = set(rest) <= members[first]
            if not there and document.name not in HISTORY:
                unknown.add(f"{document.name}: {name}")
    assert not unknown, "\n".join(sorted(unknown))


def _members(of: ast.ClassDef) -> Iterator[str]:
    """Names of a class's methods, of its fields and of what it sets in ``self``."""
    for statement in of.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name
        stored = [
            node for node in ast.walk(statement) if isinstance(getattr(node, "ctx", 0), ast.Store)
        ]
        for node in stored:
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                yield node.attr
            elif isinstance(node, ast.Name) and isinstance(statement, ast.Assign | ast.AnnAssign):
                yield node.id


def test_the_documents_name_flags_that_exist() -> None:
    """Flags of ours, or of the other programs that the documents call."""
    known = set(FOREIGN_FLAGS) | set(FLAGS_OF_OTHERS.split())
    for name in COMMANDS:
        app: Any = typer.main.get_command(command_line([name]))
        command = app.commands[name]
        for each in getattr(command, "commands", {"": command}).values():
            for parameter in each.params:
                known.update(parameter.opts + parameter.secondary_opts)
    for document in DOCUMENTS:
        if document.name not in HISTORY:
            found = re.findall(r"(?<![\w-])--[a-z][\w-]*", document.read_text())
            assert set(found) <= known, f"{document.name}: {set(found) - known}"


# Of torchrun, Ray, Docker, kubectl, systemctl, curl, pip, lm-eval; and of our own scripts.
FLAGS_OF_OTHERS = """
    --add-host --address --build-arg --cacert --dashboard-host --follow
    --from-file --from-literal --generate --head --help --include_path
    --local-addr --n-predict --now --override-generation-config
    --max-restarts --model_args --needle --nnodes --no-deps --no-python --restart --zipf
    --num-cpus --num-gpus --rdzv-backend --rdzv-conf --rdzv-endpoint --rounds --runtime-env-json
    --shm-size --standalone --working-dir
"""


def test_the_commands_of_contributing_are_installed() -> None:
    """Its first block calls make, the shell, and what the extra `dev` installs."""
    dev = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    block = (ROOT / "CONTRIBUTING.md").read_text().split("```")[1]
    called = set(re.findall(r"^(?:[A-Z]+=\S+ )*(\S+)", block, re.MULTILINE))
    assert called - {"make", ".", "python"} <= set(dev["dev"])


def marked_tests(file: Path) -> dict[str, set[str]]:
    """The tests of a file, and the markers that all cases of a test have."""
    tree = ast.parse(file.read_text())
    of_file = " ".join(
        ast.unparse(node)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    )
    return {
        node.name: {
            *re.findall(r"pytest\.mark\.(\w+)", of_file),
            *(ast.unparse(mark).split("(")[0].split(".")[-1] for mark in node.decorator_list),
        }
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[:5] == "test_"
    }


def test_commands_of_pytest_select_tests() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    markers = [line.partition(":")[0] for line in known["markers"]]
    read = argparse.ArgumentParser()
    read.add_argument("-m", default=shlex.split(known["addopts"])[-1])
    read.add_argument("-k", default="")
    read.add_argument("paths", nargs="+", type=ROOT.joinpath)
    commands = [
        (document.name, command)
        for document in DOCUMENTS
        for command in re.findall(r"python -m pytest ([^`#\n]+)", document.read_text())
        if document.name not in HISTORY
    ]
    assert commands
    for document, command in commands:
        given = read.parse_args(shlex.split(command))
        assert any(
            given.k in name and eval(given.m, {mark: mark in marks for mark in markers})
            for path in given.paths
            for file in ([path] if path.suffix else path.rglob("test_*.py"))
            for name, marks in marked_tests(file).items()
        ), f"{document}: {command}"


def test_what_is_proven_is_run_by_make() -> None:
    """But where a row says `-m slow`: each ``file::test``, and one test at least of each file."""
    for row in (ROOT / "docs/proof.md").read_text().splitlines():
        if row[:1] == "|" and "`-m slow`" not in row:
            for file, test in re.findall(r"`(tests/[\w/]*test_\w+\.py)(?:::(test_\w+))?`", row):
                found = marked_tests(ROOT / file)
                named = [found[test]] if test else [*found.values()]
                # A state machine is a class, and none is slow.
                assert not named or any("slow" not in marks for marks in named), f"{file}: {row}"


def test_the_hooks_are_the_lines_of_make_lint() -> None:
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].split("\n\n")[0]
    made = [line.replace("$(BIN)", ".venv/bin").strip() for line in lint.splitlines()[1:]]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    # A pattern of files needs a shell, which pre-commit is not.
    assert [hook["entry"].removeprefix("sh -c '").rstrip("'") for hook in hooks] == made


def test_the_page_of_flags_is_what_the_code_says() -> None:
    """Freezes the command line: a flag that is renamed or dropped breaks scripts."""
    made = runpy.run_path(str(ROOT / "docs/flags.py"))["page"]()
    assert (ROOT / "docs/flags.md").read_text() == made, "run: python docs/flags.py > docs/flags.md"
