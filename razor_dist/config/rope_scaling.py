"""The setting ``rope_scaling``: a longer context by YaRN, with vLLM's and transformers' names."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import Field
from pydantic.dataclasses import dataclass

from razor_dist.config.validation import STRICT, explained, object_setting

_NAME = "rope_scaling"
_Positive = Annotated[float | None, Field(gt=0)]


@explained(_NAME)
@dataclass(frozen=True, config=STRICT)
class RopeScaling:
    """Rotary frequencies scaled by YaRN (arXiv 2309.00071), beyond what ``config.json`` says.

    ``factor``                            context in multiples of the original one
    ``original_max_position_embeddings``  tokens that the model was trained for
    ``attention_factor``                  of cosines and sines; none: ``0.1 ln(factor) + 1``
    ``attn_factor``                       multiplies ``0.1 ln(factor) + 1`` (vLLM's name)
    ``beta_fast``, ``beta_slow``          turns within the original context: dimensions that make
                                          more than the first keep their frequency, those that make
                                          fewer than the second are slowed down by the whole factor;
                                          none: 32 and 1

    Raises `SettingError` for a value of the wrong type or out of range.
    """

    rope_type: Literal["yarn"]
    factor: Annotated[float, Field(gt=1)]
    original_max_position_embeddings: Annotated[int, Field(ge=1)]
    attention_factor: _Positive = None
    attn_factor: _Positive = None
    beta_fast: _Positive = None
    beta_slow: _Positive = None

    def __post_init__(self) -> None:
        fast, slow = self.beta_fast or 32.0, self.beta_slow or 1.0
        if fast <= slow:
            raise ValueError(f"beta_fast ({fast:g}) must be above beta_slow ({slow:g})")
        if self.attention_factor is not None and self.attn_factor is not None:
            raise ValueError("attention_factor and attn_factor are given; one says it all")

    @classmethod
    def of(cls, value: object) -> RopeScaling | None:
        """Make one of a setting's value: a mapping of these fields, or that as JSON."""
        return object_setting(cls, _NAME, value)

    @property
    def parameters(self) -> dict[str, Any]:
        """The fields that are given, as transformers' ``rope_parameters`` have them."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return with_attention_factor(given)


def with_attention_factor(rope: dict[str, Any]) -> dict[str, Any]:
    """Turn YaRN's ``attn_factor`` into the ``attention_factor`` that transformers reads."""
    factor, own = rope.get("factor"), rope.get("attn_factor")
    given = rope.get("attention_factor") is not None
    if rope.get("rope_type") != "yarn" or given or not (_is_positive(factor) and _is_positive(own)):
        return rope
    found = {name: value for name, value in rope.items() if name != "attn_factor"}
    usual = 0.1 * math.log(max(1.0, factor)) + 1
    return found if own == 1 else found | {"attention_factor": own * usual}


def _is_positive(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and value > 0
