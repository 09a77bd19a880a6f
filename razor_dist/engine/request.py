"""A request as rank 0 sees it."""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from razor_dist.cache.accounting import Allocation
from razor_dist.protocol.messages import Tokens
from razor_dist.protocol.repetition import RepetitionDetector
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.protocol.structured_outputs import Grammar


@dataclass(eq=False)
class Request:
    """One prompt on its way to an answer, or to being pinned for others to continue.

    A prompt with several answers is a request for each: the first reads the prompt, and its
    ``siblings``, admitted with it and with no prompt of their own, fork from it when it is read.
    """

    id: str  # the frontend's name for it
    key: int  # the ranks' name for its sequence
    prompt: Tokens  # [n], those of ``prefix`` not included
    params: SamplingParams
    max_tokens: int  # to generate at most; 0 if the prompt is only pinned
    chunked_prefill_size: int  # the most tokens of the prompt that are prefilled together
    generator: torch.Generator  # of its random draws
    # What the answer must match; the siblings' is the same.
    grammar: Future[Grammar] | None = None
    repetition: RepetitionDetector | None = None  # of its answer, which ends in a loop
    prefix: Request | None = None  # a pinned prefix that this one continues
    sound: bool = True  # False if an error ended it: its caches may hold anything
    namespace: Hashable = None  # prompts of different ones share no caches
    cached: int = 0  # tokens that were found in the prefix cache when it was admitted
    allocation: Allocation | None = None  # what it has of the caches; once admitted
    loading: int | None = None  # the sequence into which its beginning was or is to be loaded
    # Ascending positions, where reading stops for the caches to be kept as of there.
    stops: list[int] = field(default_factory=list)
    spare: set[int] = field(default_factory=set)  # of them, those kept only in room to spare
    short: bool = False  # all ranks compute the whole prompt, in one step
    prefilled_to: int = 0  # position after its last prefilled token; meaningful once admitted
    whole: bool = True  # every rank has the window at `prefilled_to`: it may go on without chunks
    arrived: float = 0.0  # when it was queued, by the scheduler's clock
    generated: list[int] = field(default_factory=list)
    # When its first chunk began, by the monotonic clock; 0 until then. Before, it waited, be it
    # admitted or not.
    began: float = 0.0
    saved_at: float = 0.0  # when its caches last began to go to disk while it was read
    continued_by: int = 0  # requests, waiting or running, that name this one as their prefix
    # The frontend needs it no longer, but those that continue it do.
    released: bool = False
    siblings: list[Request] = field(default_factory=list)  # that have not forked yet

    @property
    def ready(self) -> bool:
        """True unless its grammar is still to be compiled."""
        return self.grammar is None or self.grammar.done()

    @property
    def base(self) -> int:
        """Position of the prompt's first token."""
        return 0 if self.prefix is None else self.prefix.end

    @property
    def begin(self) -> int:
        """Position of the first token that is read."""
        return max(self.base, self.cached)

    @property
    def end(self) -> int:
        """Position after the prompt's last token."""
        return self.base + len(self.prompt)

    @property
    def unread(self) -> Tokens:
        """The prompt's tokens that are still to be read; meaningful once admitted."""
        return self.prompt[self.prefilled_to - self.base :]

    @cached_property
    def tokens(self) -> Tokens:
        """The prompt's tokens and those before it."""
        if self.prefix is None:
            return self.prompt
        return np.concatenate([self.prefix.tokens, self.prompt])

    def cut(self, end: int) -> None:
        """Give up what comes after a position."""
        self.prompt = self.prompt[: end - self.base]
        self.stops = [stop for stop in self.stops if stop < end]
        self.__dict__.pop("tokens", None)

    @property
    def length(self) -> int:
        """Tokens in the caches; an answer's last token is sampled and not read."""
        return self.prefilled_to + max(0, len(self.generated) - 1)

    @property
    def chunks_end(self) -> int:
        """Position up to which ranks store it as if it were read in chunks."""
        return self.begin if self.short else self.end

    @property
    def total(self) -> int:
        """Tokens to reserve caches for, the prefix's included."""
        return self.end + self.max_tokens

    @property
    def prefilled(self) -> bool:
        """True once the whole prompt is in the caches; meaningful once admitted."""
        return self.prefilled_to == self.end

    @property
    def unforked(self) -> bool:
        """True for a sibling until the first one's prompt is read; no rank knows of it."""
        return not len(self.prompt) and not self.prefilled

    @property
    def pinned(self) -> bool:
        """True if the prompt is prefilled for others to continue."""
        return self.max_tokens == 0


def prefixes(request: Request) -> list[Request]:
    """The request that another continues, the one that this continues, and so on."""
    return [] if request.prefix is None else [request.prefix, *prefixes(request.prefix)]
