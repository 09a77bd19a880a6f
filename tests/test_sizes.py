"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.sizes import parse_size, tokens
from razor_dist.config.sources import load_config


@pytest.mark.parametrize(
    ("text", "size"),
    [("7", 7), ("1k", 1000), ("1K", 1024), ("1M", 2**20), ("0.5M", 2**19), ("1.5k", 1500)],
)
def test_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "1m", "1 000", "-1K", "1e6", "K", "1.3K", "0.5"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="invalid size"):
        parse_size(text)


@given(st.integers(min_value=0, max_value=2**40))
def test_what_is_shown_reads_back(size: int) -> None:
    number, _, name = tokens(size).partition(" ")
    assert parse_size(number.replace(",", "")) == size
    if name:
        assert parse_size(name.strip("()")) == size


def test_settings_in_tokens_take_them() -> None:
    written = {
        **{"max_model_len": "1M", "kv_tokens": "2M", "chunked_prefill_size": "64k"},
        **{"window_min": "1K", "window_max": "8K", "sink_tokens": "1k", "block": "2K"},
        "page_size": "1K",
    }
    config = load_config(EngineConfig, written)
    read = [2**20, 2**21, 64000, 1024, 8192, 1000, 2048, 1024]
    assert [getattr(config, name) for name in written] == read
    for wrong, message in (
        ("8Q", "must be an integer such as 8192 or 8K or none"),
        ("-8", "must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=f"max_model_len {message}, got .*{wrong}"):
            load_config(EngineConfig, {"max_model_len": wrong})
