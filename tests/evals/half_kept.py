"""A tiny Llama with a head map by which half of its KV heads are retrieval heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from razor_dist.heads.decision import spread
from razor_dist.heads.head_map import HeadMap
from razor_dist.models.loader import read_config
from razor_dist.models.shape import ModelShape
from tests.tiny_models import make_tiny


def make_half_kept(folder: Path) -> Path:
    shape = ModelShape.from_config(read_config(make_tiny("llama", folder)))
    heads = spread(0.5, shape.layers, shape.kv_heads)
    replace(HeadMap.uniform("full", shape), retrieval=heads).save(folder / "head_map.json")
    return folder
