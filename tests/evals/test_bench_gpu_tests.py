"""Tests for a GPU, as ``bench gpu`` runs them: each outcome is kept, whatever goes wrong."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from razor_dist.evals.bench import gpu_parts, gpu_tests
from razor_dist.evals.bench.gpu import Bench, Skipped

CUDA = torch.device("cuda")  # which is not looked for here

TESTS_THAT_FAIL = """
import os, time
import pytest

pytestmark = pytest.mark.gpu

def test_right():
    pass

@pytest.mark.parametrize("case", ["a case", "b"])
def test_wrong(case):
    assert case == "b", "it is another | one"

def test_breaks_the_context():
    raise RuntimeError("CUDA error: an illegal memory access")

def test_aborts():
    os.abort()

def test_absent():
    pytest.skip("needs triton")

def test_in_teardown(request):
    request.addfinalizer(lambda: 1 / 0)

def test_hangs():
    time.sleep(1000)

def test_last():
    print(os.getpid())
"""


def folder_of_tests(folder: Path, **files: str) -> list[str]:
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu")
    (folder / "tests").mkdir()
    for name, text in files.items():
        (folder / "tests" / f"test_{name}.py").write_text(text)
    return [f"tests/test_{name}.py" for name in files]


@pytest.mark.long
def test_outcomes_come_by_file_and_test_whatever_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_tests, "_PATIENCE", 30.0)
    files = folder_of_tests(tmp_path, lacks="import nobody_has_this", fails=TESTS_THAT_FAIL)
    bench, seen = Bench(CUDA, time.monotonic() + 400), []
    with pytest.raises(RuntimeError, match="3 passed, 6 failed, 1 skipped"):
        for event in gpu_tests.run_tests(bench, files, tmp_path):
            seen.append(event)
    (_, tables), outcomes = seen[-1], [figures["tests"] for figures, _ in seen[:-1]]
    assert outcomes[-1] == {
        files[0]: {"collection": "failed: ModuleNotFoundError: No module named 'nobody_has_this'"},
        files[1]: {
            "test_right": "passed",
            "test_wrong[a case]": "failed: AssertionError: it is another | one",
            "test_wrong[b]": "passed",
            "test_breaks_the_context": "failed: RuntimeError: CUDA error: an illegal memory access",
            "test_aborts": "failed: its process ended with -6",
            "test_absent": "skipped: needs triton",
            "test_in_teardown": "failed: ZeroDivisionError: division by zero",
            "test_hangs": "failed: nothing came for 30 s",
            "test_last": "passed",
        },
    }
    assert any(one[files[1]].get("test_right") == "not finished" for one in outcomes[1:])
    assert any(one[files[1]].get("test_last") == "not begun" for one in outcomes[1:])
    page = "\n".join(map(str, tables))
    assert re.search(r"tests/test_fails.py +\| +3 \| +5 \| +1 \| +0 \| +0 \|", page)
    assert "it is another \\| one" in page
    said = capfd.readouterr().out
    assert 'assert case == "b", "it is another | one"' in said


@pytest.mark.long
def test_outcomes_until_time_runs_out_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = "\nclass TestEndless:\n    def test_it(self):\n        time.sleep(1000)\n"
    text = "import time, pytest\npytestmark = pytest.mark.gpu\ndef test_first(): pass" + endless
    files = folder_of_tests(tmp_path, endless=text + "def test_late(): pass")
    left, found = [400.0], dict[str, Any]()
    monkeypatch.setattr(Bench, "left", property(lambda _: left[0]))
    with pytest.raises(RuntimeError, match="1 passed, 1 not finished, 1 not begun"):
        for figures, _ in gpu_tests.run_tests(Bench(CUDA, 0.0), files, tmp_path):
            found |= figures
            if found["tests"][files[0]].get("TestEndless::test_it") == "not finished":
                left[0] = 0.0
    assert found["tests"][files[0]] == {
        "test_first": "passed",
        "TestEndless::test_it": "not finished: no time was left",
        "test_late": "not begun",
    }


@pytest.mark.long
@pytest.mark.parametrize("skips", [True, False])
def test_tests_that_are_all_skipped_are_not_done(skips: bool, tmp_path: Path) -> None:
    text = f"import pytest\n@pytest.mark.gpu\ndef test_it():\n    {skips} and pytest.skip('why')"
    tests = gpu_tests.run_tests(
        Bench(CUDA, time.monotonic() + 300),
        folder_of_tests(tmp_path, it=text),
        tmp_path,
    )
    if skips:
        with pytest.raises(Skipped, match="1 skipped, the first: why"):
            list(tests)
    else:
        assert "passed" in str(list(tests)[-1][1][0])


@pytest.mark.long
def test_what_ends_pytest_before_its_first_test_is_the_reason(tmp_path: Path) -> None:
    files = folder_of_tests(tmp_path, it="import os\nos.abort()")
    with pytest.raises(RuntimeError, match="its process ended with -6"):
        list(gpu_tests.run_tests(Bench(CUDA, time.monotonic() + 300), files, tmp_path))


@pytest.mark.long
def test_tests_of_kernels_compile_nothing_for_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the part runs them; here their tests are skipped for want of a GPU, or run on it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with contextlib.suppress(Skipped):
        list(gpu_parts.correct(Bench(CUDA, time.monotonic() + 300)))
    assert not list(tmp_path.iterdir())
