"""The setting ``rope_scaling``: a longer context by YaRN, with vLLM's and transformers' names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from razor_dist.config.validation import SettingError, object_setting

_NAME = "rope_scaling"


@dataclass(frozen=True)
class RopeScaling:
    """Rotary frequencies scaled by YaRN (arXiv 2309.00071), beyond what ``config.json`` says.

    ``factor``                            context in multiples of the original one, above 1
    ``original_max_position_embeddings``  tokens that the model was trained for
    ``attention_factor``                  of cosines and sines; none: ``0.1 ln(factor) + 1``
    ``beta_fast``, ``beta_slow``          turns within the original context: dimensions that make
                                          more than the first keep their frequency, those that make
                                          fewer than the second are slowed down by the whole factor;
                                          none: 32 and 1

    Raises `SettingError` for a value of the wrong type or out of range.
    """

    rope_type: str
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None

    def __post_init__(self) -> None:
        if self.rope_type != "yarn":
            raise SettingError(f"{_NAME}.rope_type must be yarn, got {self.rope_type!r:.80}", _NAME)
        original = self.original_max_position_embeddings
        if isinstance(original, bool) or not isinstance(original, int) or original < 1:
            raise SettingError(
                f"{_NAME}.original_max_position_embeddings must be an integer of at least 1, got "
                f"{original!r:.80}",
                _NAME,
            )
        for name, above in (("factor", 1), ("attention_factor", 0)):
            self._check_number(name, above)
        for name in ("beta_fast", "beta_slow"):
            self._check_number(name, 0)
        fast, slow = self.beta_fast or 32.0, self.beta_slow or 1.0
        if fast <= slow:
            raise SettingError(
                f"{_NAME}.beta_fast ({fast:g}) must be above beta_slow ({slow:g})", _NAME
            )

    def _check_number(self, name: str, above: float) -> None:
        value = getattr(self, name)
        if value is None and name != "factor":
            return
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not above < value < math.inf:
            wanted = f"a number above {above:g}"
            raise SettingError(f"{_NAME}.{name} must be {wanted}, got {value!r:.80}", _NAME)

    @classmethod
    def of(cls, value: object) -> RopeScaling | None:
        """Make one of a setting's value: a mapping of these fields, or that as JSON."""
        return object_setting(cls, _NAME, value)

    @property
    def parameters(self) -> dict[str, Any]:
        """The fields that are given, as transformers' ``rope_parameters`` have them."""
        fields = {name: value for name, value in vars(self).items() if value is not None}
        if self.attention_factor is not None:
            fields["attention_factor"] = float(self.attention_factor)
        return fields
