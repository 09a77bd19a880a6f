"""A model's vocabulary as llguidance takes it, and what is said where structured outputs fail."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from razor_dist.config.errors import RequestError

if TYPE_CHECKING:  # the command line imports this, and loads in a second without them
    from llguidance import LLTokenizer
    from transformers import PreTrainedTokenizerBase

FIELD = "structured_outputs"


class SerializedTokenizer(NamedTuple):
    """A tokenizer as the JSON of the tokenizers library, and its end-of-sequence token."""

    json: str
    eos_token_id: int | None


class Vocabulary(NamedTuple):
    """A vocabulary as llguidance's `LLTokenizer` takes it."""

    tokenizer: str  # JSON of the tokenizers library
    n_vocab: int
    eos_token: list[int] | int | None


def vocabulary_of(
    tokenizer: SerializedTokenizer, vocab_size: int, ends: Sequence[int]
) -> Vocabulary:
    return Vocabulary(tokenizer.json, vocab_size, list(ends) or tokenizer.eos_token_id)


def serialized(tokenizer: PreTrainedTokenizerBase | None) -> SerializedTokenizer:
    """Return a tokenizer as llguidance takes it.

    Raises `RequestError` if there is none, or not of the tokenizers library, or it has parts in
    Python, which have no JSON. For 49,152 tokens it takes 0.2 s with the interpreter's lock held.
    """
    if tokenizer is None:
        raise refusal("the model has no tokenizer, which structured outputs need")
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise refusal("the model's tokenizer cannot be used: it is not of the tokenizers library")
    try:
        backend = copy(tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return SerializedTokenizer(str(backend.to_str()), tokenizer.eos_token_id)
    except Exception as error:  # the library raises nothing more special
        problem = f"the model's tokenizer cannot be used: {one_line(str(error))}"
        raise refusal(problem) from None


def load_vocabulary(vocabulary: Vocabulary) -> LLTokenizer:
    """Return llguidance's vocabulary of a model; `RequestError` if it cannot be used."""
    library()
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(**vocabulary._asdict())
    except ValueError as error:
        raise refusal(f"the model's tokenizer cannot be used: {one_line(str(error))}") from None


def library() -> tuple[Any, Any]:
    try:
        from llguidance import LLMatcher, grammar_from
    except ImportError as error:
        raise refusal(f"it needs the package llguidance on the server: {error}") from error
    return LLMatcher, grammar_from


def refusal(problem: str) -> RequestError:
    return RequestError(f"{FIELD}: {problem}", param=FIELD)


def one_line(message: str) -> str:
    """An error of llguidance's on one line, without the state that may follow."""
    return " ".join(message.partition("<state>")[0].split())[:300]
