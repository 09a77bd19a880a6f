"""Answers of two engines to one request are the same, but for rounding."""

from __future__ import annotations

from typing import Any

import pytest

from razor_dist.protocol.messages import Token
from razor_dist.protocol.sampling_params import SamplingParams
from tests.prefix.stores import TO_8_BITS


def same_tokens(
    got: list[Token], want: list[Token], bound: float, params: SamplingParams, *, whole: bool
) -> None:
    assert len(got) == len(want) or (len(got) < len(want) and not whole) or bound >= TO_8_BITS
    for one, other in zip(got, want, strict=False):
        if one.token != other.token and bound >= TO_8_BITS:
            # Of two tokens about as likely, either; a sampled one may be any.
            assert params.temperature > 0 or params.adjusts_logits or near(one, other, bound)
            return
        assert one.token == other.token, (got, want)
        assert (one.finish == other.finish) or (not whole and other.finish), (got, want)
        if params.logprobs is not None:
            assert near(one, other, bound), (got, want)
            same(dict(one.top), dict(other.top), bound)
        if params.return_sources:
            same(dict(one.sources or ()), dict(other.sources or ()), bound)


def near(one: Token, other: Token, bound: float) -> bool:
    if one.logprob is None or other.logprob is None:
        return one.logprob == other.logprob
    return abs(one.logprob - other.logprob) <= bound


def same(got: dict[int, float], want: dict[int, float], bound: float) -> None:
    """The same keys and values; of those that are least, and so nearly left out, one may differ."""
    least = max((min(each.values()) for each in (got, want) if each), default=0.0) + bound
    for key in got.keys() | want.keys():
        if key in got and key in want:
            assert got[key] == pytest.approx(want[key], abs=bound), (got, want)
        else:
            assert got.get(key, want.get(key, 0.0)) <= least, (got, want)


def same_prompt(got: list[Any], want: list[Any], bound: float) -> None:
    assert len(got) == len(want)
    for (logprob, _, top), (other, _, others) in zip(got, want, strict=True):
        assert logprob == pytest.approx(other, abs=bound)
        same(dict(top), dict(others), bound)
