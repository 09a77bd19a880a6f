"""Haystacks: long texts with sentences hidden in them, as token ids."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from razor_dist.config.errors import ConfigError
from razor_dist.documents.corpus import fingerprint, haystack_paragraphs, sentences_of
from razor_dist.evals.needle.facts import Fact, word_fact
from razor_dist.evals.needle.tokenizer import needle_words

Encode = Callable[[str], list[int]]

_ANSWER_WORDS = 5
_SENTENCE = range(7, 15)
# [gMASK] <sop>, which the needle model's tokenizer puts before every text.
_START_TOKENS = 2


class Haystack:
    """Sentences of a corpus, to hide others among.

    Parameters
    ----------
    name : str
    paragraphs : sequence of str
        Prose, in reading order.
    encode : callable
        Text to token ids, without special tokens.
    repeat : bool
        Begin anew where the text ends, so that no document is too long for it.
    """

    def __init__(
        self, name: str, paragraphs: Sequence[str], encode: Encode, *, repeat: bool = False
    ) -> None:
        self.name = name
        self.fingerprint = fingerprint(paragraphs)
        self._encode = encode
        self._repeat = repeat
        # Sentences are tokenised one by one, so that a needle between two changes neither.
        self._sentences = [
            encode((" " if index else "\n\n") + sentence)
            for paragraph in paragraphs
            for index, sentence in enumerate(sentences_of(paragraph))
        ]

    def hide(
        self, length: int, sentences: Sequence[tuple[str, float]], seed: int
    ) -> tuple[list[int], list[int]]:
        """Hide sentences at the sentence ends nearest their depths.

        Parameters
        ----------
        length : int
            Tokens of the document, the hidden sentences included.
        sentences : sequence of (str, float)
            Each with its depth in percent. Two of one depth stand next to each other, in this
            order.
        seed : int
            Chooses the sentence that the document begins with.

        Returns
        -------
        ids : list of int
            ``length`` tokens.
        positions : list of int
            Where in ``ids`` each hidden sentence begins.

        Raises
        ------
        ConfigError
            If the sentences do not fit, or the text is too short.
        """
        hidden = [self._encode(" " + sentence) for sentence, _ in sentences]
        filler = self._filler(length - sum(map(len, hidden)), seed)
        ends = [0]
        for sentence in filler:
            ends.append(ends[-1] + len(sentence))
        slots = [_nearest(ends, depth * ends[-1] / 100) for _, depth in sentences]
        ids: list[int] = []
        positions = [0] * len(hidden)
        for slot in range(len(ends)):
            for index, own in enumerate(hidden):
                if slots[index] == slot:
                    positions[index] = len(ids)
                    ids += own
            if slot < len(filler):
                ids += filler[slot]
        return ids, positions

    def _filler(self, length: int, seed: int) -> list[list[int]]:
        """Return consecutive sentences of ``length`` tokens, the last cut short by a full stop."""
        if length < 1:
            raise ConfigError("the document is too short for its needles")
        total = sum(map(len, self._sentences))
        if total < length and not self._repeat:
            raise ConfigError(f"the haystack {self.name} has {total} tokens, {length} are needed")
        index = random.Random(seed).randrange(len(self._sentences))
        filler: list[list[int]] = []
        while length > 0:
            sentence = self._sentences[index % len(self._sentences)]
            if len(sentence) > length:
                sentence = (sentence[: length - 1] + self._encode("."))[-length:]
            filler.append(sentence)
            length -= len(sentence)
            index += 1
        return filler


def _nearest(ends: list[int], position: float) -> int:
    return min(range(len(ends)), key=lambda slot: abs(ends[slot] - position))


def open_haystack(name: str, encode: Encode, *, repeat: bool = False) -> Haystack:
    """Open the haystack of a corpus (`haystack_paragraphs`); noise always repeats itself.

    Raises
    ------
    ConfigError
        If the text is missing.
    """
    name, paragraphs = haystack_paragraphs(name)
    return Haystack(name, paragraphs, encode, repeat=repeat or name == "noise")


def hide_words(tokens: int, depths: Sequence[float], seed: int = 0) -> tuple[str, list[Fact]]:
    """Write a document for the needle model: random words, with sentences to remember.

    Parameters
    ----------
    tokens : int
        Its exact length, special tokens included.
    depths : sequence of float
        In percent of the document's sentences. Keys and answers are drawn too, and occur nowhere
        else.
    seed : int
        The same seed gives the same document.

    Returns
    -------
    text : str
        A token for each word and full stop, and two that the tokenizer puts before them.
    facts : list of Fact
        One for each depth.

    Raises
    ------
    ConfigError
        If the sentences do not fit, or a depth is no percentage.
    """
    if not all(0 <= depth <= 100 for depth in depths):
        raise ConfigError(f"depths must be percents from 0 to 100, got {list(depths)}")
    draw = random.Random(f"{seed}:{tokens}")
    words = [word for word in needle_words() if word != "remember"]
    draw.shuffle(words)
    most = len(words) // (1 + _ANSWER_WORDS) - 1  # the last ones are the document's own
    if len(depths) > most:
        raise ConfigError(f"there are words for {most} answers, not for {len(depths)}")
    facts = []
    for depth in depths:
        key, *answer = (words.pop() for _ in range(1 + _ANSWER_WORDS))
        facts.append(word_fact(key, answer, depth))
    room = tokens - _START_TOKENS - sum(len(fact.sentence.split()) for fact in facts)
    if room < 1:
        raise ConfigError(f"{tokens} tokens do not hold {len(facts)} sentences to remember")
    sentences: list[str] = []
    while room > 0:
        length = min(draw.choice(_SENTENCE), room)
        sentences.append(" ".join([*draw.choices(words, k=length - 1), "."]))
        room -= length
    places = [round(fact.depth * len(sentences) / 100) for fact in facts]
    # From the back, so that what is inserted moves no later place.
    for place, fact in sorted(zip(places, facts, strict=True), key=lambda p: -p[0]):
        sentences.insert(place, fact.sentence)
    return " ".join(sentences), facts
