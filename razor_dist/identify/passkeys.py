"""DuoAttention's synthetic passkeys: long text in which ten sequences of words must be remembered.

A sample (papers/duoattention.txt, section 2.2 and Figure 3) is text with ten passkeys at random
places, each of 32 random words, and at its end the recall of all ten in order. To predict a word
of the recall a model must look back to where it stood: whatever a KV head contributes there from
beyond the sinks and the recent tokens, it contributes to retrieval.

Everything follows from the seed and the sample's index: a run that is resumed needs no state of the
data, and ranks that draw the same sample need not send it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from razor_dist.config.errors import ConfigError
from razor_dist.documents.corpus import folder_paragraphs, reference_paragraphs, sentences_of
from razor_dist.identify.settings import PasskeySettings

# Common words, most of them one token in any tokenizer of English.
_WORDS = (
    "apple arm bank bell bird boat book bridge car cat chair church city clock cloud coat corn "
    "cow cup desk dog door dress egg eye farm field fire fish floor flower foot garden gate "
    "glass gold grass hand hat hill horse house ice iron island key king lake lamp leaf letter "
    "map milk moon mountain nail night paper park pen piano plate queen rain ring river road "
    "rock roof rose salt school ship shoe snow song spoon star stone street sugar sun table "
    "tail tree valley wall water wheel window wing winter wood "
)
_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth"
_INTRODUCTION = "Here is a long text with passkeys in it. Remember them.\n\n"
_PASSKEY = "\n\nRemember: the {} passkey is"
_RECALL = "\n\nWhat is the {} passkey in the text? The {} passkey is"


@dataclass(frozen=True)
class PasskeySample:
    """One sample: tokens, int64 ``[N]``, and the mask of the recalled words, bool ``[N]``."""

    ids: Tensor
    mask: Tensor


class Passkeys:
    """All samples of one text and one seed.

    ``encode`` gives the tokens of a text, without special ones; ``start`` are those that every
    prompt begins with. A sample begins at a random sentence of the ``paragraphs``; text that is too
    short begins again. Raise `ConfigError` if there is none, or passkeys do not fit.
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        paragraphs: Sequence[str],
        settings: PasskeySettings,
        start: Sequence[int] = (),
    ) -> None:
        self.settings = settings
        self._start = [*start, *encode(_INTRODUCTION)]
        # Sentence by sentence, so that a passkey between two of them changes neither.
        self._sentences = [
            encode(("\n\n" if index == 0 else " ") + sentence)
            for paragraph in paragraphs
            for index, sentence in enumerate(sentences_of(paragraph))
        ]
        if not any(self._sentences):
            raise ConfigError("there is no text to hide passkeys in")
        self._words = [encode(" " + word) for word in _WORDS.split()]
        self._stop = encode(".")
        ordinals = _ORDINALS.split()[: settings.passkeys]
        self._hidden = [encode(_PASSKEY.format(ordinal)) for ordinal in ordinals]
        self._asked = [encode(_RECALL.format(ordinal, ordinal)) for ordinal in ordinals]
        # What a sample takes besides its text, if every word is the longest one.
        fixed = len(self._start) + sum(map(len, self._hidden)) + sum(map(len, self._asked))
        each = settings.words * max(map(len, self._words)) + len(self._stop)
        shortest = max(settings.min_tokens, fixed + 2 * settings.passkeys * each)
        if shortest > settings.max_tokens:
            raise ConfigError(
                f"max_tokens is {settings.max_tokens}, but {settings.passkeys} passkeys of "
                f"{settings.words} words, hidden and recalled, can take {shortest} tokens"
            )
        steps = max(settings.lengths - 1, 1)
        span = settings.max_tokens - shortest
        self._lengths = [shortest + span * i // steps for i in range(settings.lengths)]
        self._lengths[-1] = settings.max_tokens

    def sample(self, index: int) -> PasskeySample:
        """Draw the sample with this index, the same at every call."""
        draw = random.Random(f"{self.settings.seed}:{index}")
        length = draw.choice(self._lengths)
        passkeys = [
            [token for _ in range(self.settings.words) for token in draw.choice(self._words)]
            for _ in self._hidden
        ]
        recall: list[int] = []
        marks: list[bool] = []
        for question, passkey in zip(self._asked, passkeys, strict=True):
            recall += question + passkey + self._stop
            marks += [False] * len(question) + [True] * len(passkey) + [False] * len(self._stop)
        hidden = [
            words + passkey + self._stop
            for words, passkey in zip(self._hidden, passkeys, strict=True)
        ]
        room = length - len(self._start) - sum(map(len, hidden)) - len(recall)
        text = self._text(room, draw)
        # In the order of their ordinals; two may stand next to each other.
        places = sorted(draw.randrange(len(text) + 1) for _ in hidden)
        for place, passkey in reversed([*zip(places, hidden, strict=True)]):
            text.insert(place, passkey)
        ids = [*self._start, *chain.from_iterable(text), *recall]
        mask = [False] * (len(ids) - len(marks)) + marks
        return PasskeySample(torch.tensor(ids), torch.tensor(mask))

    def _text(self, tokens: int, draw: random.Random) -> list[list[int]]:
        """Take consecutive sentences of ``tokens`` tokens in all, the last one cut."""
        first = draw.randrange(len(self._sentences))
        text: list[list[int]] = []
        while tokens > 0:
            sentence = self._sentences[(first + len(text)) % len(self._sentences)][:tokens]
            text.append(sentence)
            tokens -= len(sentence)
        return text


def open_passkeys(
    tokenizer: PreTrainedTokenizerBase, settings: PasskeySettings, haystack: Path | None = None
) -> Passkeys:
    """Make samples for the model of a tokenizer.

    ``haystack`` is a folder of ``.txt`` files to hide passkeys in; by default it is the prose of
    Python's language reference: some 20,000 tokens. Raise `ConfigError` as `Passkeys`.
    """
    encode = partial(tokenizer.encode, add_special_tokens=False)
    try:
        paragraphs = reference_paragraphs() if haystack is None else folder_paragraphs(haystack)
    except ValueError as error:
        raise ConfigError(f"haystack: {error}") from error
    return Passkeys(encode, paragraphs, settings, start_tokens(tokenizer))


def start_tokens(tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Return the special tokens that every prompt of a model begins with."""
    if tokenizer is None:
        return []
    empty: list[int] = tokenizer.encode("")
    # Some tokenizers end the text as well.
    return empty[:-1] if len(empty) > 1 and empty[-1] == tokenizer.eos_token_id else empty
