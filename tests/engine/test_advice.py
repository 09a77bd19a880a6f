"""Advice on settings as an engine starts: what it compares, and when it is silent."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from razor_dist.config.schema import EngineConfig
from razor_dist.config.sources import build_config
from razor_dist.engine.advice import about_settings
from razor_dist.plan.compute import operations
from razor_dist.plan.deployment import Deployment

GLM = str(Path(__file__).parents[2] / "configs" / "shapes" / "glm-4-9b-chat-1m")
N = 1 << 20


@pytest.mark.parametrize("shared", [False, True])
def test_long_windows_are_reported_in_both_decode_modes(shared: bool) -> None:
    """Ranks that share windows read a prompt no faster."""
    config = EngineConfig(model=GLM, world_size=8, decode="tensor", max_model_len=N)
    d = Deployment.of(config, "cuda", 0.3)
    [said] = about_settings(config, d.shape, d.head_map, N, shared=shared)
    assert "set window_max" in said
    if shared:
        work = operations(d, N)
        share = 100 * work.streaming / (work.streaming + work.retrieval)
        assert int(re.findall(r"are (\d+)% of the attention", said)[0]) == pytest.approx(
            share, abs=1
        )
    capped = config.model_copy(update={"window_max": 8192})
    assert about_settings(capped, d.shape, d.head_map, N, shared=shared) == []
    # Windows of 6,554 tokens; whole on every rank they are longer than a shard.
    few = about_settings(config, d.shape, d.head_map, 32 << 10, shared=shared)
    assert len(few) == (not shared)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, None),
        ({"window_max": 8192}, "window_max: without effect"),
        ({"window_min": 20, "window_ratio": None}, "window_min, window_ratio: without effect"),
        ({"model": "smollm2", "window_min": 512}, None),  # as its shipped settings have it
        ({"model": "smollm2", "window_min": 513}, "window_min: without effect"),
    ],
)
def test_windows_that_a_head_map_replaces_are_without_effect(
    given: dict[str, Any], named: str | None
) -> None:
    config = build_config(EngineConfig, **{"model": GLM, **given})
    d = Deployment.of(EngineConfig(model=GLM, max_model_len=N), "cuda", 0.3)
    windows = tuple(tuple(None if keep else 256 for keep in row) for row in d.head_map.retrieval)
    said = about_settings(config, d.shape, dataclasses.replace(d.head_map, windows=windows), N)
    assert len(said) == (named is not None)
    if named is not None:
        assert said[0].startswith(named)
