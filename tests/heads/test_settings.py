"""Settings of the methods that find heads: what is out of range is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from razor_dist.config.errors import ConfigError
from razor_dist.identify.settings import (
    DuoSettings,
    KVzipSettings,
    OnTheFlySettings,
    PasskeySettings,
    RazorSettings,
    ScopeSettings,
)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (RazorSettings, {"tokens": 1}),
        (RazorSettings, {"seed": -1}),
        (RazorSettings, {"repeats": 1}),
        (PasskeySettings, {"passkeys": 11}),
        (PasskeySettings, {"words": 0}),
        (KVzipSettings, {"recent": 200, "tokens": 200}),
        *((OnTheFlySettings, {name: 0}) for name in ("samples", "recent")),
        *((OnTheFlySettings, {name: value}) for name, value in (("sparsity", 1.5), ("sinks", -1))),
        *((DuoSettings, {name: 0}) for name in ("steps", "recent", "learning_rate")),
        *((DuoSettings, {name: -1}) for name in ("sinks", "l1", "threshold")),
        *((DuoSettings, {name: value}) for name, value in (("zero_stage", 2), ("sparsity", 1.5))),
        *((ScopeSettings, {"epsilon": value}) for value in (0.0, 1.0)),
        *(
            (ScopeSettings, {name: value})
            for name, value in (("context_tokens", 0), ("bound", "x"))
        ),
    ],
)
def test_settings_are_checked(kind: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(wrong))} must be .*, got "):
        kind(**wrong)


def test_rules_and_percentages_are_checked() -> None:
    with pytest.raises(ConfigError, match="sparsity or threshold, not both"):
        DuoSettings(sparsity=0.5, threshold=0.5)
    with pytest.raises(ConfigError, match="induction_percent must be at most 100, got 140"):
        RazorSettings(induction_percent=140)
