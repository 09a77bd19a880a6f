"""A plan that tests share, and what makes others faster: nothing is looked up twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from razor_dist.plan.devices import load_device
from razor_dist.plan.memory import DryRun, MemoryPlanner
from razor_dist.plan.planner import Plan, plan
from tests.plan.glm import N, settings


@pytest.fixture(scope="session", autouse=True)
def looked_up_once() -> Iterator[None]:
    """Remember the activations of equal deployments, which take most of a plan's time."""
    known: dict[Any, Counter[str]] = {}
    look_up = DryRun.activations

    def activations(self: DryRun, prompt: int) -> Counter[str]:
        d = self._d
        key = (d.config.model_dump_json(), repr(d.head_map), d.dtype, d.kv_dtype, d.shared, prompt)
        if key not in known:
            known[key] = look_up(self, prompt)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DryRun, "activations", activations)
        yield


@pytest.fixture
def any_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the search for the longest context, which looks up activations of other lengths."""
    monkeypatch.setattr(MemoryPlanner, "longest_context", lambda self, guess: 0)


@pytest.fixture(scope="module")
def million() -> Plan:
    return plan(settings(), load_device("h100"), context=N, retrieval=0.3)
