"""DuoAttention's synthetic passkeys: long text in which ten sequences of words must be remembered.

A sample (papers/duoattention.txt, section 2.2 and Figure 3) is text with ten passkeys at random
places, each of 32 random words, and at its end the recall of all ten in order. To predict a word
of the recall a model must look back to the passkey: what a KV head contributes there from beyond
the sinks and the recent tokens is retrieval.

Seed and index determine a sample: a resumed run needs no state of the data, and ranks that draw the
same sample need not send it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from razor_dist.config.errors import ConfigError
from razor_dist.identify.criterion import Sample
from razor_dist.identify.prose import Prose, open_prose, start_tokens
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


class Passkeys:
    """All samples of one text and one seed; a mask marks the recalled words.

    ``start`` are the special tokens that every prompt begins with. Raise `ConfigError` if passkeys
    do not fit.
    """

    def __init__(self, prose: Prose, settings: PasskeySettings, start: Sequence[int] = ()) -> None:
        self.settings, self.fingerprint = settings, prose.fingerprint
        self._prose, encode = prose, prose.encode
        self._start = [*start, *encode(_INTRODUCTION)]
        self._words = [encode(" " + word) for word in _WORDS.split()]
        self._stop = encode(".")
        ordinals = _ORDINALS.split()[: settings.passkeys]
        self._hidden = [encode(_PASSKEY.format(ordinal)) for ordinal in ordinals]
        self._asked = [encode(_RECALL.format(ordinal, ordinal)) for ordinal in ordinals]
        # Tokens of a sample besides its text, if every word is the longest.
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

    def sample(self, index: int) -> Sample:
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
        text = self._prose.take(room, draw)
        # In the order of their ordinals; two may stand next to each other.
        places = sorted(draw.randrange(len(text) + 1) for _ in hidden)
        for place, passkey in reversed([*zip(places, hidden, strict=True)]):
            text.insert(place, passkey)
        ids = [*self._start, *chain.from_iterable(text), *recall]
        mask = [False] * (len(ids) - len(marks)) + marks
        return Sample(torch.tensor(ids), torch.tensor(mask))


def open_passkeys(
    tokenizer: PreTrainedTokenizerBase, settings: PasskeySettings, haystack: Path | None = None
) -> Passkeys:
    """Make samples for a tokenizer's model, from the text of `open_prose`.

    Raise `ConfigError` as `Passkeys`.
    """
    return Passkeys(open_prose(tokenizer, haystack), settings, start_tokens(tokenizer))
