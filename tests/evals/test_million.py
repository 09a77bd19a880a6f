"""The evaluation of a million tokens, at a thousand; its fits and its table."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from razor_dist.evals import million
from razor_dist.evals.million import Progress, Runs, RunSettings, main, run_all
from razor_dist.evals.million_table import polynomial, ring_bytes_per_token, table

SETTINGS = RunSettings(1024, "razor", 2, 1, 256, 128, 64, (10, 90), 0)


def test_end_to_end_and_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--out", str(tmp_path), "--length", "2K", "--world-size", "2"]
    command += [
        "--chunked-prefill-size",
        "512",
        "--attention",
        "razor",
        "full",
        "--window-min",
        "128",
    ]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "read 2,048 of 2,048 tokens" in shown and shown.count(": exact") == 6
    runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    for run, heads in zip(runs, (1, 4), strict=True):
        assert (run["read"], run["chunks"]) == (2048, 4)
        assert all(answer["said"] == answer["wanted"] for answer in run["answers"])
        # Keys and values of float32 and dimension 32, of 1024 tokens on each rank.
        retrieval = 1024 * heads * 2 * 32 * 4
        assert all(retrieval <= kv < 1.15 * retrieval + 400_000 for kv in run["kv_bytes"])
        assert all(p > b > 0 for b, p in zip(run["rss_loaded"], run["rss_peak"], strict=True))
        assert (run["prefill_bytes"]["halo"] > 0) == (heads == 1)
    assert main(command) == 0  # nothing is left to do
    assert "read" not in capsys.readouterr().out
    assert (tmp_path / "runs.jsonl").read_text().count("\n") == 2
    assert (tmp_path / "table.md").read_text().count("3 of 3") == 2


@pytest.mark.parametrize(
    "options, message",
    [
        (["--length", "16Q"], "'16Q' is no size"),
        (["--length", "20"], "20 tokens do not hold 3 sentences"),
        (["--depths", "101"], "depths must be percentages"),
    ],
)
def test_what_cannot_be_run(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--length", "1K", *options])
    assert message in capsys.readouterr().err


def fake(settings: RunSettings, exact: bool = True, **changes: Any) -> dict[str, Any]:
    """A run whose numbers follow laws that the table must find."""
    n = settings.length
    kept = 4 if settings.attention == "full" else 1
    answer = {"depth": 10, "key": "k", "wanted": "a b", "said": "a b", "exact": exact}
    sent = dict.fromkeys(("ring", "halo", "sinks", "compensation", "merge", "control"), 100)
    return {
        "settings": json.loads(json.dumps(million.asdict(settings))),
        "read": n,
        "prefill_seconds": 2e-5 * n + kept * 1e-9 * n**2,
        "prefill_cpu_seconds": 3e-5 * n + kept * 2e-9 * n**2,
        "chunks": 4,
        "first_token_seconds": 0.1,
        "decode_seconds": 0.01 + kept * 1e-9 * n,
        "answers": [answer],
        "rss_loaded": [100_000_000],
        "rss_peak": [100_000_000 + 40 * kept * n],
        "kv_bytes": [32 * kept * n],
        "prefill_bytes": sent | {"ring": 5432 * kept * n},
        "question_bytes": sent,
        "machine": {},
    } | changes


def settings_of(length: int, attention: str = "razor") -> RunSettings:
    return RunSettings(length, attention, 8, 1, None, 256, 128, (10,), 0)


def test_slopes_are_those_of_the_numbers() -> None:
    lengths = (16_384, 65_536, 1_048_576)
    text = table([fake(settings_of(n, a)) for n in lengths for a in ("razor", "full")])
    for kept, attention in ((1, "razor"), (4, "full")):
        rows = [row for row in text.splitlines() if row.startswith(f"| {attention}, 8 ranks |")]
        slopes = {row.split(" | ")[1]: row.split(" | ")[2:4] for row in rows}
        assert slopes["prefill: a n + b n²"][0].startswith(f"a = 20.0 µs, b = {kept}.000 ns")
        assert slopes["KV per rank"] == [f"{32 * kept}.0 B/token", f"{32 * kept} B/token"]
        assert slopes["RSS per rank at most"][0] == f"{40 * kept}.0 B/token"
        assert slopes["decode per token"][0].startswith(f"10.0 ms + {kept}.00 ns n")
        assert slopes["ring"] == [f"{5432 * kept} B/token"] * 2
    assert ring_bytes_per_token("razor", 8) == 7 * (256 + 2 * (128 + 132))


def test_coefficients_are_never_negative() -> None:
    assert polynomial([1, 2, 3], [2, 4, 6]) == pytest.approx((2, 0))
    assert polynomial([1, 2, 3], [1, 4, 9]) == pytest.approx((0, 1))
    a, b = polynomial([1, 2, 3], [3, 4, 4.5])
    assert a > 0 and b == 0
    a, b = polynomial([1, 2, 3], [0.1, 3, 9])
    assert a == 0 and b > 0


def test_progress_knows_what_is_left() -> None:
    lines: list[str] = []
    now = 100.0
    progress = Progress(lines.append, every=3.0, clock=lambda: now)
    bar = progress.begin(10_000, desc="", unit="tok")
    bar.update(0)
    for read in range(1000, 11_000, 1000):
        now = 100.0 + 1e-3 * read + 1e-6 * read**2
        bar.update(1000)
    assert lines[0] == "  read 2,000 of 10,000 tokens in 6 s, about 104 s left"
    assert lines[-1] == "  read 10,000 of 10,000 tokens in 110 s"
    assert len(lines) < 10


def test_a_run_that_ended_is_not_made_again(tmp_path: Path) -> None:
    made: list[int] = []

    def measure(settings: RunSettings, model: Path, say: Any) -> dict[str, Any]:
        made.append(settings.length)
        return fake(settings, exact=settings.length != 2048)

    first, second = settings_of(1024), settings_of(2048)
    assert run_all([first], Runs(tmp_path), print, measure)
    # Killed in the midst of writing the second.
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"settings": {"len')
    assert not run_all([first, second], Runs(tmp_path), print, measure)  # a wrong answer
    assert run_all([first], Runs(tmp_path), print, measure)
    assert made == [1024, 2048]


def test_a_run_with_a_wrong_answer_stays_and_is_made_again(tmp_path: Path) -> None:
    wanted = [settings_of(n) for n in (1024, 2048, 4096)]
    wrong = {2048}

    def measure(settings: RunSettings, model: Path, say: Any) -> dict[str, Any]:
        return fake(settings, exact=settings.length not in wrong)

    assert not run_all(wanted, Runs(tmp_path), print, measure)
    page = (tmp_path / "table.md").read_text()
    assert page.count("| 1 of 1 |") == 2 and page.count("| **0 of 1** |") == 1
    assert page.count("| exact |") == 2 and page.count("| **wrong** |") == 1
    # The other two alone are on a line.
    assert "KV per rank | 32.0 B/token | 32 B/token | 0.00 MB" in page
    assert not run_all(wanted, Runs(tmp_path), print, measure), "it is still wrong"
    wrong.clear()
    assert run_all(wanted, Runs(tmp_path), print, measure)
    page = (tmp_path / "table.md").read_text()
    assert page.count("| **wrong** |") == 2 and page.count("| exact |") == 3
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert [json.loads(line)["settings"]["length"] for line in lines] == [
        1024, 2048, 4096, 2048, 2048
    ]  # fmt: skip


def test_a_wrong_answer_is_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([True, False, False, True])

    def measure(settings: RunSettings, model: Path, say: Any) -> dict[str, Any]:
        return fake(settings, exact=next(answers))

    monkeypatch.setattr(million, "run_all", functools.partial(run_all, measure=measure))
    command = ["--out", str(tmp_path), "--depths", "10", "--lengths", "1K", "2K"]
    assert [main(command) for _ in range(4)] == [1, 1, 0, 0]
    assert "**wrong**" in capsys.readouterr().out


def test_a_length_is_added_to_what_is_there(tmp_path: Path) -> None:
    """The committed runs are of these settings: one more length makes one run."""
    committed = Path(__file__).parents[2] / "docs/benchmarks/million/runs.jsonl"
    (tmp_path / "runs.jsonl").write_text(committed.read_text())
    made: list[int] = []

    def measure(settings: RunSettings, model: Path, say: Any) -> dict[str, Any]:
        made.append(settings.length)
        return fake(settings)

    lengths = (2**14, 2**15, 3 * 2**14, 2**20)
    asked = [RunSettings(n, "razor", 8, 1, None, 256, 128, (10, 50, 90), 0) for n in lengths]
    before = Runs(tmp_path).all
    assert run_all(asked, Runs(tmp_path), print, measure)
    assert made == [3 * 2**14]
    assert Runs(tmp_path).all[:-1] == before
    assert "49,152 (48K)" in (tmp_path / "table.md").read_text()


def test_the_committed_table_is_of_the_committed_runs() -> None:
    folder = Path(__file__).parents[2] / "docs/benchmarks/million"
    runs = [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]
    assert table(runs) in (folder / "table.md").read_text()
