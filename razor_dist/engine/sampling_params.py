"""Sampling settings of a request, and the defaults that a model brings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from razor_dist.config.errors import ModelError, RequestError

# Values for some of `SamplingParams`' fields, by name.
SamplingDefaults = Mapping[str, Any]

MAX_LOGPROBS = 20
# Integers travel to rank 0 in msgpack and to the generators as int64.
_INT64 = 2**63
# Fields, what holds of their values, and how that is said.
_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("max_tokens", lambda n: n >= 1, "at least 1"),
    ("temperature", lambda t: 0.0 <= t <= 2.0, "between 0 and 2"),
    ("top_p", lambda p: 0.0 < p <= 1.0, "in (0, 1]"),
    ("top_k", lambda k: k >= -1, "-1, 0 or positive"),
    ("logprobs", lambda n: 0 <= n <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
    ("prompt_logprobs", lambda n: 0 <= n <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one request, with the names vLLM's users know.

    ``max_tokens``       tokens to generate at most; None means as many as the context holds
    ``temperature``      0 is greedy, and so is what lies below 1e-5
    ``top_p``            nucleus mass in (0, 1]
    ``top_k``            keep the ``top_k`` likeliest tokens; 0 or -1 keeps all
    ``seed``             makes the request's draws repeatable
    ``stop``             strings that end the text; they are not part of it
    ``stop_token_ids``   tokens that end the request, besides the model's end-of-sequence tokens
    ``ignore_eos``       go on after an end-of-sequence token
    ``logprobs``         return the chosen token's log-probability and those of this many likeliest
    ``prompt_logprobs``  the same for every prompt token but the first
    ``priority``         lower numbers go first, under ``scheduling_policy: priority``

    Raises `RequestError` for a value of the wrong type or out of range; ``param`` names the field.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple("stop", stop, str, "strings"))
        ids = _tuple("stop_token_ids", self.stop_token_ids, int, "token ids")
        object.__setattr__(self, "stop_token_ids", ids)
        self._check_types()
        for name, holds, range_ in _RANGES:
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise RequestError(f"{name} must be {range_}, got {value}", param=name)
        if any(not s for s in self.stop):
            raise RequestError("stop must not contain an empty string", param="stop")

    def _check_types(self) -> None:
        """Refuse what would pass the comparisons and fail in the ranks, such as 25.0 for 25."""
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise RequestError(f"{name} must be a number, got {value!r:.80}", param=name)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(
                f"ignore_eos must be True or False, got {self.ignore_eos!r:.80}", param="ignore_eos"
            )
        _check_int("top_k", self.top_k)
        _check_int("priority", self.priority)
        for name in ("max_tokens", "seed", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value)
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token)


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
        names = ("temperature", "top_p", "top_k")
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


def _is(value: Any, kind: type) -> bool:
    """Return `isinstance`, except that a bool does not count as an int."""
    return isinstance(value, kind) and not isinstance(value, bool)
