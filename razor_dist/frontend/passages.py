"""From positions of a prompt's tokens to passages of its text: where an answer came from.

For each token of an answer the engine reports the positions to which its strongest retrieval heads
attend. Positions of the template, the question and the answer are no sources. The attention to the
others is added up by sentence: a passage, in characters of the text as it was sent.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from razor_dist.frontend.outputs import AnswerSentence, Source
from razor_dist.protocol.messages import Tokens

# A sequence's first tokens are no sources: heads attend to them when they look for nothing.
SINKS = 4
_END, _CLOSING = ".!?\u3002\uff01\uff1f", "\"')\\]\u2019\u201d\u00bb"
# The end of a sentence, in a group, and the space after it. A point before a small letter may be
# an abbreviation's, unless it follows a longer word or a space. A line break before a small letter
# is a wrapped line's. No match begins within white space, so that a run of it is tried once.
_BREAK = re.compile(
    rf"((?<=[^\W\d_]{{4}})[.!?][{_CLOSING}]*|(?<=\s)[.!?]"
    rf"|[.!?][{_CLOSING}]*(?=\s+[^\sa-z]))\s+"
    rf"|([\u3002\uff01\uff1f][{_CLOSING}]*)\s*|(?<!\s)\s*\n(?:\s*\n|(?!\s*[a-z]))\s*"
)
# A sentence ends at most this far on each side of a token: bounds the search in text without ends.
_SIDE_CHARACTERS = 1000
_PARAGRAPH = re.compile(r"\n\s*\n")
_LINE = re.compile(r"\n(?!\s*[a-z])")
# A last paragraph up to this length is the question as a whole; of a longer one its end is.
_QUESTION_CHARACTERS = 500
_CUE = re.compile(rf"[^{_END}\n]*:[^{_END}\n]*\s*")  # such as "Answer:" behind the question
# An answer that is less grounded has no sources: measured, docs/sources.md.
FOUND = 0.3
# A sentence's passages of at least this weight are cited, so at most `MOST_CITED`.
CITED, MOST_CITED = 0.1, 10
# A sentence that is less grounded cites nothing: it has fewer tokens than an answer, and invented
# sentences are grounded by up to 0.37 (docs/sources.md).
SURE = 0.4
# In a prompt of token ids, positions no further apart than this are one passage.
_NEAR_TOKENS = 16
_WORD = re.compile(r"\w+")
# A word that is in the prompt more often names nothing, and finding all its places takes long.
_COMMON = 100
# Average length of a sentence, to estimate the number of sentences.
_SENTENCE_CHARACTERS = 100


# A passage: its part (-1 for token ids), begin and end. `_NOWHERE` is for positions of no source.
PassagePlace = tuple[int, int, int]
_NOWHERE: PassagePlace = (-1, -1, -1)


class Part(NamedTuple):
    """A text that was sent, such as a message's content, within the text that was tokenised."""

    text: str
    begin: int  # character of the tokenised text
    searched: int  # characters of ``text`` before the question: they may be a source
    message: int | None = None  # the message's index in a conversation


@dataclass(frozen=True)
class PromptText:
    """A prompt's text and where its tokens end, for a request that asks for sources."""

    parts: Sequence[Part]
    ends: npt.NDArray[np.int32]  # [n], characters of the tokenised text; 0: a token without text

    def passage(self, position: int) -> PassagePlace:
        """Return the sentence in which a token ends; `_NOWHERE` outside all parts."""
        index = int(self._part_of[position])
        if index < 0:
            return _NOWHERE
        part = self.parts[index]
        at = int(self.ends[position]) - 1 - part.begin
        return index, *sentence_around(part.text, at, part.searched)

    @cached_property
    def _part_of(self) -> npt.NDArray[np.int32]:
        """[n], the first part in which each token ends; -1 outside all parts."""
        # By character. Tokens without text end at 0 and so look up the last entry: it stays -1.
        found = np.full(self.ends.max(initial=0) + 1, -1, np.int32)
        # If a template has stripped the space between parts, they overlap.
        for index, part in reversed([*enumerate(self.parts)]):
            found[max(0, part.begin) : max(0, part.begin + part.searched)] = index
        found[-1] = -1
        return found[self.ends - 1]

    def question_match(self, source: Source) -> float | None:
        """Return how well a passage has the question's words, in [0, 1]: 1 for the best passage.

        None if no passage has a rare word of the question.
        """
        weights, best = self._asked
        if not weights:
            return None
        own = sum(weights.get(word, 0.0) for word in sorted(_words(source.text or "")))
        return min(1.0, own / best)

    @cached_property
    def _asked(self) -> tuple[Mapping[str, float], float]:
        """The question's words with their weights, and the largest sum of weights in one passage.

        A word that n of N passages have weighs ``log(1 + (N - n + 0.5) / (n + 0.5))``, BM25's
        inverse document frequency.
        """
        words = {word for part in self.parts for word in _words(part.text[part.searched :])}
        count = sum(part.searched for part in self.parts) / _SENTENCE_CHARACTERS
        texts = [part.text[: part.searched] for part in self.parts]
        small = [(text, text.lower()) for text in texts]
        weights: dict[str, float] = {}
        sums: defaultdict[tuple[int, int, int], float] = defaultdict(float)
        for word in sorted(words):
            # A text whose length changes in small letters is searched as it is.
            found = [_places(word, low if len(low) == len(text) else text) for text, low in small]
            if not 0 < sum(map(len, found)) < _COMMON:
                continue
            own = {
                (index, *sentence_around(texts[index], at, len(texts[index])))
                for index, places in enumerate(found)
                for at in places
            }
            rest = max(0.0, count - len(own))
            weights[word] = math.log(1 + (rest + 0.5) / (len(own) + 0.5))
            for passage in own:
                sums[passage] += weights[word]
        return weights, max(sums.values(), default=0.0)


@dataclass
class Trace:
    """Positions to which an answer's tokens attended."""

    prompt: Tokens
    text: PromptText | None  # None for a prompt of token ids
    tokenizer: PreTrainedTokenizerBase | None
    most: int  # sources to return
    least: float = FOUND  # an answer that is less grounded has no sources
    # For each token: positions, and the strongest heads' mean attention to each; empty for the
    # first token.
    tokens: list[Sequence[tuple[int, float]]] = field(default_factory=list)
    answer: str = ""  # so far
    _begins: list[int] = field(default_factory=list, init=False)  # characters where tokens begin
    _reported: int = field(default=0, init=False)  # character where the last sentence ended

    def add(self, pairs: Sequence[tuple[int, float]], begin: int = 0, text: str = "") -> None:
        """Add a token: its attention, the character where it begins, and its certain ``text``."""
        self.tokens.append(pairs)
        self._begins.append(begin)
        self.answer += text

    def sources(self) -> tuple[list[Source], float | None]:
        """Return the sources, heaviest first, and how well they ground the answer.

        Weights and groundedness are shares of the attention outside positions of no source.
        """
        return self._sum(self.tokens)

    def whole(self) -> tuple[list[Source], float | None, float | None]:
        """Return `sources`, and the heaviest source's `PromptText.question_match`."""
        sources, grounded = self.sources()
        match = None
        if self.text is not None and sources:
            match = self.text.question_match(sources[0])
        return sources, grounded, match

    def ended(self, *, last: bool = False) -> list[tuple[int, int]]:
        """Return the sentences that have ended since the last call; with ``last`` all the rest."""
        rest = self.answer[self._reported :]
        spans = [(self._reported + begin, self._reported + end) for begin, end in sentences(rest)]
        spans = spans if last else spans[:-1]
        self._reported = max([self._reported, *(end for _, end in spans)])
        return spans

    def sentences(self, spans: Sequence[tuple[int, int]]) -> list[AnswerSentence]:
        """Return sentences of the answer, each with the sources of the tokens in it.

        A token is in a sentence if one of its characters is.
        """
        found = []
        for begin, end in spans:
            # Only tokens from ``first`` to ``last`` can be in it: an answer has thousands.
            first = max(0, bisect_right(self._begins, begin) - 1)
            last = bisect_left(self._begins, end)
            bounds = pairwise([*self._begins[first : last + 1], len(self.answer)])
            tokens = [
                pairs
                for pairs, (start, stop) in zip(self.tokens[first:last], bounds, strict=False)
                if max(start, begin) < min(stop, end)
            ]
            found.append(AnswerSentence(begin, end, *self._sum(tokens)))
        return found

    def _sum(
        self, tokens: Sequence[Sequence[tuple[int, float]]]
    ) -> tuple[list[Source], float | None]:
        places = self._places(tokens)
        found: defaultdict[PassagePlace, float] = defaultdict(float)
        looked_up = grounded = 0.0
        for pairs in filter(None, tokens):
            own: defaultdict[PassagePlace, float] = defaultdict(float)
            for position, weight in pairs:
                own[places[position]] += weight
            looked_up += max(0.0, 1.0 - own.pop(_NOWHERE, 0.0))
            grounded += max(own.values(), default=0.0)
            for place, weight in own.items():
                found[place] += weight
        if not looked_up:
            return [], 0.0 if any(tokens) else None
        ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))[: self.most]
        if grounded < self.least * looked_up:
            return [], grounded / looked_up
        sources = [self._source(at, weight / looked_up) for at, weight in ordered]
        return sources, grounded / looked_up

    def _places(self, tokens: Sequence[Sequence[tuple[int, float]]]) -> dict[int, PassagePlace]:
        """Return each position's passage, or `_NOWHERE`."""
        every = {position for pairs in tokens for position, _ in pairs}
        places = dict.fromkeys(every, _NOWHERE)
        mine = sorted(at for at in places if SINKS <= at < len(self.prompt))
        if self.text is not None:
            return places | {at: self.text.passage(at) for at in mine}
        cuts = [n for n, at in enumerate(mine) if not n or at - mine[n - 1] > _NEAR_TOKENS]
        for first, following in pairwise([*cuts, len(mine)]):
            run = mine[first:following]
            places |= dict.fromkeys(run, (-1, run[0], run[-1] + 1))
        return places

    def _source(self, place: PassagePlace, weight: float) -> Source:
        index, begin, end = place
        if self.text is not None:
            part = self.text.parts[index]
            return Source(begin, end, weight, part.text[begin:end], part.message)
        own = self.prompt[begin:end].tolist()
        text = None if self.tokenizer is None else str(self.tokenizer.decode(own))
        return Source(begin, end, weight, text)


def cited(sentence: AnswerSentence) -> list[Source]:
    """Return the sources that an answer's sentence cites, heaviest first."""
    if (sentence.grounded or 0.0) < SURE:
        return []
    return [source for source in sentence.sources if source.weight >= CITED]


def conversation_parts(
    text: str, marked: str, marks: Mapping[int, str], contents: Mapping[int, str], asking: int
) -> list[Part]:
    """Return the messages' contents in a conversation's ``text``, in which a template put them.

    ``marked`` is the same conversation with a mark from ``marks`` for each content. Templates may
    strip contents or leave them out. The message ``asking`` ends with the question.
    """
    parts, at, before = [], 0, 0  # characters of ``text`` and ``marked`` that are read
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
    """Return the character at which the question in a prompt begins.

    The question is the last paragraph, or a long paragraph's last line, or a long line's last
    sentence. A cue such as "Answer:" behind it belongs to it.
    """
    end = len(text.rstrip())
    first = max(0, end - _QUESTION_CHARACTERS)
    for pattern in (_PARAGRAPH, _LINE, _BREAK):
        begins = [first + m.end() for m in pattern.finditer(text[first:end])]
        begins = [0, *begins] if first == 0 else begins
        last = end
        while begins and _CUE.fullmatch(text[begins[-1] : last]):
            last = begins.pop()
        if begins:
            return begins[-1]
    return first


def sentence_around(text: str, at: int, end: int) -> tuple[int, int]:
    """Return begin and end of the sentence around the character ``at``, up to ``end``."""
    first = max(0, at - _SIDE_CHARACTERS)
    window = text[first : min(end, at + _SIDE_CHARACTERS)]
    begin, stop = first, first + len(window)
    for found in _BREAK.finditer(window):
        # White space behind a sentence belongs to it.
        if first + found.end() <= at:
            begin = first + found.end()
        else:
            stop = first + (found.end(found.lastindex) if found.lastindex else found.start())
            break
    return begin, max(stop, begin + 1)


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower()))


def _places(word: str, text: str) -> list[int]:
    """Return the first `_COMMON` places where a text has a whole word."""
    found: list[int] = []
    at = text.find(word)
    while at >= 0 and len(found) < _COMMON:
        end = at + len(word)
        if not (_WORD.match(text[max(0, at - 1) : at]) or _WORD.match(text[end : end + 1])):
            found.append(at)
        at = text.find(word, end)
    return found


def sentences(text: str) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each sentence of a text, without the space between them."""
    at, end = len(text) - len(text.lstrip()), len(text.rstrip())
    while at < end:
        _, stop = sentence_around(text, at, end)
        yield at, stop
        at = stop + len(text[stop:]) - len(text[stop:].lstrip())
