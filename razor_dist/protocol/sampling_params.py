"""Sampling settings of a request, and the defaults that a model brings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

from razor_dist.config.errors import ModelError, RequestError
from razor_dist.config.schema import EngineConfig
from razor_dist.models.smollm2 import NAME as EMBEDDED
from razor_dist.protocol.messages import check_text
from razor_dist.protocol.repetition import LOOPS, RepetitionDetectionParams
from razor_dist.protocol.structured_outputs import GrammarText, StructuredOutputsParams

# Values for some of `SamplingParams`' fields, by name.
SamplingDefaults = Mapping[str, Any]

MAX_LOGPROBS = 20
MAX_SOURCES = 100
MAX_N = 128
# They are looked at with every token, by the frontend and by rank 0.
MAX_STOPS, MAX_STOP_LENGTH, MAX_STOP_IDS = 64, 1000, 1024
# Integers travel to rank 0 in msgpack and to the generators as int64.
_INT64 = 2**63


@dataclass(frozen=True)
class Range:
    """The values that a field may have, from ``low`` on; those above it alone if ``is_open``."""

    low: float
    high: float | None = None
    is_open: bool = False
    words: str | None = None  # instead of those made of the bounds

    def __contains__(self, value: Any) -> bool:
        above = value > self.low if self.is_open else value >= self.low
        return above and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.words is not None:
            return self.words
        if self.high is None:
            return f"at least {self.low}"
        return (
            f"in ({self.low}, {self.high}]"
            if self.is_open
            else f"between {self.low} and {self.high}"
        )


RANGES: dict[str, Range] = {
    "n": Range(1, MAX_N),
    "max_tokens": Range(1),
    "min_tokens": Range(0),
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, is_open=True),
    "top_k": Range(-1, words="-1, 0 or positive"),
    "min_p": Range(0, 1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0.01, 100),
    "logprobs": Range(0, MAX_LOGPROBS),
    "prompt_logprobs": Range(0, MAX_LOGPROBS),
    "return_sources": Range(0, MAX_SOURCES),
}


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one request, with the names vLLM's users know.

    ``n``                   answers to generate; the prompt is read once for all of them
    ``max_tokens``          tokens to generate at most; None means the setting
                            ``default_max_tokens``, or what fits
    ``fit_max_tokens``      if the caches cannot hold ``max_tokens``, generate fewer, and refuse
                            only what cannot have some hundred; set where None became a number
    ``min_tokens``          no stop string, stop token or end of sequence ends the answer before;
                            a stop string may begin before and end after
    ``temperature``         0 is greedy, and so is what lies below 1e-5
    ``top_p``               nucleus mass in (0, 1]
    ``top_k``               keep the ``top_k`` likeliest tokens; 0 or -1 keeps all
    ``min_p``               keep tokens with at least this share of the likeliest one's probability
    ``presence_penalty``    subtracted from the logits of tokens that the answer has
    ``frequency_penalty``   subtracted as often as the answer has the token
    ``repetition_penalty``  logits of tokens in prompt or answer are divided by it, negative ones
                            multiplied
    ``logit_bias``          numbers in [-100, 100] to add to logits, by token id
    ``structured_outputs``  what the answers must match, a `StructuredOutputsParams` or a mapping
    ``seed``                makes the request's draws repeatable; the i-th answer draws by seed + i;
                            -1 is None: another seed for each answer
    ``skip_special_tokens``  leave special tokens out of the text
    ``stop``                strings that end the text; they are not part of it
    ``stop_token_ids``      tokens that end the request, besides the model's end-of-sequence tokens
    ``ignore_eos``          go on after an end-of-sequence token
    ``logprobs``            return the model's log-probability of each token, before penalties, and
                            those of this many likeliest
    ``prompt_logprobs``     the same for every prompt token but the first
    ``return_sources``      most passages of the prompt to report as an answer's sources
    ``repetition_detection``  when an answer that repeats itself ends, with ``finish_reason``
                            "repetition": a `RepetitionDetectionParams` or a mapping
    ``priority``            lower numbers go first, under ``scheduling_policy: priority``

    Raises `RequestError` for a value of the wrong type or out of range; ``param`` names the field.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    structured_outputs: StructuredOutputsParams | GrammarText | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_sources: int = 0
    repetition_detection: RepetitionDetectionParams | None = None
    priority: int = 0
    fit_max_tokens: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple("stop", stop, str, "strings"))
        ids = _tuple("stop_token_ids", self.stop_token_ids, int, "token ids")
        object.__setattr__(self, "stop_token_ids", ids)
        if not isinstance(self.structured_outputs, GrammarText | None):
            structured = StructuredOutputsParams.of(self.structured_outputs)
            object.__setattr__(self, "structured_outputs", structured)
        repetition = RepetitionDetectionParams.of(self.repetition_detection)
        object.__setattr__(self, "repetition_detection", repetition)
        self._check_types()
        if self.seed == -1:  # as in vLLM and llama-server
            object.__setattr__(self, "seed", None)
        for name, range_ in RANGES.items():
            value = getattr(self, name)
            if value is not None and value not in range_:
                raise RequestError(f"{name} must be {range_}, got {value}", param=name)
        self._check_min_tokens()
        if any(not s for s in self.stop):
            raise RequestError("stop must not contain an empty string", param="stop")
        check_text("".join(self.stop), "stop")
        longest = max(map(len, self.stop), default=0)
        if len(self.stop) > MAX_STOPS or longest > MAX_STOP_LENGTH:
            raise RequestError(
                f"stop must hold at most {MAX_STOPS} strings of at most {MAX_STOP_LENGTH} "
                f"characters, got {len(self.stop)} of up to {longest}",
                param="stop",
            )
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise RequestError(
                f"stop_token_ids must hold at most {MAX_STOP_IDS}, got {len(self.stop_token_ids)}",
                param="stop_token_ids",
            )

    @property
    def penalizes(self) -> bool:
        """True if the choice of a token depends on how often it was there before."""
        neutral = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return neutral != (0.0, 0.0, 1.0)

    @property
    def adjusts_logits(self) -> bool:
        """True if tokens are chosen by other logits than the model's."""
        others = self.logit_bias, self.structured_outputs, self.min_tokens
        return self.penalizes or any(others)

    def for_answer(self, index: int) -> SamplingParams:
        """Return the parameters of one of the ``n`` answers, which draws by a seed of its own."""
        if self.seed is None:
            return replace(self, n=1)
        seed = (self.seed + index + _INT64) % (2 * _INT64) - _INT64
        return replace(self, n=1, seed=seed + (self.seed < -1 <= seed))  # -1 would be none

    def to_wire(self) -> dict[str, Any]:
        """Return the fields by name, for a message."""
        fields = {field.name: getattr(self, field.name) for field in fields_of(self)}
        if self.structured_outputs is not None:
            fields["structured_outputs"] = self.structured_outputs.to_wire()
        if self.repetition_detection is not None:
            fields["repetition_detection"] = self.repetition_detection.to_wire()
        return fields

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of which ``fields`` is `to_wire`."""
        structured = fields["structured_outputs"]
        if structured is not None and "text" in structured:
            fields = {**fields, "structured_outputs": GrammarText(**structured)}
        return cls(**fields)

    def _check_types(self) -> None:
        """Refuse what would pass the comparisons and fail in the ranks, such as 25.0 for 25."""
        for field in fields_of(self):
            name, value = field.name, getattr(self, field.name)
            if field.type == "float" and not _is_number(value):
                raise RequestError(f"{name} must be a number, got {value!r:.80}", param=name)
            if field.type == "bool" and not isinstance(value, bool):
                raise RequestError(f"{name} must be True or False, got {value!r:.80}", param=name)
            if field.type == "int" or (field.type == "int | None" and value is not None):
                _check_int(name, value)
        self._check_bias()
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token)

    def _check_min_tokens(self) -> None:
        problem = None
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            problem = f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
        elif self.min_tokens and self.structured_outputs is not None:
            problem = "excludes structured_outputs: what matches them may be shorter"
        if problem:
            raise RequestError(f"min_tokens {problem}", param="min_tokens")

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                f"logit_bias must map token ids to numbers, got {self.logit_bias!r:.80}",
                param="logit_bias",
            )
        for token, bias in self.logit_bias.items():
            _check_int("logit_bias", token)
            if not _is_number(bias) or not -100 <= bias <= 100:
                raise RequestError(
                    f"logit_bias must hold numbers between -100 and 100, got {bias!r:.80} for "
                    f"token {token}",
                    param="logit_bias",
                )


def request_defaults(folder: Path, config: EngineConfig) -> SamplingDefaults:
    """Return what requests get that say nothing else: the model's values, and the settings'."""
    found = dict(sampling_defaults(folder, config.generation_config))
    wanted = config.repetition_detection
    if wanted == "on" or (wanted == "auto" and config.model == EMBEDDED):
        found["repetition_detection"] = LOOPS
    return found


def sampling_defaults(folder: Path, generation_config: str) -> SamplingDefaults:
    """Read the sampling defaults that a model recommends in its ``generation_config.json``.

    As in vLLM, ``do_sample`` is not looked at: a request without a temperature samples with the
    file's, or with 1. With ``generation_config`` "none", not "auto", nothing is read. Raises
    `ModelError` if the file cannot be read or holds a value that no request may have.
    """
    path = folder / "generation_config.json"
    if generation_config == "none" or not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        found = {name: values[name] for name in names if values.get(name) is not None}
        SamplingParams(**found)
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(
            f"the sampling defaults in {path} cannot be used: {error}; mend the file, or set "
            "--generation-config none"
        ) from error
    return found


def _check_int(name: str, value: Any) -> None:
    if not _is(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r:.80}", param=name)
    if not -_INT64 <= value < _INT64:
        raise RequestError(f"{name} must be a 64-bit integer, got {value}", param=name)


def _tuple(name: str, values: Any, kind: type, what: str) -> tuple[Any, ...]:
    """A field that holds several values; ``None`` stands for none."""
    try:
        found = tuple(() if values is None else values)
    except TypeError:
        found = (None,)
    if not all(_is(value, kind) for value in found):
        raise RequestError(f"{name} must hold {what}, got {values!r:.80}", param=name)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is(value: Any, kind: type) -> bool:
    """Return `isinstance`, except that a bool does not count as an int."""
    return isinstance(value, kind) and not isinstance(value, bool)
