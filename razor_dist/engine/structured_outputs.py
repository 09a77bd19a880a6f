"""Answers that match a JSON schema, a regular expression, a choice or a grammar, by llguidance.

The frontend checks what a request asks for (`StructuredOutputsParams.check`). Rank 0 compiles it
with the model's vocabulary (`GrammarCompiler`) before the request is admitted, and masks the tokens
that cannot follow (`Grammar.fill`) before each is chosen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from dataclasses import fields as fields_of
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from razor_dist.config.errors import RequestError

if TYPE_CHECKING:  # the command line imports this, and loads in a second without them
    from llguidance import LLMatcher, LLTokenizer
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

_KINDS = ("json", "json_object", "regex", "choice", "grammar")
# Characters of a description, which rank 0 compiles beside its steps.
_LONGEST = 1 << 18
# Compiled grammars that are kept.
_KEPT = 16
# Between the parts of a JSON text. Bounded: small models would write blanks for ever.
_WHITESPACE = r"( |\n[ \t]{0,20})?"
# Where one text alone can follow, llguidance looks for its end, to have it tokenised as the model
# would. Of /a+/ /a+/ there is none, since the first takes every a, and no limit of llguidance's
# stops it. The last such line of a grammar counts.
_UNFORCED = '\n%llguidance {"no_forcing": true}\n'


@dataclass(frozen=True)
class StructuredOutputsParams:
    """A constraint on an answer, with vLLM's names; exactly one of the first five is set.

    ``json``                    a JSON schema, as a mapping or as text
    ``json_object``             True: any JSON object
    ``regex``                   a regular expression that the whole answer matches
    ``choice``                  the answer is one of these strings
    ``grammar``                 a context-free grammar: llama.cpp's GBNF, EBNF, or Lark
    ``disable_any_whitespace``  JSON without blanks between its parts
    ``whitespace_pattern``      a regular expression for these blanks; a space, or a line feed and
                                an indentation of at most 20, if not given

    Raises `RequestError` whose ``param`` is "structured_outputs" for anything else.
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        kinds = [kind for kind in _KINDS if getattr(self, kind) not in (None, False)]
        if self.json is False:
            raise _refusal("json: false is a schema that nothing matches")
        if len(kinds) != 1:
            got = " and ".join(kinds) or "none"
            raise _refusal(f"exactly one of {', '.join(_KINDS)} must be given, got {got}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            if not isinstance(getattr(self, name), str | None):
                raise _refusal(f"{name} must be a string")
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool | None):
                raise _refusal(f"{name} must be true or false")
        if not isinstance(self.json, str | Mapping | bool | None):
            raise _refusal("json must be a JSON schema: an object, or a string that holds one")
        if self.choice is not None:
            strings = not isinstance(self.choice, str) and isinstance(self.choice, Sequence)
            if not (strings and self.choice and all(isinstance(c, str) for c in self.choice)):
                raise _refusal("choice must be a list of strings that is not empty")
            object.__setattr__(self, "choice", tuple(self.choice))

    @classmethod
    def of(cls, value: object) -> StructuredOutputsParams:
        """Take a mapping for the fields of one; refuses unknown names."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise _refusal(f"must be an object, got {value!r:.80}")
        names = [field.name for field in fields_of(cls)]
        unknown = [name for name in value if name not in names]
        if unknown:
            raise _refusal(f"unsupported field {unknown[0]!r:.80}; there are {', '.join(names)}")
        return cls(**{n: v for n, v in value.items() if (n, v) != ("disable_any_whitespace", None)})

    def check(self) -> None:
        """Raise `RequestError` if it is not one that can be matched, or llguidance is missing."""
        description = self.llguidance()
        if len(description) > _LONGEST:
            raise _refusal(f"{self._kind} is longer than {_LONGEST} characters")
        problem = _problem(description)
        if problem:
            raise _refusal(f"{self._kind} cannot be used: {_short(problem)}")

    @property
    def _kind(self) -> str:
        return next(kind for kind in _KINDS if getattr(self, kind) not in (None, False))

    def llguidance(self) -> str:
        """Return llguidance's own description of it."""
        matcher, grammar_from = _library()
        try:
            match self._kind:
                case "choice":  # llguidance's own fails, in mid-answer, above 2,000
                    return matcher.grammar_from_regex("|".join(map(re.escape, self.choice or ())))
                case "regex":
                    return matcher.grammar_from_regex(self.regex)
                case "grammar":
                    return grammar_from("grammar", self.grammar) + _UNFORCED
            description = matcher.grammar_from_json_schema(self._schema(), overrides=self._blanks)
        except ValueError as error:
            raise _refusal(f"{self._kind} cannot be used: {_short(str(error))}") from None
        schema = json.loads(description)["grammars"][0]["json_schema"]
        if self.whitespace_pattern is None and schema["x-guidance"] == self._blanks:
            return description
        # Patterns of the user's stand between the parts, which may be as endless as a grammar's.
        return f"start: %json {json.dumps(schema)}{_UNFORCED}"

    def _schema(self) -> str:
        if self.json_object:
            return '{"type": "object"}'
        if isinstance(self.json, str):
            return self.json
        return json.dumps(self.json)

    @property
    def _blanks(self) -> dict[str, Any]:
        if self.disable_any_whitespace:
            return {"whitespace_flexible": False}
        return {"whitespace_pattern": self.whitespace_pattern or _WHITESPACE}


class Grammar:
    """The matcher of one answer, at the place the answer has reached."""

    def __init__(self, matcher: LLMatcher, ends: Sequence[int]) -> None:
        self._matcher, self._ends = matcher, frozenset(ends)
        self.ended = False  # the answer is complete, by an end-of-sequence token

    def fresh(self) -> Grammar:
        """Return a copy, for another answer; this one must not have begun."""
        return Grammar(self._matcher.deep_copy(), list(self._ends))

    def fill(self, mask: Tensor) -> None:
        """Write a bit for each token into ``mask``, int32 ``[V / 32]``: 1 if it may come next."""
        # Not llguidance.torch, whose import takes seconds: it brings torch's compiler.
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, mask.unsqueeze(0).numpy())

    def accept(self, token: int) -> None:
        self.ended = self.ended or token in self._ends
        self._matcher.consume_token(token)

    @property
    def error(self) -> RequestError | None:
        """Why no token can follow, such as a limit of llguidance's that the grammar exceeds."""
        if not self._matcher.is_error():
            return None
        return _refusal(f"the answer cannot go on: {_short(self._matcher.get_error())}")


class GrammarCompiler:
    """Compiles requests' grammars in a thread, those that it knows at once.

    The tokenizer is loaded in that thread, by `prepare` or when first asked.
    """

    def __init__(
        self,
        load_tokenizer: Callable[[], PreTrainedTokenizerBase | None],
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._load, self._vocab_size, self._ends = load_tokenizer, vocab_size, eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._compiled = lru_cache(_KEPT)(self._compile)

    def prepare(self) -> None:
        """Begin to load the vocabulary, if structured outputs can be had at all."""
        self._thread.submit(self._vocabulary)

    def compile(self, params: StructuredOutputsParams) -> Future[Grammar]:
        """Return a future grammar, to be copied; its exception is a `RequestError`."""
        return self._thread.submit(lambda: self._compiled(params.llguidance()))

    def _compile(self, description: str) -> Grammar:
        from llguidance import LLMatcher

        tokenizer = self._vocabulary()
        matcher = LLMatcher(tokenizer, description, log_level=0)
        grammar = Grammar(matcher, tokenizer.eos_tokens)
        if grammar.error is not None:
            raise grammar.error
        return grammar

    def _vocabulary(self) -> LLTokenizer:
        if self._tokenizer is not None:
            return self._tokenizer
        from llguidance.hf import from_tokenizer

        tokenizer = self._load()
        if tokenizer is None:
            raise _refusal("the model has no tokenizer, which structured outputs need")
        try:
            fast: Any = tokenizer
            self._tokenizer = from_tokenizer(fast, self._vocab_size, list(self._ends) or None)
        except ValueError as error:  # not one of the tokenizers library
            raise _refusal(f"the model's tokenizer cannot be used: {_short(str(error))}") from None
        return self._tokenizer


def _library() -> tuple[Any, Any]:
    try:
        from llguidance import LLMatcher, grammar_from
    except ImportError as error:
        raise _refusal(f"it needs the package llguidance on the server: {error}") from error
    return LLMatcher, grammar_from


@lru_cache(maxsize=32)
def _problem(description: str) -> str:
    matcher, _ = _library()
    return str(matcher.validate_grammar(description))


def _refusal(problem: str) -> RequestError:
    return RequestError(f"structured_outputs: {problem}", param="structured_outputs")


def _short(message: str) -> str:
    """An error of llguidance's on one line, without the state that may follow."""
    return " ".join(message.partition("<state>")[0].split())[:300]
