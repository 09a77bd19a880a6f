"""A request as rank 0 sees it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from razor_dist.engine.messages import Tokens
from razor_dist.engine.sampling_params import SamplingParams
from razor_dist.parallel.zigzag import Chunk


@dataclass(eq=False)
class Request:
    """One prompt on its way to an answer, or to being pinned for others to continue.

    Attributes
    ----------
    id : str
        The frontend's name for it.
    key : int
        The ranks' name for its sequence.
    prompt : Tokens
        ``[n]``, those of ``prefix`` not included.
    max_tokens : int
        Tokens to generate at most; 0 if the prompt is only pinned.
    chunked_prefill_size : int
        Tokens of the prompt that are prefilled together.
    generator : torch.Generator
        Where its random draws come from.
    prefix : Request or None
        A pinned prefix that this one continues.
    chunks : deque of Chunk
        Chunks of the prompt still to be prefilled.
    generated : list of int
        Tokens sampled so far.
    began : float
        When its first chunk began, by the monotonic clock; 0 until then. Before, it waited, be it
        admitted or not: prompts are read one after the other.
    continued_by : int
        Requests, waiting or running, that name this one as their prefix.
    released : bool
        The frontend needs this pinned prefix no longer.
    """

    id: str
    key: int
    prompt: Tokens
    params: SamplingParams
    max_tokens: int
    chunked_prefill_size: int
    generator: torch.Generator
    prefix: Request | None = None
    chunks: deque[Chunk] = field(default_factory=deque)
    generated: list[int] = field(default_factory=list)
    began: float = 0.0
    continued_by: int = 0
    released: bool = False

    @property
    def begin(self) -> int:
        """Position of the prompt's first token."""
        return 0 if self.prefix is None else self.prefix.end

    @property
    def end(self) -> int:
        """Position after the prompt's last token."""
        return self.begin + len(self.prompt)

    @property
    def total(self) -> int:
        """Tokens to reserve caches for, the prefix's included."""
        return self.end + self.max_tokens

    @property
    def prefilled(self) -> bool:
        """Whether the whole prompt is in the caches; meaningful once admitted."""
        return not self.chunks

    @property
    def pinned(self) -> bool:
        """Whether the prompt is prefilled for others to continue."""
        return self.max_tokens == 0
