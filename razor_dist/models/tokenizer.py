"""A model folder's tokenizer, which the frontend and, for grammars, rank 0 load."""

from __future__ import annotations

import logging
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from razor_dist.config.errors import ModelError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

log = logging.getLogger(__name__)


def load_tokenizer(
    folder: Path, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """Load a model folder's tokenizer; ``None`` without one, `ModelError` if it is broken.

    Mistral's ``tekken.json`` is none: transformers' copy of it has no special tokens and adds no
    ``<s>``.
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
    # We check what fits; transformers would warn about each longer prompt.
    tokenizer.model_max_length = 2**62
    # The first call may switch off a truncation that tokenizer.json asks for; later, in the midst
    # of another thread's call, the tokenizer would refuse that as "already borrowed".
    tokenizer("")
    loaded: PreTrainedTokenizerBase = tokenizer
    return loaded
