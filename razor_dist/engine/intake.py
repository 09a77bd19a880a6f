"""From what a frontend asks to requests; checked again, since rank 0 trusts no frontend."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from razor_dist.config.errors import RequestError
from razor_dist.engine.request import Answer, Request
from razor_dist.engine.runner import ModelRunner
from razor_dist.prefix.index import Namespace
from razor_dist.protocol.messages import CacheScope, Tokens, answer_ids, as_tokens
from razor_dist.protocol.repetition import RepetitionDetector
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.protocol.structured_outputs import GrammarCompiler

# With log-probabilities of the prompt, every position's logits are computed: short chunks keep
# that many rows of the vocabulary's size in bounds.
_LOGPROB_CHUNK_TOKENS = 512


class Intake:
    """Makes requests for an engine around ``runner``, rank 0's.

    Requests without a seed get theirs from ``seed``. Without ``by_priority`` a priority is refused.
    """

    def __init__(
        self,
        runner: ModelRunner,
        grammars: GrammarCompiler,
        *,
        chunked_prefill_size: int,
        by_priority: bool,
        seed: int,
        clock: Callable[[], float],
    ) -> None:
        self._runner, self._grammars = runner, grammars
        self.max_model_len = runner.config.max_tokens  # of prompt and answer together
        self._chunked_prefill_size, self._by_priority = chunked_prefill_size, by_priority
        self._clock = clock
        self._next_key = 0
        self._seeds = torch.Generator().manual_seed(seed)

    def request(
        self,
        request_id: str,
        prompt: Sequence[int] | Tokens,
        params: SamplingParams,
        *,
        prefix: Request | None,
        pin: bool,
        scope: CacheScope,
    ) -> Request:
        """Make a request and its answers, none if it is to be pinned.

        Raises `RequestError` if the prompt is empty, holds an unknown token id or does not fit, or
        if parameters do not suit model or engine.
        """
        tokens = as_tokens(prompt, self._runner.shape.vocab_size)
        if not len(tokens):
            raise RequestError("the prompt must hold at least one token", param="prompt")
        self._check(params)
        end = len(tokens) + (0 if prefix is None else prefix.end)
        max_tokens = self._max_tokens(end, params, pin=pin)
        chunked_prefill_size = self._chunked_prefill_size
        if params.prompt_logprobs is not None:
            chunked_prefill_size = min(chunked_prefill_size, _LOGPROB_CHUNK_TOKENS)
        namespace: Namespace
        if prefix is None:
            # Keys of other rotary frequencies, if there are any, are of no use.
            most = self.max_model_len if pin else end + max_tokens
            namespace = (scope.salt, self._runner.position_mark(most - 1))
        else:
            namespace = prefix.namespace
        request = Request(
            id=request_id,
            key=self._next_key,
            prompt=tokens,
            params=params,
            max_tokens=max_tokens,
            chunked_prefill_size=chunked_prefill_size,
            prefix=prefix,
            namespace=namespace,
            cache_prompt=scope.shared,
            arrived=self._clock(),
        )
        if not pin:
            repetition = params.repetition_detection
            request.answers = [
                Answer(
                    id=answer_id,
                    key=request.key + index,
                    request=request,
                    params=params.for_answer(index),
                    repetition=None if repetition is None else RepetitionDetector(repetition),
                )
                for index, answer_id in enumerate(answer_ids(request_id, params.n))
            ]
        return request

    def accepted(self, request: Request) -> None:
        """Give a request that is queued what others must not use up: keys, seeds, a grammar."""
        self._next_key += max(1, len(request.answers))
        fitted = request.params.fit_max_tokens and not request.pinned
        if fitted and request.prefix is None:  # it may be shorter now
            salt, _ = request.namespace
            request.namespace = salt, self._runner.position_mark(request.total - 1)
        for answer in request.answers:
            seed = answer.params.seed
            if seed is None:
                seed = int(torch.randint(2**62, (1,), generator=self._seeds))
            answer.seed = seed
        if request.answers and request.params.structured_outputs is not None:
            request.grammar = self._grammars.compile(request.params.structured_outputs)

    def _check(self, params: SamplingParams) -> None:
        """Raise `RequestError` if parameters do not suit model or engine."""
        vocabulary = self._runner.shape.vocab_size
        as_tokens(params.stop_token_ids, vocabulary, "stop_token_ids")
        as_tokens(list(params.logit_bias or ()), vocabulary, "logit_bias")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > vocabulary:
                raise RequestError(f"the vocabulary holds {vocabulary} tokens only", param=name)
        if params.priority and not self._by_priority:
            raise RequestError(
                "priority is heard only if the engine runs under scheduling_policy: priority",
                param="priority",
                code="priority_not_heard",
            )
        if params.return_sources and not self._runner.source_heads.count:
            raise RequestError(
                "return_sources asks the strongest retrieval heads, and this engine knows of none: "
                "it runs with attention: streaming, or full without a head map",
                param="return_sources",
            )

    def _max_tokens(self, prompt_tokens: int, params: SamplingParams, *, pin: bool) -> int:
        """Tokens to generate at most, if the prompt and they fit the context."""
        room = self.max_model_len - prompt_tokens
        wanted = 1 if pin or params.max_tokens is None else params.max_tokens
        if room < wanted:
            what = (
                f"the pinned prefix has {prompt_tokens} and leaves no room to continue it"
                if pin
                else f"the prompt has {prompt_tokens} and {wanted} are to be generated, "
                f"{prompt_tokens + wanted} in all"
            )
            raise RequestError(
                f"the context holds {self.max_model_len} tokens; {what}",
                param="max_tokens" if room > 0 else "prompt",
                code="context_length_exceeded",
            )
        if pin:
            return 0
        return room if params.max_tokens is None else params.max_tokens
