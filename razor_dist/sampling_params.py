"""How the next token is chosen and when a request ends."""

from __future__ import annotations

from dataclasses import dataclass

from razor_dist.errors import RequestError

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one request, with the names vLLM's users know.

    Parameters
    ----------
    max_tokens : int or None
        Tokens to generate at most; ``None`` means as many as the context holds.
    temperature : float
        0 is greedy.
    top_p : float
        Nucleus mass in (0, 1].
    top_k : int
        Keep the ``top_k`` likeliest tokens; 0 or -1 keeps all.
    seed : int or None
        Makes the request's draws repeatable.
    stop : tuple of str
        Strings that end the text; they are not part of it.
    stop_token_ids : tuple of int
        Tokens that end the request, besides the model's end-of-sequence tokens.
    ignore_eos : bool
        Go on after an end-of-sequence token.
    logprobs : int or None
        Return the chosen token's log-probability and those of this many likeliest tokens.
    prompt_logprobs : int or None
        The same for every prompt token but the first.

    Raises
    ------
    RequestError
        If a value is out of range; ``param`` names the field.
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

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(
                f"max_tokens must be at least 1, got {self.max_tokens}", param="max_tokens"
            )
        if not 0.0 <= self.temperature <= 2.0:
            raise RequestError(
                f"temperature must be between 0 and 2, got {self.temperature}", param="temperature"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p}", param="top_p")
        if self.top_k < -1:
            raise RequestError(f"top_k must be -1, 0 or positive, got {self.top_k}", param="top_k")
        if any(not s for s in self.stop):
            raise RequestError("stop must not contain an empty string", param="stop")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise RequestError(
                    f"{name} must be between 0 and {MAX_LOGPROBS}, got {value}", param=name
                )
