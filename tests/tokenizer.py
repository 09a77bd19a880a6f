"""Tokenizers for tests: the embedded model's, loaded once, and one that a tiny model's ids hold."""

from functools import lru_cache
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from razor_dist.engine.prompts import load_tokenizer
from razor_dist.models.registry import resolve_model


@lru_cache(maxsize=1)
def smollm2_tokenizer() -> PreTrainedTokenizerBase:
    """SmolLM2's."""
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    assert tokenizer is not None
    return tokenizer


def write_letters(folder: Path) -> None:
    """Put a tokenizer of printable ASCII letters, ids 4 to 98, into a model's folder."""
    letters = {chr(32 + i): i + 4 for i in range(95)} | {"?!": 3}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?!").save_pretrained(folder)
