"""Sampling settings of a request, and the defaults that a model brings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator
from pydantic.dataclasses import dataclass

from razor_dist.config.errors import ModelError, RequestError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.validation import STRICT, explained
from razor_dist.models.smollm2 import NAME as EMBEDDED
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


def _several(value: Any) -> Any:
    """Return one string or several values as a tuple; None stands for none."""
    if isinstance(value, str | None):
        return () if value is None else (value,)
    return tuple(value) if isinstance(value, Iterable) else value


def _constraint(value: object) -> StructuredOutputsParams | GrammarText | None:
    return value if isinstance(value, GrammarText) else StructuredOutputsParams.of(value)


_Int64 = Annotated[int, Field(ge=-_INT64, le=_INT64 - 1)]
_Logprobs = Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


@explained(error=RequestError)
@dataclass(frozen=True, config=STRICT)
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

    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    max_tokens: Annotated[int | None, Field(ge=1, le=_INT64 - 1)] = 16
    min_tokens: Annotated[int, Field(ge=0, le=_INT64 - 1)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=_INT64 - 1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    logit_bias: Annotated[
        Mapping[_Int64, _Bias] | None, Field(title="a mapping of token ids to numbers")
    ] = None
    structured_outputs: Annotated[
        StructuredOutputsParams | GrammarText | None, PlainValidator(_constraint)
    ] = None
    seed: Annotated[
        int | None,
        Field(ge=-_INT64, le=_INT64 - 1),
        AfterValidator(lambda seed: None if seed == -1 else seed),  # as in vLLM and llama-server
    ] = None
    stop: Annotated[
        tuple[_Stop, ...],
        Field(max_length=MAX_STOPS, title="a string or a list of strings"),
        BeforeValidator(_several),
    ] = ()
    stop_token_ids: Annotated[
        tuple[_Int64, ...],
        Field(max_length=MAX_STOP_IDS, title="a list of token ids"),
        BeforeValidator(_several),
    ] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: _Logprobs = None
    prompt_logprobs: _Logprobs = None
    return_sources: Annotated[int, Field(ge=0, le=MAX_SOURCES)] = 0
    repetition_detection: Annotated[
        RepetitionDetectionParams | None, PlainValidator(RepetitionDetectionParams.of)
    ] = None
    priority: _Int64 = 0
    fit_max_tokens: bool = False

    def __post_init__(self) -> None:
        # Errors are of the fields that an endpoint may call otherwise.
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"max_tokens must be at least min_tokens ({self.min_tokens}), "
                f"got {self.max_tokens}",
                param="max_tokens",
            )
        if self.min_tokens and self.structured_outputs is not None:
            raise RequestError(
                "structured_outputs excludes min_tokens: what matches may be shorter",
                param="structured_outputs",
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
