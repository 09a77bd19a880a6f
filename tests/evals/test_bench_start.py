"""The bench of starts: one small run, with real servers."""

from __future__ import annotations

import pytest

from razor_dist.evals.bench.settings import RanksBenchSettings
from razor_dist.evals.bench.start import run
from tests.test_kernels_linear import needs_compiler


@pytest.mark.slow  # it compiles the kernels
@needs_compiler
def test_a_server_is_started_with_kernels_and_without() -> None:
    record = run(RanksBenchSettings(tokens="200", new_tokens=4, world_sizes="1"))
    cold, warm = record.figures["starts"]
    assert (cold["compiled"], warm["compiled"]) == (False, True)
    for start in (cold, warm):
        assert start["world_size"] == 1 and start["cpu"] > 0
        assert len(start["short"]) == len(start["long"]) == 3 == len(start["tokens_per_second"])
        assert min(*start["short"], *start["long"], start["ready"]) > 0
        short, long = start["prompt_tokens"][:3], start["prompt_tokens"][3:]
        assert max(short) < 100 < min(long)
    assert "P=1, nothing compiled" in record.page()
