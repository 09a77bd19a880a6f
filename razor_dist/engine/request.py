"""A request on rank 0: its prompt, its prefill, and its answers, each while it lasts.

`Request` is the prompt and what was asked of it, and is there in every phase. `Prefill` exists from
admission until the prompt is in the caches, and `Answer` from the beginning until its last token.
What a sequence has of the caches is in `razor_dist.cache.accounting`, by the sequence's key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property

import numpy as np
from torch import Tensor

from razor_dist.config.errors import EngineError, RequestError
from razor_dist.prefix.index import Entry, Namespace
from razor_dist.protocol.messages import AboutRequest, Progress, PromptLogprobs, Tokens
from razor_dist.protocol.repetition import RepetitionDetector
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.protocol.structured_outputs import Grammar


class Phase(Enum):
    """The phases of a request, in their order; it never goes back."""

    WAITING = auto()  # queued: no rank knows of it
    PREFILL = auto()  # admitted: its sequence is open, and `Prefill` says how far its prompt is
    PREFILLED = auto()  # its answers run, or it is pinned for others to continue
    ENDED = auto()


# True while something that a request waits for is to come, given the prefills that go on.
Awaited = Callable[["Sequence[Prefill]"], bool]


@dataclass(eq=False)
class Request:
    """One prompt, on its way to one or several answers, or to being pinned.

    Its prompt is prefilled into one sequence, which the first answer goes on with; the others fork
    from it.
    """

    id: str  # the frontend's name for it
    key: int  # the ranks' name for the sequence that its prompt is prefilled into
    prompt: Tokens  # [n], those of ``prefix`` not included
    params: SamplingParams
    max_tokens: int  # of each answer; 0 if the prompt is pinned
    chunked_prefill_size: int  # the most tokens of the prompt that are prefilled together
    prefix: Request | None = None  # a pinned prefix that this one continues
    namespace: Namespace = (None, 0)  # prompts of different ones share no caches
    cache_prompt: bool = True  # False: as `CacheScope.shared`
    arrived: float = 0.0  # when it was queued, by the scheduler's clock
    answers: list[Answer] = field(default_factory=list)  # those that have not ended
    grammar: Future[Grammar] | None = None  # what every answer must match
    # All ranks compute the whole prompt, in one step, unless part of it is found in the caches.
    short: bool = False
    # While it waits: the prefill or load that is to cache its beginning; and the nodes that were
    # loaded for it.
    awaits: Awaited | None = None
    loaded: list[Entry] = field(default_factory=list)
    released: bool = False  # a pinned prefix that only waiting requests need, to continue it
    # That of ``params``, or an earlier one of a request that waits for this prefix.
    priority: int = field(init=False)
    # Of a pinned prefix: `Add.quota`, and `Progress.nbytes`.
    quota: tuple[str, int] | None = None
    nbytes: int = 0
    phase: Phase = Phase.WAITING

    def __post_init__(self) -> None:
        assert len(self.prompt) and self.max_tokens >= 0 and self.chunked_prefill_size > 0
        assert self.prefix is None or (self.prefix.pinned and not self.prefix.released)
        self.priority = self.params.priority

    def enter(self, phase: Phase) -> None:
        ends = phase is Phase.ENDED and self.phase is not Phase.ENDED
        assert ends or phase.value == self.phase.value + 1, f"from {self.phase} to {phase}"
        self.phase = phase

    @property
    def waits(self) -> bool:
        return self.phase is Phase.WAITING

    @property
    def ended(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def pinned(self) -> bool:
        """True if the prompt is prefilled for others to continue."""
        return self.max_tokens == 0

    @property
    def uses_prefix_cache(self) -> bool:
        """True if it may begin from cached tokens, and copies be kept while it is prefilled."""
        # Only tokens that are prefilled have log-probabilities.
        return self.cache_prompt and self.params.prompt_logprobs is None

    @property
    def reported(self) -> bool:
        """True if the frontend waits for messages about its prompt, by `id`."""
        if self.pinned:
            return not self.released
        return any(answer.key == self.key for answer in self.answers)

    @property
    def ready(self) -> bool:
        """True unless its grammar is still to be compiled, or cannot be."""
        return self.grammar is None or (self.grammar.done() and self.refusal is None)

    @property
    def refusal(self) -> RequestError | EngineError | None:
        """Why its grammar cannot be compiled, once that is known."""
        if self.grammar is None or not self.grammar.done():
            return None
        error = self.grammar.exception()
        assert error is None or isinstance(error, RequestError | EngineError)
        return error

    @property
    def forks(self) -> list[Answer]:
        """The answers that fork from its sequence when the prompt is prefilled."""
        return [answer for answer in self.answers if answer.key != self.key]

    @property
    def base(self) -> int:
        """Position of the prompt's first token."""
        return 0 if self.prefix is None else self.prefix.end

    @property
    def end(self) -> int:
        """Position after the prompt's last token."""
        return self.base + len(self.prompt)

    @property
    def total(self) -> int:
        """Tokens to reserve caches for, the prefix's included."""
        return self.end + self.max_tokens

    @cached_property
    def tokens(self) -> Tokens:
        """The prompt's tokens and those before it."""
        if self.prefix is None:
            return self.prompt
        return np.concatenate([self.prefix.tokens, self.prompt])

    @property
    def prefixes(self) -> Iterator[Request]:
        """The request that it continues, the one that this continues, and so on."""
        prefix = self.prefix
        while prefix is not None:
            yield prefix
            prefix = prefix.prefix


@dataclass(eq=False)
class Prefill:
    """An admitted request whose prompt is not yet in the caches."""

    request: Request
    begin: int  # position of the first token to prefill: those before were found in the caches
    short: bool  # all ranks compute the whole prompt, in one step
    # Ascending positions where prefill stops, so that a copy of the caches is kept as of there.
    checkpoints: list[int] = field(default_factory=list)
    optional: set[int] = field(default_factory=set)  # checkpoints kept only if there is room
    instead: bool = False  # its sequence has taken the place of the cached one that it begins with
    whole_window: bool = True  # every rank has the window at `position`: chunks are not needed
    # When its first step began, by the monotonic clock; None until then: it waits, though admitted.
    began: float | None = None
    saved_at: float = 0.0  # when its caches last began to go to disk, or could not
    to_disk: int = 0  # the latest checkpoint that is for the disk alone
    copied: int | None = None  # the key of the copy as of there

    def __post_init__(self) -> None:
        request = self.request
        assert request.base <= self.begin < request.end
        self.end = request.end  # `cut` moves it, for a prompt whose request was aborted
        self.position = self.begin  # after the last prefilled token

    @property
    def key(self) -> int:
        return self.request.key

    @property
    def remaining(self) -> Tokens:
        """The tokens that are still to be prefilled."""
        base = self.request.base
        return self.request.prompt[self.position - base : self.end - base]

    @property
    def done(self) -> bool:
        return self.position == self.end

    @property
    def chunks_end(self) -> int:
        """Position up to which ranks store it as if it were prefilled in chunks."""
        return self.begin if self.short else self.end

    @property
    def tokens(self) -> Tokens:
        """The tokens that are in the caches."""
        return self.request.tokens[: self.position]

    def progress(self, now: float) -> Progress:
        """Return the message that says how far it is at ``now``, by the clock of `began`."""
        request = self.request
        return Progress(
            request.id,
            self.position,
            total=request.end,
            prefix=request.base,
            cached=self.begin,
            seconds=0.0 if self.began is None else now - self.began,
            nbytes=request.nbytes,
        )

    def messages(self, began: float, now: float, logprobs: Tensor | None) -> list[AboutRequest]:
        """Report what was prefilled in a step from ``began`` to ``now``."""
        first = self.began is None
        if first:
            self.began = began
        if not self.request.reported:
            return []
        if logprobs is None:
            return [self.progress(now)]
        return [PromptLogprobs.of(self.request.id, first, logprobs.tolist()), self.progress(now)]

    def advance(self, tokens: int) -> None:
        self.position += tokens
        assert self.begin < self.position <= self.end

    def stop_at(self, position: int, *, optional: bool = False) -> None:
        """Have a copy of the caches kept as of a position that is still to come."""
        assert self.position < position < self.end
        if not optional:
            self.optional.discard(position)
        elif position not in self.checkpoints:
            self.optional.add(position)
        self.checkpoints = sorted({*self.checkpoints, position})

    def cut(self, end: int) -> None:
        """Give up what comes after a position."""
        assert self.position < end <= self.end
        self.end = end
        self.checkpoints = [stop for stop in self.checkpoints if stop < end]


@dataclass(eq=False)
class Answer:
    """One answer to a request's prompt; once this is prefilled, a sequence of its own."""

    id: str  # the frontend's name for it
    key: int  # the ranks' name for its sequence
    request: Request
    params: SamplingParams  # with a seed of its own
    repetition: RepetitionDetector | None = None  # ends it in a loop
    seed: int = 0  # of its random draws
    generated: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens in the caches: the last generated one is sampled, and not yet computed."""
        return self.request.end + max(0, len(self.generated) - 1)

    @property
    def tokens(self) -> Tokens:
        """The tokens that are in the caches."""
        return np.concatenate([self.request.tokens, np.array(self.generated[:-1], np.int32)])
