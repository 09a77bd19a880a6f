"""The prefill policy: which prompt gets the next chunk, and how long the chunk is.

A long prompt takes hundreds of chunks, and a request that comes after it must not wait for all of
them. Prompts with the least remaining work go first, and the oldest prompt gets at least half of
the time: a short question overtakes a million tokens, and delays them by its own time only.

Prompts that fit into one step join the next step, and do not count as a turn. Beside a long prompt
they have half of the step, or what the first of them needs; the rest is a piece of the long prompt.

A chunk has a large fixed cost on several ranks. With tensor-parallel decode a long prompt may be
prefilled without chunks, where that is no slower (`PrefillPolicy.take`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from razor_dist.engine.request import Answer, Prefill, Request
from razor_dist.engine.step_cost import StepCost, StepWork

# Most tokens of a rank in a step, of prompts that join it whole or go on without a chunk. `plan`
# counts no activations for them.
_JOINING = 512
# Least speed, relative to chunks, at which a long prompt is prefilled without chunks beside other
# requests. Below 1, since steps become shorter; switching between the two costs something.
_WITHOUT_CHUNKS = 0.85
# Length of a chunk while no request waits, in multiples of `max_step`. It stays bounded because a
# request may arrive.
_LONGER = 4
# Such a chunk is longer if the fixed cost of a step would be more than this share of it.
_MOST_IDLE = 0.15
# It is lengthened further, down to this share,
_IDLE = 0.05
# but to no more than this share of the time between two arrivals: frequent requests wait less.
_ALONE = 0.25
# Every other such chunk is shorter by this factor, and so is one whose length follows from the
# fixed cost of a step, and a piece that is as long as it may be without chunks: the fit cannot
# separate fixed from per-token cost if all are equally long.
_VARIED = 0.7
# A rest of a prompt that takes up to this many times the planned chunk is prefilled in one piece.
_LAST_PIECE = 1.25
# A prompt that takes up to this many `max_step` is prefilled whole: otherwise its first token would
# take several more steps.
_WHOLE = 1.5
# Recent steps with prompts' tokens that bound the next chunk.
_RECENT = 8


class PrefillPolicy:
    """Chooses among the prompts that are being prefilled by ``world_size`` ranks.

    ``max_step`` is in seconds. With ``by_priority``, requests of a lower ``priority`` number go
    before all others. The ranks have ``shared`` out what is not a chunk, or each computes all.
    Steps that only decode are ``replayed`` (`StepCost`).
    """

    def __init__(
        self,
        max_step: float,
        world_size: int = 1,
        *,
        by_priority: bool = False,
        shared: bool = False,
        replayed: bool = False,
    ) -> None:
        self.cost, self._ranks = StepCost(world_size, replayed=replayed), world_size
        self._shared = shared and world_size > 1
        # How often the work of a short prompt is done, among all ranks.
        self.repeats = 1 if shared else world_size
        self._max_step, self.by_priority = max_step, by_priority
        # Factor by which other programs slow down steps now. Cutting a prompt that nothing waits
        # for into more chunks because of it would slow it down once more: each of the some 400
        # parallel regions of a step waits for the thread that has no core.
        self.slowdown = 1.0
        # Seconds that others were served since the oldest prompt was; and the oldest prompt's key.
        self._debt, self._oldest = 0.0, -1
        # Seconds of chunks since another request came, and between the last two that came.
        self._alone = self._between = 0.0
        self._varied = False
        # Of recent steps with any: tokens of prompts, and seconds.
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RECENT)

    def is_short(self, request: Request, begin: int) -> bool:
        """True if all ranks may as well compute all of a prompt from ``begin`` on.

        That repeats its work on all ranks but one, unless they share it. The repeated work must
        take no longer than what a chunk adds to a step whatever its length, transfers above all.
        """
        most, n = min(_JOINING, request.chunked_prefill_size), request.end - begin
        if n > most or request.params.prompt_logprobs is not None:
            return False
        repeated = (self.repeats - 1) * self.cost.work(n, 0)
        fits = repeated + self.cost.work(n, begin) <= _WHOLE * self._max_step
        return fits and repeated <= self.cost.chunk

    def is_quick(self, tokens: int, context: int) -> bool:
        """True if ``tokens`` after ``context`` others are prefilled in one `max_step`."""
        return self.cost.work(tokens, context) <= self._max_step

    def joins(self, prompt: Prefill) -> bool:
        """True if a prompt is prefilled whole in the next step that has room for it."""
        n = prompt.end - prompt.begin
        if prompt.short or prompt.position > prompt.begin:
            return prompt.short
        most = min(_JOINING * self._ranks, prompt.request.chunked_prefill_size)
        work = self.work(prompt, n, sharded=not prompt.short)
        return n <= most and work <= _WHOLE * self._max_step

    def work(self, prompt: Prefill, tokens: int, *, sharded: bool) -> float:
        """Estimate the seconds that a prompt's next ``tokens`` add to a step."""
        # What is before them stays sharded.
        repeated = 0 if sharded else self.repeats - 1
        return self.cost.work(tokens, prompt.position) + repeated * self.cost.work(tokens, 0)

    def together(
        self, prompts: Sequence[Prefill], *, part: float = 1.0
    ) -> tuple[list[Prefill], float]:
        """Choose from those that may join a step; return them and the seconds that they add to it.

        They are the oldest that fit this ``part`` of ``max_step``, one at least. ``prompts`` come
        in the order in which they were admitted.
        """
        chosen: list[Prefill] = []
        seconds = tokens = 0.0
        for prompt in self.first_class(prompts):
            n = prompt.end - prompt.begin
            work = self.work(prompt, n, sharded=not prompt.short)
            work += self.cost.part(sharded=not prompt.short)
            tokens += n if prompt.short else n / self._ranks
            if chosen and (seconds + work > part * self._max_step or tokens > _JOINING):
                break
            chosen.append(prompt)
            seconds += work
        return chosen, seconds

    def choose(self, prompts: Sequence[Prefill]) -> Prefill:
        """Return the prompt to read from next.

        That is the oldest one while it has least to do, or has had less time than the others since
        it became the oldest; or else of the others the one with least to do, less the time that it
        has waited.
        """
        prompts = self.first_class(prompts)
        oldest = self._oldest_of(prompts)
        if self._debt > 0 or self._left(oldest) <= min(map(self._left, prompts)):
            return oldest
        others = [prompt for prompt in prompts if prompt is not oldest]
        # All of them wait until now, so that the later one arrived, the less it has waited.
        return min(
            others, key=lambda prompt: (self._left(prompt) + prompt.request.arrived, prompt.key)
        )

    def take(
        self,
        prompt: Prefill,
        others: Sequence[Prefill],
        *,
        answering: Sequence[int] = (),
        joined: float = 0.0,
        able: bool = True,
    ) -> tuple[float, bool]:
        """Return the most tokens of a prompt to prefill next, and whether as a sharded chunk.

        The piece takes one `max_step` while sequences decode (``answering`` has their lengths) or
        one of the ``others`` is nearly prefilled; otherwise cutting it would be mere overhead.
        Prompts that join the step have taken ``joined`` seconds of it, but at least half is left.
        The piece takes at least as long as the fixed cost of a step. Beside other requests it is no
        longer than recent steps have shown to fit (`_shown`).

        Beside other requests, no chunk is used if decode is tensor-parallel, the prompt is ``able``
        to, and the speed is about the same. If the part before it must still be a chunk
        (`Prefill.whole_window`), the piece has a chunk's length.
        """
        self._varied = not self._varied
        step, longer = self._max_step, _LONGER * self._max_step
        varied = _VARIED if self._varied else 1.0
        beside = len(answering) > 0 or any(self._left(other) <= longer for other in others)
        if beside:
            self._somebody_came()
        else:
            longer *= self.slowdown
            base = self.cost.seconds(0, prompt.position)
            between = max(self._alone, self._between)
            step = max(longer, base / _MOST_IDLE, min(base / _IDLE, _ALONE * between))
            step *= 1 if others else varied
        step -= min(joined, step / 2)

        def extent(sharded: bool) -> tuple[float, float]:
            """Tokens of a chunk, or of what is none, and how many that is in a second."""
            at, part = prompt.position, self.cost.part(sharded=sharded)
            base = self.cost.step(before=at) + part
            company = self.cost.step(len(answering), at + sum(answering)) + part
            tokens, seconds = float(prompt.end - at), _LAST_PIECE * step
            if base + self.cost.work(tokens, at) > seconds:
                seconds = max(step, base + varied * base)
                tokens = self.cost.tokens(seconds - base, at)
            if beside and sharded:
                whole = seconds + joined + company - base
                tokens = min(tokens, self._shown(whole) * (1 - joined / (seconds + joined)))
            most = prompt.request.chunked_prefill_size
            tokens = min(tokens, most if sharded else varied * min(_JOINING, most // self._ranks))
            return tokens, tokens / max(company + self.cost.work(tokens, at), 1e-9)

        tokens, speed = extent(sharded=True)
        if beside and able and self._shared:
            without, speed_without = extent(sharded=False)
            if speed_without >= _WITHOUT_CHUNKS * speed:
                return without if prompt.whole_window else tokens, False
        return tokens, True

    def _shown(self, seconds: float) -> float:
        """Tokens that fit into a step by what recent ones took, whatever the fit says.

        Estimates far from what was seen are wrong where other kernels begin to serve a context.
        ``seconds`` are those of the whole step, as the recent ones are: answers and prompts that
        join it are included. At least half of a step's time is taken to be in proportion to its
        tokens; after a much longer step, such as one for which no request waited, half of the
        tokens that are in proportion are left.
        """
        parts = ((n, seconds / s) for n, s in self._recent)
        return max((n * max(2 * part - 1, part / 2) for n, part in parts), default=math.inf)

    def learn(self, parts: Iterable[tuple[Prefill | Answer, int, bool]], seconds: float) -> None:
        """Learn the cost of a step from its parts: each with its tokens, and if it is sharded."""
        chunks, wholes, answers, before, tokens, pairs, read = 0, 0, 0, 0, 0.0, 0.0, 0
        for of, n, sharded in parts:
            if isinstance(of, Answer):
                # Each token of a run reads what is before it, and has its own logits.
                answers += n
                before += n * of.length
                continue
            read += n
            dealt = sharded and self._ranks > 1
            # What is not sharded may be computed by every rank, but attends to the rank's own part
            # of what is before it.
            times = 1 if sharded else self.repeats
            chunks += dealt
            wholes += not dealt
            before += of.position
            tokens += times * n
            pairs += n * (of.position + times * n / 2)
        if read:
            self._recent.append((read, seconds))
        self.cost.learn(StepWork(1, chunks, wholes, answers, before, tokens, pairs), seconds)

    def took(self, prompts: Sequence[Prefill], served: Prefill, seconds: float) -> None:
        """Note that ``served`` was read from for ``seconds``, while ``prompts`` take turns.

        A prompt that joined the step whole is none of ``prompts`` and takes no turn: the step has a
        piece of one of these as well.
        """
        if not prompts:
            return
        if self._oldest_of(self.first_class(prompts)) is served:
            # What it gets alone or in its turn does not count against it later.
            self._debt = max(0.0, self._debt - seconds)
            self._alone += seconds
        else:
            self._debt += seconds if served in prompts else 0.0
            self._somebody_came()

    def _somebody_came(self) -> None:
        """Note an arrival: the time since the last one, at most twice the time before that."""
        if self._alone:
            most = 2 * self._between or math.inf
            self._alone, self._between = 0.0, min(self._alone, most)

    def first_class(self, prompts: Sequence[Prefill]) -> Sequence[Prefill]:
        """Return those of the first priority, if that is heard."""
        if not self.by_priority or not prompts:
            return prompts
        first = min(prompt.request.priority for prompt in prompts)
        return [prompt for prompt in prompts if prompt.request.priority == first]

    def not_after(self, request: Request, prompts: Sequence[Prefill]) -> Sequence[Prefill]:
        """Return those that ``request`` may wait for: none of a later priority, if that is heard.

        Such a prompt does not go on as long as there are others of an earlier one.
        """
        if not self.by_priority:
            return prompts
        own = request.priority
        return [prompt for prompt in prompts if prompt.request.priority <= own]

    def _left(self, prompt: Prefill) -> float:
        return self.cost.seconds(prompt.end - prompt.position, prompt.position)

    def _oldest_of(self, prompts: Sequence[Prefill]) -> Prefill:
        oldest = min(prompts, key=lambda prompt: (prompt.request.arrived, prompt.key))
        if oldest.key != self._oldest:
            self._oldest, self._debt = oldest.key, 0.0
        return oldest
