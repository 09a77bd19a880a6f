"""The events of answers in an `EngineClient` that metrics count."""

from __future__ import annotations

from collections.abc import Sequence

from razor_dist.protocol.messages import AboutRequest
from razor_dist.protocol.sampling_params import SamplingParams


class Observer:
    """Methods that an `EngineClient` calls about its answers; in this class they do nothing."""

    def submitted(self, ids: Sequence[str], prompt_tokens: int, params: SamplingParams) -> None:
        """Note a prompt, its tokens with its pinned prefix's, and the ids of its answers."""

    def asked_again(self, before: Sequence[str], ids: Sequence[str]) -> None:
        """Note that answers have new ids: they were refused, and are asked for again."""

    def pinned(self, request_id: str) -> None:
        """Note a prefix to be pinned: `Progress` of this id is about no answer."""

    def reading(self, request_id: str) -> None:
        """Note that a context is being read that an answer's prompt continues."""

    def cached(self, request_id: str, tokens: int) -> None:
        """Note how many tokens of a prompt were in the caches before its request."""

    def received(self, message: AboutRequest) -> None:
        """Note a message about an answer."""

    def ended(self, request_id: str, reason: str) -> None:
        """Note an answer's end without a message: "stop" or "length", "abort", or "error"."""
