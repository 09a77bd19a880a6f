"""Sampling defaults that a model recommends, and who may overrule them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from razor_dist.api.completions import CompletionBody
from razor_dist.api.validate import validated
from razor_dist.config.errors import ModelError
from razor_dist.protocol.sampling_params import sampling_defaults

RECOMMENDED = {"do_sample": True, "temperature": 0.2, "top_p": 0.9, "eos_token_id": [1, 2]}


def write(folder: Path, values: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_a_request_gets_the_models_values_where_it_gives_none(tmp_path: Path) -> None:
    defaults = sampling_defaults(write(tmp_path, RECOMMENDED), "auto")
    assert defaults == {"temperature": 0.2, "top_p": 0.9}
    body = validated(
        CompletionBody, {"model": "m", "prompt": "a", "top_p": 0.5, "temperature": None}
    )
    params = body.sampling(defaults)
    assert (params.temperature, params.top_p, params.top_k) == (0.2, 0.5, 0)


def test_no_file_and_none_mean_openais_defaults(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path, "auto") == {}
    assert sampling_defaults(write(tmp_path, RECOMMENDED), "none") == {}
    params = validated(CompletionBody, {"model": "m", "prompt": "a"}).sampling({})
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)


@pytest.mark.parametrize("values", [{"temperature": 7}, {"top_p": "much"}, [1]])
def test_a_file_that_cannot_be_used_is_refused(values: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json .* --generation-config none"):
        sampling_defaults(write(tmp_path, values), "auto")
