"""The deployment that most tests plan: GLM-4-9B-1M on eight ranks, with a million tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from razor_dist.config.schema import EngineConfig

CONFIGS = Path(__file__).parents[2] / "configs"
GLM = str(CONFIGS / "shapes" / "glm-4-9b-chat-1m")
N = 2**20


def settings(**given: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "model": GLM,
            "world_size": 8,
            "window_min": 4000,
            "window_max": 8192,
            "max_num_seqs": 1,
            "decode": "replicated",
            **given,
        }
    )
