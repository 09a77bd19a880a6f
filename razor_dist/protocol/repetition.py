"""Answers that repeat themselves without end: what counts as such a loop, and how it is found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from razor_dist.config.errors import RequestError
from razor_dist.config.validation import STRICT, explained, made

FIELD = "repetition_detection"
# The cost of a token grows with the longest pattern: 3 µs for 200, 5 µs for this one.
LONGEST_PATTERN = 2048
_MOST = 2**31
_Size = Annotated[int, Field(ge=0, le=LONGEST_PATTERN)]


@explained(FIELD, RequestError)
@dataclass(frozen=True, config=STRICT)
class RepetitionDetectionParams:
    """An answer ends once its last tokens are one pattern again and again; vLLM's names."""

    max_pattern_size: Annotated[
        _Size, Field(description="Tokens of the longest pattern; 0 finds nothing.")
    ] = 0
    min_pattern_size: Annotated[_Size, Field(description="Tokens of the shortest; 0 is 1.")] = 0
    min_count: Annotated[
        int, Field(ge=2, le=_MOST, description="Times that it is there, one after the other.")
    ] = 4
    # vLLM has no such field.
    min_length: Annotated[
        int, Field(ge=0, le=_MOST, description="Tokens that these are together.")
    ] = 0

    def __post_init__(self) -> None:
        if self.max_pattern_size and self.min_pattern_size > self.max_pattern_size:
            raise ValueError(
                f"min_pattern_size ({self.min_pattern_size}) must be at most "
                f"max_pattern_size ({self.max_pattern_size})"
            )

    @classmethod
    def of(cls, value: object) -> RepetitionDetectionParams | None:
        """Make them of a request's field; `RequestError` if it is wrong."""
        return made(cls, value, FIELD, RequestError)

    def first_loop(self, tokens: Sequence[int]) -> int | None:
        """Tokens after which an answer ends in a loop; None if it does not."""
        detector = RepetitionDetector(self)
        return next((at for at, token in enumerate(tokens, 1) if detector.push(token)), None)

    def once(self, tokens: Sequence[int]) -> int:
        """Tokens up to which a loop's pattern stands once; all of them if there is no loop."""
        detector = RepetitionDetector(self)
        for at, token in enumerate(tokens, 1):
            if detector.push(token):
                return at - detector.repeated
        return len(tokens)


# Found in answers of the embedded model were patterns of 1 to 90 tokens. What is lawful and repeats
# (a line of a table, a chorus, a sentence that is asked for thirty times) is shorter than this.
LOOPS = RepetitionDetectionParams(max_pattern_size=200, min_count=4, min_length=256)


class RepetitionDetector:
    """Finds a pattern at the end of an answer, token by token, in the same time for each.

    Tokens repeat with period p for as long as each is the one p before it: the detector counts for
    every p how many of the last tokens are so. A pattern of p tokens that is there k times in a row
    is a run of (k − 1)·p such tokens.
    """

    def __init__(self, params: RepetitionDetectionParams) -> None:
        self._shortest = max(1, params.min_pattern_size)
        periods = np.arange(self._shortest, params.max_pattern_size + 1)
        self._needed = np.maximum(periods * params.min_count, params.min_length) - periods
        self._runs = np.zeros(len(periods), np.int64)
        # The last tokens are those before `_end`; the room behind is for the next ones.
        self._span = params.max_pattern_size
        self._tokens = np.full(2 * self._span + 1, -1, np.int64)
        self._end = self._span

    def push(self, token: int) -> bool:
        """Add the next token; True if the answer now ends in a loop."""
        if self._end == len(self._tokens):
            self._tokens[: self._span] = self._tokens[-self._span :]
            self._end = self._span
        last = self._tokens[self._end - self._span : self._end + 1 - self._shortest]
        self._runs += 1
        self._runs *= last[::-1] == token
        self._tokens[self._end] = token
        self._end += 1
        return self.repeated > 0

    @property
    def repeated(self) -> int:
        """Tokens at the end of a loop that repeat those before them; 0 if there is no loop."""
        return int(self._runs[self._runs >= self._needed].max(initial=0))
