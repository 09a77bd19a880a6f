"""The setting ``speculative_config``: how drafts are made, with vLLM's names."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from razor_dist.config.validation import STRICT, explained, object_setting

_NAME = "speculative_config"
_Alike = Annotated[int | None, Field(ge=1, le=64)]


@explained(_NAME)
@dataclass(frozen=True, config=STRICT)
class SpeculativeConfig:
    """Drafts of tokens that may follow an answer's last token, verified in one step.

    ``method``                  lookup: the tokens behind an earlier occurrence of the last tokens,
                                while drafts pay; ngram: vLLM's method, a draft at each match
    ``num_speculative_tokens``  most tokens of a draft; drafts have 1, 3, 7, 15, 31 or 63 tokens
    ``prompt_lookup_min``       fewest tokens that must match; none: 2, or
                                ``prompt_lookup_max`` if that is less; for ngram 5
    ``prompt_lookup_max``       most tokens that are compared; none: 16; for ngram
                                ``prompt_lookup_min``

    Raises `SettingError` for a value of the wrong type or out of range.
    """

    method: Literal["lookup", "ngram"] = "lookup"
    num_speculative_tokens: Annotated[int, Field(ge=1, le=63)] = 7
    prompt_lookup_min: _Alike = None
    prompt_lookup_max: _Alike = None

    def __post_init__(self) -> None:
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if least is not None and most is not None and least > most:
            raise ValueError(
                f"prompt_lookup_min ({least}) must not be above prompt_lookup_max ({most})"
            )

    @classmethod
    def of(cls, value: object) -> SpeculativeConfig | Literal["auto"] | None:
        """Make one of a setting's value: a mapping of these fields, that as JSON, auto or none."""
        return "auto" if value == "auto" else object_setting(cls, _NAME, value, "auto or none")

    @property
    def longest_draft(self) -> int:
        """Tokens of the longest draft: one less than a power of two, a run with the last token."""
        return (1 << (self.num_speculative_tokens + 1).bit_length() - 1) - 1

    @property
    def lookup_min(self) -> int:
        usual = 5 if self.method == "ngram" else 2
        if self.prompt_lookup_min is None and self.prompt_lookup_max is not None:
            return self.prompt_lookup_max if self.method == "ngram" else min(usual, self.lookup_max)
        return self.prompt_lookup_min or usual

    @property
    def lookup_max(self) -> int:
        if self.prompt_lookup_max is not None:
            return self.prompt_lookup_max
        return self.lookup_min if self.method == "ngram" else max(16, self.lookup_min)
