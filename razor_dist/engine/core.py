"""The engine on rank 0: schedule, run, postprocess."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future

from msgspec.structs import replace
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from razor_dist.config.errors import RequestError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.device import drafts_config
from razor_dist.engine.drafts import Drafts
from razor_dist.engine.draws import Draws, Run
from razor_dist.engine.intake import Intake
from razor_dist.engine.prefill_policy import PrefillPolicy
from razor_dist.engine.rank_stats import RankStats, counters_of, read_stats
from razor_dist.engine.request import Answer, Prefill, Request
from razor_dist.engine.runner import ModelRunner
from razor_dist.engine.scheduler import Scheduler
from razor_dist.engine.time_left import seconds_left
from razor_dist.protocol.counters import Counters, StepSeconds
from razor_dist.protocol.messages import (
    ANY_REQUEST,
    AboutRequest,
    CacheScope,
    Failed,
    Tokens,
    answer_ids,
)
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.protocol.step_plan import Compute, Load, Report, Save, StepPlan, Stop
from razor_dist.protocol.structured_outputs import Grammar, GrammarCompiler

# Seconds between two looks for messages while nothing runs and a grammar is compiled.
_GRAMMAR_SECONDS = 0.02
# Seconds for saving sequences to the prefix store when the ranks are stopped.
_LAST_SECONDS = 1.0


class EngineCore:
    """Turns requests into tokens, one step of all ranks at a time; ``runner`` is rank 0's.

    Requests without a seed get theirs from ``seed``. With the setting ``prefix_cache``, a sequence
    stays in the caches after its end, for later prompts with the same beginning, until other
    sequences need the room. ``load_tokenizer`` is called in a thread, for structured outputs.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        *,
        chunked_prefill_size: int,
        eos_token_ids: tuple[int, ...],
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        load_tokenizer: Callable[[], PreTrainedTokenizerBase | None] = lambda: None,
    ) -> None:
        self.runner, self._clock, self._last_plan = runner, clock, clock()
        self.max_model_len = runner.config.max_tokens  # of prompt and answer together
        self.max_step, self._last_step = config.max_step_ms / 1000, 0.0
        prefill_policy = PrefillPolicy(
            self.max_step,
            runner.comm.size,
            by_priority=config.scheduling_policy == "priority",
            shared=runner.decode == "tensor",
            replayed=runner.graphs is not None,
        )
        self.scheduler = Scheduler(
            runner.config, runner.comm.size, prefill_policy, end_ids=eos_token_ids
        )
        self._drafts: Drafts | None = None
        if (speculative := drafts_config(config, runner.device)) is not None:
            self._drafts = Drafts(speculative, prefill_policy.cost, runner.most_decoded)
            self.scheduler.batch.drafter = self._drafts
        self._requests: dict[str, Request] = {}  # by the ids of their answers, or their own
        self._kept: tuple[int, ...] = ()  # `StepPlan.kept` of the next plan
        self._draws = Draws(runner, eos_token_ids)
        self.grammars = GrammarCompiler(load_tokenizer, runner.shape.vocab_size, eos_token_ids)
        self._intake = Intake(
            runner,
            self.grammars,
            chunked_prefill_size=chunked_prefill_size,
            by_priority=prefill_policy.by_priority,
            seed=seed,
            clock=clock,
        )
        self._prompt_tokens = 0
        self._step_seconds = {"prefill": StepSeconds(), "decode": StepSeconds()}

    @property
    def has_work(self) -> bool:
        return self.scheduler.room.tiers.active or not self.scheduler.idle

    def add(
        self,
        request_id: str,
        prompt: Sequence[int] | Tokens,
        params: SamplingParams,
        *,
        prefix_id: str | None = None,
        pin: bool = False,
        quota: tuple[str, int] | None = None,
        scope: CacheScope = ANY_REQUEST,
    ) -> None:
        """Queue a request.

        Messages about its ``params.n`` answers carry the ids of `answer_ids`. With ``prefix_id``,
        ``prompt`` continues that pinned request: its pages are shared, its streaming caches copied.
        With ``pin``, the prompt is only prefilled, and its caches kept for requests that continue
        it, until it is aborted; ``quota`` bounds the bytes of its owner's. With a prefix, the
        prefix's salt counts and not that of ``scope``.

        Raises `RequestError` if the prompt is empty, holds an unknown token id, does not fit, or
        would wait until a pinned prefix is released; if parameters do not suit model or engine.
        """
        ids = answer_ids(request_id, params.n)
        if not self._requests.keys().isdisjoint(ids):
            raise RequestError(f"request id {request_id!r} is in use", param="id")
        prefix = None if prefix_id is None else self._requests.get(prefix_id)
        if prefix_id is not None and (prefix is None or not prefix.pinned):
            raise RequestError(f"there is no pinned prefix {prefix_id!r}", param="prefix")
        request = self._intake.request(
            request_id, prompt, params, prefix=prefix, pin=pin, scope=scope
        )
        if quota is not None:
            # What was released and is continued still holds its room.
            others = {one for r in self._requests.values() for one in (r, *r.prefixes)}
            self.scheduler.admission.need.check_quota(request, quota, others)
        self.scheduler.add(request)
        self._intake.accepted(request)
        self._requests |= dict.fromkeys([request_id] if pin else ids, request)

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is, and free its caches; unknown ids are ignored."""
        if (request := self._requests.get(request_id)) is None:
            return
        if request.pinned:
            del self._requests[request_id]
            self._run(*self.scheduler.release(request))
        else:
            self._end(next(answer for answer in request.answers if answer.id == request_id))

    def _end(self, answer: Answer, *, keep: bool = True) -> None:
        """End an answer; ``keep`` its caches for later prompts, if they are sound."""
        del self._requests[answer.id]
        self._draws.processors.remove(answer.key)
        self._run(*self.scheduler.end(answer, keep=keep))
        grammar = answer.request.grammar
        if grammar is not None and not answer.request.answers:
            grammar.cancel()

    def _run(self, *plans: StepPlan) -> Tensor | None:
        """Have all ranks carry out plans; return what comes of the last one on this rank."""
        found = None
        for plan in plans:
            plan, self._kept = replace(plan, kept=self._kept), ()
            plan.send(self.runner.comm)
            found = self.runner.execute(plan)
            self._last_plan = self._clock()
        return found

    def step(self) -> list[AboutRequest]:
        """Admit what fits; else schedule, run and postprocess one step. Report what came of it."""
        compiling = self.scheduler.compiling
        if admitted := self._admit():
            return admitted  # now: the first chunk may take long
        moved = self._transfer()
        if (plan := self.scheduler.next()) is None:
            if not moved:
                self._wait(compiling)
            return []
        began = self._clock()
        logits = self._run(plan)
        self.runner.synchronize()
        return self._postprocess(plan, logits, began)

    def _admit(self) -> list[AboutRequest]:
        """Open what fits, and end what waits with a grammar that cannot be compiled."""
        admitted: list[AboutRequest] = []
        for request in list(self.scheduler.waiting):
            if (refusal := request.refusal) is not None:
                for answer in list(request.answers):
                    self._end(answer)
                    admitted.append(Failed.of(answer.id, refusal))
        opened, plans = self.scheduler.admit()
        self._run(*plans)
        prefills = [self.scheduler.prefills[request.key] for request in opened if request.reported]
        return admitted + [prefill.progress(self._clock()) for prefill in prefills]

    def _wait(self, compiling: list[Future[Grammar]]) -> None:
        """Nothing can be computed: wait for the store's writers, or for a grammar.

        ``compiling`` are the grammars that were not ready before this step; they may be by now.
        """
        if self.scheduler.room.tiers.active:
            self.scheduler.room.tiers.pause()
            return
        # A request that waits while nothing runs would have rank 0 spin for ever.
        assert compiling or not self.scheduler.waiting, "the scheduler cannot admit what it took"
        if compiling and not futures.wait(compiling, _GRAMMAR_SECONDS, "FIRST_COMPLETED").done:
            self.idle()

    def _postprocess(
        self, plan: Compute, logits: Tensor | None, began: float
    ) -> list[AboutRequest]:
        """Count what was prefilled, sample the next tokens, and keep copies for later prompts."""
        self._last_step = seconds = self._clock() - began
        self.scheduler.prefill_policy.slowdown = self.runner.slowdown
        step = self.scheduler.done(plan, seconds)
        prefills = any(isinstance(of, Prefill) for of, _ in step)
        self._step_seconds["prefill" if prefills else "decode"].note(seconds)
        messages: list[AboutRequest] = []
        runs: list[Run] = []
        plans: list[StepPlan] = []
        row = 0
        for of, entry in step:
            if isinstance(of, Prefill):
                self._prompt_tokens += len(entry.tokens)
                logprobs = self.runner.prompt_logprobs.get(of.key)
                messages += of.messages(began, self._clock(), logprobs)
                if of.done:
                    plans += self.scheduler.start(of)
                    runs += [Run(answer, row, []) for answer in of.request.answers]
            else:
                runs.append(Run(of, row, entry.tokens[1:].tolist()))
            row += entry.samples
        if runs:
            assert logits is not None
            messages += self._draws.draw(runs, logits)
        drafted = [run for run in runs if run.draft]
        self._kept = tuple(run.drawn for run in drafted)
        if self._drafts is not None:
            for run in drafted:
                self._drafts.verified(len(run.draft), run.accepted)
        # Only now are answers as long as their sequences are on the ranks.
        self._run(*plans)
        for run in runs:
            if run.ends:
                self._end(run.answer, keep=run.sound)
        self._run(*self.scheduler.copies(step))
        return messages

    def _transfer(self) -> bool:
        """Move the next parts to or from host memory and disk, for a part of a step's time.

        While requests run, saving takes an eighth of the last step's time. True if any was moved.
        """
        seconds: dict[type[StepPlan], float] = dict.fromkeys((Load, Save), self.max_step / 4)
        if self.scheduler.running:
            seconds[Save] = min(self.max_step / 4, self._last_step / 8)
        return self.scheduler.room.move(self._run, self._clock, seconds)

    def seconds_left(self) -> dict[str, float]:
        """Estimate for each request the seconds until it ends; any thread may ask."""
        requests = dict.fromkeys(list(self._requests.values()))  # they come and go meanwhile
        return seconds_left(requests, self.scheduler, self._draws)

    @property
    def idle_seconds(self) -> float:
        """Seconds since the ranks carried out a plan."""
        return self._clock() - self._last_plan

    def idle(self) -> list[RankStats]:
        """Hear from every rank, so that none waits for a plan too long; raises as `read_stats`."""
        # All answer, so a stuck one is found: a broadcast alone succeeds while one is stopped.
        table = self._run(Report())
        assert table is not None
        return read_stats(table, self.runner.caches, self.scheduler.on_ranks)

    def stop(self) -> None:
        """End the ranks; what is being saved gets a moment to be whole."""
        self.scheduler.room.drain(self._transfer, _LAST_SECONDS)
        self._run(Stop())

    def stats(self) -> Counters:
        found = counters_of(self.idle(), self.scheduler.room.stats)
        found.running, found.waiting = self.scheduler.active, len(self.scheduler.waiting)
        found.pinned = self.scheduler.room.pinned_elsewhere
        found.prompt_tokens, found.generated_tokens = self._prompt_tokens, self._draws.tokens
        found.step_seconds, found.decode = self._step_seconds, self.runner.decode
        if self._drafts is not None:
            found.spec_decode = self._drafts.counts
        return found
