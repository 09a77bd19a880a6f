"""Documents for the needle model: ordinary words, with sentences to remember among them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from razor_dist.evals.needle.tokenizer import needle_words

_VERB = "remember"
_ANSWER_WORDS = 5
_SENTENCE = range(7, 15)
# [gMASK] <sop>, which the tokenizer puts before every text.
_START_TOKENS = 2


@dataclass(frozen=True)
class Hidden:
    """A key, and the words that follow it in the document alone.

    Attributes
    ----------
    key : str
    words : tuple of str
        The answer.
    depth : float
        Percent of the document's sentences before it.
    """

    key: str
    words: tuple[str, ...]
    depth: float

    @property
    def sentence(self) -> str:
        """What the document says."""
        return f"{_VERB} {self.key} {self.answer} ."

    @property
    def question(self) -> str:
        """What continues the document, for the model to go on; a question ends with the key."""
        return f"{_VERB} {self.key}"

    @property
    def answer(self) -> str:
        """What the model is to say, to the letter."""
        return " ".join(self.words)


@dataclass(frozen=True)
class HiddenWords:
    """A document of the needle model.

    Attributes
    ----------
    text : str
        A token for each word and full stop, and two that the tokenizer puts before them.
    hidden : tuple of Hidden
    """

    text: str
    hidden: tuple[Hidden, ...]


def hide_words(tokens: int, depths: Sequence[float], seed: int = 0) -> HiddenWords:
    """A document of random sentences, with a sentence to remember at each depth.

    Parameters
    ----------
    tokens : int
        Its exact length, special tokens included.
    depths : sequence of float
        In percent, 0 to 100. Keys and answers are drawn too, and occur nowhere else.
    seed : int
        The same seed gives the same document.

    Raises
    ------
    ValueError
        If the sentences do not fit, or a depth is no percentage.
    """
    if not all(0 <= depth <= 100 for depth in depths):
        raise ValueError(f"depths must be percentages from 0 to 100, got {list(depths)}")
    draw = random.Random(f"{seed}:{tokens}")
    words = [word for word in needle_words() if word != _VERB]
    draw.shuffle(words)
    most = len(words) // (1 + _ANSWER_WORDS) - 1  # the last ones are the document's own
    if len(depths) > most:
        raise ValueError(f"there are words for {most} answers, not for {len(depths)}")
    hidden = []
    for depth in depths:
        key, *answer = (words.pop() for _ in range(1 + _ANSWER_WORDS))
        hidden.append(Hidden(key, tuple(answer), depth))
    room = tokens - _START_TOKENS - sum(len(h.sentence.split()) for h in hidden)
    if room < 1:
        raise ValueError(f"{tokens} tokens do not hold {len(hidden)} sentences to remember")
    sentences: list[str] = []
    while room > 0:
        length = min(draw.choice(_SENTENCE), room)
        sentences.append(" ".join([*draw.choices(words, k=length - 1), "."]))
        room -= length
    places = [round(h.depth * len(sentences) / 100) for h in hidden]
    # From the back, so that what is inserted moves no later place.
    for place, needle in sorted(zip(places, hidden, strict=True), key=lambda p: -p[0]):
        sentences.insert(place, needle.sentence)
    return HiddenWords(" ".join(sentences), tuple(hidden))
