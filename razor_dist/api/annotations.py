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

# The line that begins a document in messages of the page, `razor-dist prefill` and /v1/messages.
_DOCUMENT = re.compile(r'(?:\A|\n\n)Document (".+"):\n\n')

# Of a document: the index of its message, its first character there, and its title.
Title = tuple[int | None, int, str]


def titles(text: PromptText | None) -> list[Title]:
    """Return the titles of the documents in a prompt's messages."""
    return [
        (part.message, found.end(), _unquoted(found[1]))
        for part in (text.parts if text is not None else ())
        for found in _DOCUMENT.finditer(part.text)
    ]


def _unquoted(title: str) -> str:
    """Return the text of a quoted title; some clients quote without JSON's escapes."""
    try:
        return str(json.loads(title))
    except ValueError:
        return title[1:-1]


class SentencePlaces:
    """Selects the sentences of an answer that are at the same characters of the client's text.

    The text lacks the answer's calls of tools, and may have special tokens that the answer lacks.
    Behind the first of either, characters of the answer are not those of the text.
    """

    def __init__(self) -> None:
        self._same = sys.maxsize  # characters at the beginning that answer and text share
        self._has_ended = False
        self._waiting: list[AnswerSentence] = []

    def differ(self, at: int) -> None:
        """Note that answer and text may differ from character ``at`` on."""
        self._same = min(self._same, at)

    def end(self, *, alike: bool) -> None:
        """Note that the answer has ended; ``alike`` if all of it is text after all."""
        self._same = sys.maxsize if alike else self._same
        self._has_ended = True

    def kept(self, sentences: Iterable[AnswerSentence], length: int) -> list[AnswerSentence]:
        """Return the sentences, waiting or new, that are now in the text.

        The text has ``length`` characters so far. A sentence that ends behind them, or where
        answer and text may differ, waits. At the end it is cut to the characters that they share.
        """
        found, self._waiting = [*self._waiting, *sentences], []
        if self._has_ended:
            cut = (replace(one, end=min(one.end, self._same)) for one in found)
            return [one for one in cut if one.start < one.end]
        end = min(self._same, length)
        self._waiting = [one for one in found if one.end > end]
        return [one for one in found if one.end <= end]


def citations(sentences: Iterable[AnswerSentence], titles: Sequence[Title]) -> list[dict[str, Any]]:
    """Return the fields of a ``url_citation`` for each source that a sentence cites.

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
