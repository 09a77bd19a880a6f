"""A tiny model with retrieval heads and streaming heads."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tiny_models import make_tiny, save_head_map
from tests.tokenizer import write_letters

RETRIEVAL = ((True, False), (False, False), (True, True), (False, True))


@pytest.fixture(scope="package")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An engine's settings, with short windows."""
    folder = tmp_path_factory.mktemp("tiny")
    model = make_tiny("llama", folder / "model")
    write_letters(model)
    head_map = save_head_map(model, RETRIEVAL, folder / "map.json")
    return {
        **{"model": str(model), "head_map": str(head_map), "threads": 1, "page_size": 16},
        **{"window_min": 48, "window_ratio": 4, "block": 16, "max_num_seqs": 2},
    }
