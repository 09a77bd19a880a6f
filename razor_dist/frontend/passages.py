"""From positions of a prompt's tokens to passages of its text: where an answer came from.

The engine tells, for each token of an answer, which positions its strongest retrieval heads attend
to. Here these are added up, the template's, the question's and the answer's own are left out, and
those in one sentence become a passage, in characters of the text as it was sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from razor_dist.engine.messages import Tokens
from razor_dist.frontend.outputs import Source

# A sequence's first tokens, to which heads attend when they have nothing to look for.
SINKS = 4
_END, _CLOSING = ".!?\u3002\uff01\uff1f", "\"')\\]\u2019\u201d\u00bb"
# Where a sentence ends, in a group, and the space after it. A line that goes on with a small letter
# is a wrapped one.
_BREAK = re.compile(
    rf"([.!?][{_CLOSING}]*)\s+(?![a-z])|([\u3002\uff01\uff1f][{_CLOSING}]*)\s*"
    r"|\s*\n\s*\n\s*|\s*\n(?!\s*[a-z])\s*"
)
_LONGEST = 1000  # characters of a sentence on each side of a token
_PARAGRAPH = re.compile(r"\n\s*\n")
_QUESTION = 500  # characters of a paragraph that is taken for a question as a whole
_CUE = re.compile(rf"[^{_END}\n]*:[^{_END}\n]*\s*")  # begins the answer
# Tokens of a prompt without a text that are one passage: no further apart than this.
_NEAR = 16


class Part(NamedTuple):
    """A text that was sent, within the text that was tokenised."""

    text: str
    begin: int  # of the text in the whole, in characters
    searched: int  # its characters before the question, which may be a source
    message: int | None = None  # in a conversation, its index


@dataclass(frozen=True)
class PromptText:
    """A prompt's text and where its tokens end in it, for a request that asks for sources."""

    parts: Sequence[Part]
    ends: npt.NDArray[np.int32]  # [n], characters of the whole; 0 for a token without text

    def locate(self, position: int) -> tuple[int, int] | None:
        """Return the part and its character at which a token ends; None outside all parts."""
        if position >= len(self.ends):
            return None
        at = int(self.ends[position]) - 1
        for index, part in enumerate(self.parts):
            if 0 <= at - part.begin < part.searched:
                return index, at - part.begin
        return None

    def to_wire(self) -> list[Any]:
        """Return what a message between processes can hold, for `from_wire`."""
        return [[list(part) for part in self.parts], self.ends.tobytes()]

    @classmethod
    def from_wire(cls, value: Sequence[Any]) -> PromptText:
        parts, ends = value
        return cls([Part(*part) for part in parts], np.frombuffer(ends, np.int32))


@dataclass
class Trace:
    """What an answer's tokens attended to, added up; of a prompt of token ids without ``text``."""

    prompt: Tokens
    text: PromptText | None
    tokenizer: PreTrainedTokenizerBase | None
    most: int  # sources to return
    weights: dict[int, float] = field(default_factory=dict)  # by position
    tokens: int = 0

    def add(self, pairs: Iterable[tuple[int, float]]) -> None:
        """Add what one token's message tells; the first token's tells nothing."""
        told = False
        for position, weight in pairs:
            self.weights[position] = self.weights.get(position, 0.0) + weight
            told = True
        self.tokens += told

    def sources(self) -> tuple[list[Source], float | None]:
        """Return the sources, heaviest first, and how well they ground the answer."""
        if not self.tokens:
            return [], None
        found = self._token_passages() if self.text is None else self._passages(self.text)
        found = [replace(source, weight=source.weight / self.tokens) for source in found]
        return found[: self.most], found[0].weight if found else 0.0

    def _passages(self, text: PromptText) -> list[Source]:
        found: dict[tuple[int, int, int], float] = {}
        for position, weight in self.weights.items():
            place = text.locate(position) if position >= SINKS else None
            if place is not None:
                index, at = place
                part = text.parts[index]
                key = (index, *sentence_around(part.text, at, part.searched))
                found[key] = found.get(key, 0.0) + weight
        ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))
        return [
            Source(begin, end, weight, text.parts[index].text[begin:end], text.parts[index].message)
            for (index, begin, end), weight in ordered
        ]

    def _token_passages(self) -> list[Source]:
        """Return runs of near positions, counted in tokens."""
        runs: list[list[int]] = []
        for position in sorted(self.weights):
            if SINKS <= position < len(self.prompt):
                if runs and position - runs[-1][-1] <= _NEAR:
                    runs[-1].append(position)
                else:
                    runs.append([position])
        found = []
        for run in runs:
            own = self.prompt[run[0] : run[-1] + 1].tolist()
            text = None if self.tokenizer is None else str(self.tokenizer.decode(own))
            weight = sum(self.weights[position] for position in run)
            found.append(Source(run[0], run[-1] + 1, weight, text))
        return sorted(found, key=lambda source: (-source.weight, source.start))


def conversation_parts(
    text: str, marked: str, marks: Mapping[int, str], contents: Mapping[int, str], asking: int
) -> list[Part]:
    """Find the messages' contents in a conversation's text.

    ``marked`` is that text with a mark for each content, by the message's index. A template may
    strip a content, or leave it out. The message ``asking`` ends with the question.
    """
    parts, at, before = [], 0, 0  # up to where both texts are read
    for index, content in contents.items():
        where = marked.find(marks[index], before)
        if where < 0:
            continue
        begin, inner = at + where - before, content.strip()
        if not text.startswith(content, begin):
            content_begin = text.find(inner, begin)
            if content_begin < 0:
                continue
            end = content_begin + len(inner)
            begin = content_begin - (len(content) - len(content.lstrip()))
        else:
            end = begin + len(content)
        at, before = end, where + len(marks[index])
        searched = question_begin(content) if index == asking else len(content)
        parts.append(Part(content, begin, searched, index))
    return parts


def question_begin(text: str) -> int:
    """Return where a prompt's own question begins: its last paragraph, or a long one's sentence.

    What is before a cue such as "Answer:" belongs to it.
    """
    end = len(text.rstrip())
    first = max(0, end - _QUESTION)
    for pattern in (_PARAGRAPH, _BREAK):
        begins = [first + m.end() for m in pattern.finditer(text[first:end])]
        begins = [0, *begins] if first == 0 else begins
        last = end
        while len(begins) > 1 and _CUE.fullmatch(text[begins[-1] : last]):
            last = begins.pop()
        if begins:
            return begins[-1]
    return first


def sentence_around(text: str, at: int, end: int) -> tuple[int, int]:
    """Return the sentence around a character; ``end`` is that of what may be a source."""
    first = max(0, at - _LONGEST)
    window = text[first : min(end, at + _LONGEST)]
    begin, stop = first, first + len(window)
    for found in _BREAK.finditer(window):
        # White space that a token begins or ends with is that of the sentence before.
        if first + found.end() <= at:
            begin = first + found.end()
        else:
            stop = first + (found.end(found.lastindex) if found.lastindex else found.start())
            break
    return begin, max(stop, begin + 1)
