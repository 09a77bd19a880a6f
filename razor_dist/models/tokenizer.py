"""A model folder's tokenizer, which the frontend loads, and rank 0 for grammars."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from razor_dist.config.errors import ModelError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

# A call takes about 140 bytes of memory per character, so 150 MB for this many.
_CHARACTERS_AT_ONCE = 2**20

log = logging.getLogger(__name__)


def load_tokenizer(
    folder: Path, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """Load a model folder's tokenizer; ``None`` without one, `ModelError` if it is broken.

    Mistral's ``tekken.json`` does not count: transformers reads it without special tokens, and adds
    no ``<s>``.
    """
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        if (folder / "tekken.json").exists():
            log.warning(
                "%s has tekken.json, which is not read, and no tokenizer.json: the model takes "
                "token ids only, unless the folder gets a tokenizer.json",
                folder,
            )
            return None
        if not (folder / "tokenizer_config.json").exists():
            return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises whatever its parsers raise
        raise ModelError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    # The engine checks lengths; transformers would warn about each longer prompt.
    tokenizer.model_max_length = 2**62
    # The first call may switch off a truncation that tokenizer.json asks for; later, in the midst
    # of another thread's call, the tokenizer would refuse that as "already borrowed".
    tokenizer("")
    loaded: PreTrainedTokenizerBase = tokenizer
    return loaded


def count_tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[int]:
    """Return the number of each text's tokens, without special ones.

    A text of more than a million characters is cut, before line breaks if it has any; at each cut
    the number may be one off.
    """
    counts = [0] * len(texts)
    pieces = [(number, piece) for number, text in enumerate(texts) for piece in _pieces(text)]
    ends = itertools.accumulate(len(piece) for _, piece in pieces)
    placed = zip(ends, pieces, strict=True)
    for _, group in itertools.groupby(placed, key=lambda at: at[0] // _CHARACTERS_AT_ONCE):
        numbers, batch = zip(*(piece for _, piece in group), strict=True)
        found = tokenizer(list(batch), add_special_tokens=False).input_ids
        for number, ids in zip(numbers, found, strict=True):
            counts[number] += len(ids)
    return counts


def _pieces(text: str) -> Iterator[str]:
    begin = 0
    while len(text) - begin > _CHARACTERS_AT_ONCE:
        most = begin + _CHARACTERS_AT_ONCE
        end = text.rfind("\n", begin + 1, most)
        end = most if end < 0 else end
        yield text[begin:end]
        begin = end
    yield text[begin:]
