"""RULER's aggregation: common words and frequent words (section 3.3)."""

from __future__ import annotations

import itertools
import math
import random
import string
from collections.abc import Iterator, Sequence

from razor_dist.evals.ruler.sample import Sample, Units, single_words, word_pairs

COMMON_WORDS = 10
FREQUENT_WORDS = 3
SHORT = 4096
"""Below this length, common words are rarer: the reference implementation's exception."""
_CODED_LETTERS = 6
_MARK = "..."


def common_words(draw: random.Random, length: int) -> Units:
    """A numbered list in which ten words are more frequent than all others.

    A unit is an uncommon word; one worked example goes before the list. Where the ordinary words
    do not suffice, all words, the common ones too, are pairs of them.

    Parameters
    ----------
    draw : random.Random
    length : int
        Of the prompt and the answer: decides how often the words occur.
    """
    short = length < SHORT
    often, seldom = (6, 1) if short else (30, 3)
    example_words, example_often, example_seldom = (20, 3, 1) if short else (40, 10, 3)
    singles = draw.sample(single_words(), len(single_words()))
    shown, rest = singles[:example_words], singles[example_words:]
    seed = draw.getrandbits(64)
    pairs: list[str] = []
    more = word_pairs(draw)
    common = shown[:COMMON_WORDS]
    example = _word_list(shown, example_often, example_seldom, random.Random(seed))
    worked = f"{_common_question(example)}\n{_COMMON_CUE} {_numbered(common)}"

    def build(count: int) -> Sample:
        words = rest
        wanted = COMMON_WORDS + count
        if wanted > len(rest):
            pairs.extend(itertools.islice(more, max(0, wanted - len(pairs))))
            words = pairs
        listing = _word_list(words[:wanted], often, seldom, random.Random(seed))
        text = f"{worked}\n\n{_common_question(listing)}"
        return Sample(text, _COMMON_CUE, tuple(words[:COMMON_WORDS]))

    return Units(build, least=1)


_COMMON_CUE = f"Answer: The {COMMON_WORDS} most common words of the list are:"


def _word_list(words: Sequence[str], often: int, seldom: int, draw: random.Random) -> str:
    common, others = words[:COMMON_WORDS], words[COMMON_WORDS:]
    listing = [*common] * often + [*others] * seldom
    draw.shuffle(listing)
    return _numbered(listing)


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _common_question(listing: str) -> str:
    return (
        "Some words of the numbered list below occur more often than the others. Remember which."
        f"\n{listing}\nQuestion: Which {COMMON_WORDS} words are the most common in this list?"
    )


def frequent_words(draw: random.Random) -> Units:
    """A text of invented words whose frequencies fall as a zeta distribution's with alpha 2.

    The word of rank k occurs ``floor(n / (zeta(2) k^2))`` times. That of rank 1 is noise, three
    dots; ranks 2 to 4 are asked for. A unit is a word of n.
    """
    coded = _coded_words(draw)
    vocabulary: list[str] = [_MARK]
    seed = draw.getrandbits(64)

    def build(count: int) -> Sample:
        times = rank_counts(count)
        vocabulary.extend(itertools.islice(coded, max(0, len(times) - len(vocabulary))))
        words = [word for word, n in zip(vocabulary, times, strict=False) for _ in range(n)]
        random.Random(seed).shuffle(words)
        text = (
            "The coded text below is made of invented words. Count how often each occurs, and "
            f"leave out the dots '{_MARK}'.\n{' '.join(words)}\n"
            f"Question: Which {FREQUENT_WORDS} words occur most often in the coded text above, "
            "the dots left out?"
        )
        cue = f"Answer: The {FREQUENT_WORDS} words that occur most often in the coded text are:"
        return Sample(text, cue, tuple(vocabulary[1 : 1 + FREQUENT_WORDS]))

    return Units(build, least=_least_frequent())


def rank_counts(count: int) -> list[int]:
    """How often each rank's word occurs, until one does not occur at all."""
    share = count * 6 / math.pi**2  # zeta(2) is pi^2 / 6
    return [int(share / rank**2) for rank in range(1, math.isqrt(int(share)) + 1)]


def _least_frequent() -> int:
    """The fewest words from which on the last word asked for is more frequent than the next."""
    last = 1 + FREQUENT_WORDS
    for count in itertools.count(1):
        times = [*rank_counts(count), *[0] * (last + 1)]
        if times[last - 1] > times[last] > 0:
            return count
    raise AssertionError  # the counts part in the end


def _coded_words(draw: random.Random) -> Iterator[str]:
    seen: set[str] = set()
    while True:
        word = "".join(draw.choices(string.ascii_lowercase, k=_CODED_LETTERS))
        if word not in seen:
            seen.add(word)
            yield word
