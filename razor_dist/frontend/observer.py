"""The events of answers in an `EngineClient` that metrics count."""

from __future__ import annotations

from collections.abc import Sequence

from razor_dist.protocol.messages import AboutRequest
from razor_dist.protocol.sampling_params import SamplingParams


class Observer:
    """Hears of every answer; this one takes no notice."""

    def submitted(self, ids: Sequence[str], prompt_tokens: int, params: SamplingParams) -> None:
        """Note a prompt, with the tokens of its pinned prefix, and the ids of its answers."""

    def asked_again(self, before: Sequence[str], ids: Sequence[str]) -> None:
        """Note that answers have new ids: they were refused, and are asked for in another way."""

    def pinned(self, request_id: str) -> None:
        """Note a prefix that is to be pinned: its `Progress` is no answer's."""

    def reading(self, request_id: str) -> None:
        """Note that a context is read that an answer's prompt continues."""

    def cached(self, request_id: str, tokens: int) -> None:
        """Note how many of a prompt's tokens were in the caches before its request."""

    def received(self, message: AboutRequest) -> None:
        """Note a message about an answer."""

    def ended(self, request_id: str, reason: str) -> None:
        """Note an answer's end without a message: "stop" or "length", "abort", or "error"."""
