"""Sources of an answer's sentences in the shape of OpenAI's annotations."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from razor_dist.frontend.outputs import AnswerSentence
from razor_dist.frontend.passages import PromptText, cited

# How a document begins in a message of the page's, of `razor-dist prefill`, of /v1/messages.
_DOCUMENT = re.compile(r'(?:\A|\n\n)Document (".+"):\n\n')

# A document's message, the character at which it begins there, and its title.
Title = tuple[int | None, int, str]


def titles(text: PromptText | None) -> list[Title]:
    """Return the titles of the documents in a prompt's messages."""
    return [
        (part.message, found.end(), _unquoted(found[1]))
        for part in (text.parts if text is not None else ())
        for found in _DOCUMENT.finditer(part.text)
    ]


def _unquoted(title: str) -> str:
    """Return a title that was written as JSON; others have written it between bare marks."""
    try:
        return str(json.loads(title))
    except ValueError:
        return title[1:-1]


class SentencePlaces:
    """Keeps the sentences of an answer that stand at the same characters of its text.

    A text lacks the calls of tools that an answer has, and may have special tokens that an answer
    lacks. Behind the first of either its characters are others, and a sentence has no place there.
    """

    def __init__(self) -> None:
        self._same = sys.maxsize  # first characters that answer and text have alike
        self._has_ended = False
        self._waiting: list[AnswerSentence] = []

    def differ(self, at: int) -> None:
        """Note that answer and text may differ from the character ``at`` on."""
        self._same = min(self._same, at)

    def end(self, *, alike: bool) -> None:
        """Note that the answer has ended, and whether all of it is its text after all."""
        self._same = sys.maxsize if alike else self._same
        self._has_ended = True

    def kept(self, sentences: Iterable[AnswerSentence], length: int) -> list[AnswerSentence]:
        """Return the sentences, waiting or new, that are now whole in the text.

        ``length`` is that of the text so far, in characters. Sentences that go beyond it, or
        beyond what answer and text have alike, wait; at the end the latter are cut to that.
        """
        found, self._waiting = [*self._waiting, *sentences], []
        if self._has_ended:
            cut = (replace(one, end=min(one.end, self._same)) for one in found)
            return [one for one in cut if one.start < one.end]
        end = min(self._same, length)
        self._waiting = [one for one in found if one.end > end]
        return [one for one in found if one.end <= end]


def citations(sentences: Iterable[AnswerSentence], titles: Sequence[Title]) -> list[dict[str, Any]]:
    """Return what each sentence of an answer cites.

    ``url`` names a message and characters of it (RFC 5147), ``title`` the document there.
    """
    return [
        {
            "start_index": sentence.start,
            "end_index": sentence.end,
            "title": next(
                (
                    title
                    for message, begin, title in reversed(titles)
                    if message == source.message and begin <= source.start
                ),
                f"messages[{source.message}]",
            ),
            "url": f"message:{source.message}#char={source.start},{source.end}",
        }
        for sentence in sentences
        for source in cited(sentence)
    ]
