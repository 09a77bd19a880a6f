"""A tiny model with retrieval heads and streaming heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from razor_dist.heads.head_map import HeadMap
from razor_dist.models.loader import read_config
from razor_dist.models.shape import ModelShape
from tests.tiny_models import make_tiny
from tests.tokenizer import write_letters

RETRIEVAL = ((True, False), (False, False), (True, True), (False, True))


@pytest.fixture(scope="package")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An engine's settings, with short windows."""
    folder = tmp_path_factory.mktemp("tiny")
    model, head_map = make_tiny("llama", folder / "model"), folder / "map.json"
    write_letters(model)
    full = HeadMap.uniform("full", ModelShape.from_config(read_config(model)))
    replace(full, retrieval=RETRIEVAL).save(head_map)
    return {
        **{"model": str(model), "head_map": str(head_map), "threads": 1, "page_size": 16},
        **{"window_min": 48, "window_ratio": 4, "block": 16, "max_num_seqs": 2},
    }
