"""A request as rank 0 sees it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import torch

from razor_dist.parallel.zigzag import Wave
from razor_dist.sampling_params import SamplingParams


@dataclass
class Request:
    """One prompt on its way to an answer.

    Attributes
    ----------
    id : str
        The front's name for it.
    key : int
        The ranks' name for its sequence.
    prompt : list of int
        Token ids.
    max_tokens : int
        Tokens to generate at most.
    waves : deque of Wave
        Waves of the prompt still to be prefilled.
    generated : list of int
        Tokens sampled so far.
    """

    id: str
    key: int
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    wave_tokens: int
    generator: torch.Generator
    waves: deque[Wave] = field(default_factory=deque)
    generated: list[int] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def total(self) -> int:
        """Tokens to reserve caches for."""
        return len(self.prompt) + self.max_tokens

    @property
    def prefilled(self) -> bool:
        """Whether the whole prompt is in the caches."""
        return not self.waves
