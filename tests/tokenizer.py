"""The embedded model's tokenizer, loaded once."""

from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from razor_dist.engine.prompts import load_tokenizer
from razor_dist.models.registry import resolve_model


@lru_cache(maxsize=1)
def smollm2_tokenizer() -> PreTrainedTokenizerBase:
    """SmolLM2's."""
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    assert tokenizer is not None
    return tokenizer
