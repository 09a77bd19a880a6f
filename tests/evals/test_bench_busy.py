"""The bench of engines beside busy processes: its arithmetic, and a run on a tiny model."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from razor_dist.evals.bench import busy
from razor_dist.evals.bench.engine import STOCK
from razor_dist.evals.bench.settings import BusyBenchSettings
from tests.tiny_models import make_tiny, save_head_map


def test_factors_are_compared_with_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(function: Any, values: Any, size: int | None, **_: Any) -> Any:
        slower = 3.0 if size is None else 4.5  # beside a busy process
        return {
            "100, 0": {"prefill": 2.0, "decode": 0.1, "cpu": 4.0},
            "100, 1": {"prefill": 2.0 * slower, "decode": 0.3, "cpu": 5.0},
        }

    monkeypatch.setattr(busy, "call", call)
    record = busy.run(BusyBenchSettings(tokens="100", busy="1", world_sizes="1,8"))
    prefill = {f"prefill, razor, P={size}, 100 tokens, 1 busy": 1.5 for size in (1, 8)}
    decode = {f"decode, razor, P={size}, 100 tokens, 1 busy": pytest.approx(1.0) for size in (1, 8)}
    assert record.figures["ratios"] == prefill | decode
    page = record.page()
    assert "| prefill, razor, P=1, 100 tokens, 1 busy |  1.50 | ≤ 1.3 | missed |" in page
    assert "| prefill, razor, P=8, 100 tokens, 1 busy |  1.50 |   ≤ 2 |    met |" in page


@pytest.mark.slow
def test_a_run_leaves_no_process(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "tiny")
    save_head_map(folder, ((False, True),) * 4, folder / "head_map.json")
    settings = BusyBenchSettings(
        model=str(folder), tokens="200", new_tokens=4, busy="1", world_sizes="1,2"
    )
    found = busy.run(settings).figures["seconds"]
    assert found.keys() == {STOCK, "razor, P=1", "razor, P=2"}
    for rows in found.values():
        assert rows.keys() == {"200, 0", "200, 1"}
        assert all(number > 0 for row in rows.values() for number in row.values())
    spinning = [p for p in psutil.process_iter(["cmdline"]) if busy._SPIN in p.info["cmdline"]]
    assert not spinning
