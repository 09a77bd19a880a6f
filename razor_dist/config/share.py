"""The setting ``retrieval_share``: a part of a query's attention, written as 1/32 or 0.03125."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator

from razor_dist.config.validation import SettingError

_NAME = "retrieval_share"


def share_of(value: Any) -> float:
    """Read a number from 0 to below 1, or a fraction; `SettingError` for anything else."""
    try:
        found = -1.0 if isinstance(value, bool) else float(Fraction(str(value)))
    except (ValueError, ZeroDivisionError):
        found = -1.0
    if not 0 <= found < 1:
        raise SettingError(
            f"{_NAME} must be a number between 0 and 1, such as 1/32, got {value!r:.80}", _NAME
        )
    return found


Share = Annotated[float, BeforeValidator(share_of)]
