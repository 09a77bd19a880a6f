"""Answers that match a JSON schema, a regular expression, a choice or a grammar, by llguidance.

llguidance is native code that may crash, and take long and much memory. So a child process of the
frontend compiles a constraint first (`razor_dist.frontend.grammar_process`), and rank 0 gets it as
llguidance's text (`GrammarText`). Rank 0 compiles that with the model's vocabulary
(`GrammarCompiler`) before the request is admitted, and masks the tokens that cannot follow
(`Grammar.fill`) before each is chosen.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from razor_dist.config.errors import EngineError, RequestError
from razor_dist.config.validation import made
from razor_dist.protocol.grammar_bounds import LONGEST, grammar_problem, schema_problem
from razor_dist.protocol.vocabulary import (
    FIELD,
    library,
    load_vocabulary,
    one_line,
    refusal,
    serialized,
    vocabulary_of,
)

T = TypeVar("T")

if TYPE_CHECKING:  # the command line imports this, and loads in a second without them
    from llguidance import LLMatcher, LLTokenizer
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

_KINDS = ("json", "json_object", "regex", "choice", "grammar")
# Characters of llguidance's text of a constraint: escaping may lengthen what was given.
LONGEST_TEXT = 4 * LONGEST
# Bytes of the stack of rank 0's thread: eight times that of the child process, where llguidance
# overflows it first.
_STACK_BYTES = 64 << 20
# Masks that are computed before a constraint is taken: an object's properties come second.
_FIRST_MASKS = 2
# Compiled grammars that are kept.
_KEPT = 16
# Between the parts of a JSON text. Bounded: small models would write blanks for ever.
_WHITESPACE = r"( |\n[ \t]{0,20})?"
# Limits in the place of llguidance's own (in brackets). An enum of 8,000 words takes 100,000 of
# fuel, and 300 numbers between decimal bounds 170,000 (1,000,000). An object of 500 optional
# properties has 2,007 items in a row (2,000). A state of the lexer takes 1 to 2 kB for as long as
# the answer lasts (250,000).
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 300_000,
    "max_lexer_states": 50_000,
    "max_items_in_row": 2_500,
}
# Size of a grammar that a user has written, and of one that llguidance makes of a schema or an
# expression: 4,200 for 500 optional properties. llguidance builds a row before it counts its items,
# in time by their square: half a second for 10,000, in which no sequence of rank 0 gets a token.
_GRAMMAR_SIZE, _SCHEMA_SIZE = 5_000, 20_000
# Where one text alone can follow, llguidance looks for its end, to have it tokenised as the model
# would. Of /a+/ /a+/ there is none, since the first takes every a, and no limit of llguidance's
# stops it. The last such line of a grammar counts.
_UNFORCED = '\n%llguidance {"no_forcing": true}\n'


@dataclass(frozen=True)
class StructuredOutputsParams:
    """A constraint on an answer, with vLLM's names; exactly one of the first five is set.

    ``json``                    a JSON schema: a mapping or text; kept as text
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
    disable_any_whitespace: bool | None = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.json, str | Mapping | bool):
            object.__setattr__(self, "json", _text_of(self.json))
        kinds = [kind for kind in _KINDS if getattr(self, kind) not in (None, False)]
        if len(kinds) != 1:
            got = " and ".join(kinds) or "none"
            raise refusal(f"exactly one of {', '.join(_KINDS)} must be given, got {got}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            if not isinstance(getattr(self, name), str | None):
                raise refusal(f"{name} must be a string")
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool | None):
                raise refusal(f"{name} must be true or false")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise refusal("whitespace_pattern excludes disable_any_whitespace")
        if not isinstance(self.json, str | None):
            raise refusal("json must be a JSON schema: an object, or a string that holds one")
        if self.choice is not None:
            strings = not isinstance(self.choice, str) and isinstance(self.choice, Sequence)
            if not (strings and self.choice and all(isinstance(c, str) for c in self.choice)):
                raise refusal("choice must be a list of strings that is not empty")
            object.__setattr__(self, "choice", tuple(self.choice))

    @classmethod
    def of(cls, value: object) -> StructuredOutputsParams | None:
        """Make one of a request's field; `RequestError` if it is wrong."""
        return made(cls, value, FIELD, RequestError)

    def check(self) -> None:
        """Raise `RequestError` if it is too large, or nested or chained too deeply, to be compiled.

        Takes time in proportion to its length; llguidance, which finds other faults, is not called.
        """
        kind, given = self._kind, self._given()
        if len(given) + len(self.whitespace_pattern or "") > LONGEST:
            raise refusal(f"{kind} is longer than {LONGEST} characters")
        try:
            given.encode()
            problem = None
            if kind == "grammar":
                problem = grammar_problem(given)
            elif kind == "json":
                problem = schema_problem(json.loads(given))
        except UnicodeEncodeError:
            raise refusal(f"{kind} holds a lone surrogate (\\ud800 to \\udfff)") from None
        except ValueError as error:
            raise refusal(f"{kind} cannot be used: {error}") from None
        except RecursionError:
            problem = "is nested too deeply"
        if problem:
            raise refusal(f"{kind} {problem}")

    def _given(self) -> str:
        match self._kind:
            case "choice":
                return "|".join(self.choice or ())
            case "json_object":
                return '{"type": "object"}'
        return str(getattr(self, self._kind))

    @property
    def _kind(self) -> str:
        return next(kind for kind in _KINDS if getattr(self, kind) not in (None, False))

    def llguidance(self) -> str:
        """Return llguidance's own description of it."""
        matcher, grammar_from = library()
        try:
            match self._kind:
                case "choice":  # llguidance's own fails, in mid-answer, above 2,000
                    return matcher.grammar_from_regex("|".join(map(re.escape, self.choice or ())))
                case "regex":
                    return matcher.grammar_from_regex(self.regex)
                case "grammar":
                    return grammar_from("grammar", self.grammar) + _UNFORCED
            description = matcher.grammar_from_json_schema(self._given(), overrides=self._blanks)
        except ValueError as error:
            raise refusal(f"{self._kind} cannot be used: {one_line(str(error))}") from None
        schema = json.loads(description)["grammars"][0]["json_schema"]
        if self.whitespace_pattern is None and schema["x-guidance"] == self._blanks:
            return description
        # Patterns of the user's stand between the parts, which may be as endless as a grammar's.
        return f"start: %json {json.dumps(schema)}{_UNFORCED}"

    def in_lark(self) -> str:
        """Return a JSON schema as a part of a grammar in Lark."""
        return f"%json {json.dumps(json.loads(self._given()) | {'x-guidance': self._blanks})}"

    def compiled(self, tokenizer: LLTokenizer) -> GrammarText:
        """Compile it and compute an answer's first masks, as rank 0 will do with the result.

        Native code does it, without bounds of time, memory and stack: only for a process that may
        die. Raises `RequestError` if it cannot be matched, or llguidance is missing.
        """
        text = self.llguidance()
        if len(text) > LONGEST_TEXT:
            raise refusal(f"{self._kind} is longer than {LONGEST_TEXT} characters for llguidance")
        matcher = _matcher(text, tokenizer, self._kind)
        import numpy as np
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

        mask = allocate_token_bitmask(1, tokenizer.vocab_size)
        for _ in range(_FIRST_MASKS):
            fill_next_token_bitmask(matcher, mask)
            _check_matcher(matcher, self._kind)
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
            if not len(allowed) or allowed[0] in tokenizer.eos_tokens:
                break
            matcher.consume_token(int(allowed[0]))
        return GrammarText(text=text)

    @property
    def _blanks(self) -> dict[str, Any]:
        if self.disable_any_whitespace:
            return {"whitespace_flexible": False}
        own = self.whitespace_pattern
        return {"whitespace_pattern": _WHITESPACE if own is None else own}


def _text_of(schema: str | Mapping[str, Any] | bool) -> str:
    """Return JSON: messages cannot hold integers beyond 64 bits, and a schema may."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    except RecursionError:
        raise refusal("json is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise refusal(f"json must be a JSON schema: {error}") from None
    if text.strip() == "false":
        raise refusal("json: false is a schema that nothing matches")
    # llguidance puts the pattern of blanks into an object.
    return "{}" if text.strip() == "true" else text


class GrammarText(msgspec.Struct, frozen=True, array_like=True):
    """A constraint as llguidance's own text, which the frontend's child process has compiled."""

    text: str

    def check(self) -> None:
        """Raise `RequestError` if no frontend can have compiled it."""
        if len(self.text) > LONGEST_TEXT:
            raise refusal(f"it is longer than {LONGEST_TEXT} characters")

    def llguidance(self) -> str:
        return self.text


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
        return refusal(f"the answer cannot go on: {one_line(self._matcher.get_error())}")


class GrammarCompiler:
    """Compiles requests' grammars in a thread, and keeps the last ones.

    The tokenizer is loaded in that thread, by `prepare` or for the first grammar. The thread has a
    large stack, and llguidance the same limits as in the frontend's child process.
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
        self._submit(self._vocabulary)

    def compile(self, params: StructuredOutputsParams | GrammarText) -> Future[Grammar]:
        """Return a future grammar, to be copied.

        Its exception is a `RequestError`, or an `EngineError` if the tokenizer cannot be loaded.
        """

        def compiled() -> Grammar:
            params.check()
            return self._compiled(params.llguidance())

        return self._submit(compiled)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        with stack_size(_STACK_BYTES):  # the first begins the thread
            return self._thread.submit(work)

    def _compile(self, description: str) -> Grammar:
        tokenizer = self._vocabulary()
        return Grammar(_matcher(description, tokenizer, "it"), tokenizer.eos_tokens)

    def _vocabulary(self) -> LLTokenizer:
        if self._tokenizer is None:
            try:
                loaded = self._load()
            except Exception as error:  # the model's folder may be gone by now
                problem = f"the model's tokenizer cannot be loaded: {one_line(str(error))}"
                raise EngineError(problem) from error
            tokenizer = serialized(loaded)
            vocabulary = vocabulary_of(tokenizer, self._vocab_size, self._ends)
            self._tokenizer = load_vocabulary(vocabulary)
        return self._tokenizer


@contextmanager
def stack_size(size: int) -> Iterator[None]:
    """Give threads that are begun meanwhile a stack of ``size`` bytes."""
    before = threading.stack_size(size)
    try:
        yield
    finally:
        threading.stack_size(before)


def _matcher(text: str, tokenizer: LLTokenizer, kind: str) -> LLMatcher:
    """Compile llguidance's text within bounds; `RequestError` if it cannot be."""
    from llguidance import LLMatcher, LLParserLimits

    size = _SCHEMA_SIZE if text.startswith("{") else _GRAMMAR_SIZE  # JSON, or Lark
    limits = LLParserLimits(**_LIMITS, max_grammar_size=size)
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    _check_matcher(matcher, kind)
    return matcher


def _check_matcher(matcher: LLMatcher, kind: str) -> None:
    if matcher.is_error():
        raise refusal(f"{kind} cannot be used: {one_line(matcher.get_error())}")
