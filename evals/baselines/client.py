"""A pressed model in a process of its own, with the methods of `LLM` that evaluations call."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from transformers import PreTrainedTokenizerBase

from razor_dist.config.errors import EngineError
from razor_dist.evals.baselines.presses import PRESSES, BaselineConfig
from razor_dist.evals.process import Child
from razor_dist.frontend.guard import child_environment
from razor_dist.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from razor_dist.models.loader import eos_token_ids
from razor_dist.models.registry import resolve_model
from razor_dist.models.tokenizer import load_tokenizer
from razor_dist.protocol.sampling_params import SamplingParams

_SERVE = "razor_dist.evals.baselines.model:serve"


class PressLLM:
    """Reads one text at a time, keeps what its press keeps, and answers greedily.

    It is a process of its own because kvpress replaces transformers' attention functions, and
    because attention weights of a long text (H2O) may need more memory than there is.
    """

    def __init__(self, config: BaselineConfig) -> None:
        self.config = config
        trust = config.trust_remote_code
        folder = resolve_model(config.model, trust_remote_code=trust)
        self._tokenizer = load_tokenizer(folder, trust_remote_code=trust)
        self._eos = eos_token_ids(folder)
        self._ids = itertools.count()
        self._kept = 0
        threads = {"OMP_NUM_THREADS": str(config.threads_per_rank(1))}
        self._child = Child(_SERVE, config, env=child_environment() | threads)
        self.pids = [self._child.process.pid]
        try:
            self._answered()
        except BaseException:
            self.close()
            raise

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self._tokenizer

    def stats(self) -> Mapping[str, Any]:
        """Return ``kv_bytes_per_rank``: what is kept of the text that was read, on one rank."""
        return {"kv_bytes_per_rank": [self._kept]}

    @contextmanager
    def prefill(self, ids: Sequence[int]) -> Iterator[int]:
        """Read a text until the ``with`` block ends; yields its length, for `generate`."""
        self._kept = self._call("read", list(ids))
        try:
            yield len(ids)
        finally:
            self._kept = 0

    def generate(
        self, prompts: Any, sampling_params: SamplingParams, prefix: int | None = None
    ) -> list[RequestOutput]:
        """Answer prompts that continue what was read, ``{"prompt_token_ids": [...]}`` each.

        Without the ``prefix`` that `prefill` yielded, answer prompts that are wholes, a list of ids
        each, of which all but the last token is read and compressed. Their texts end before the
        first of ``stop``; the tokens are those of the whole answers.
        """
        most, stop = sampling_params.max_tokens, sampling_params.stop
        assert most is not None
        served = SamplingParams(temperature=0, max_tokens=most, stop=stop)
        assert sampling_params == served, sampling_params
        if prefix is not None:
            assert not stop
            return [self._answer(list(prompt["prompt_token_ids"]), most) for prompt in prompts]
        outputs = [self._whole(ids, most) for ids in prompts]
        for [answer], text in itertools.product((output.outputs for output in outputs), stop):
            if text in answer.text:
                answer.text, answer.finish_reason = answer.text.partition(text)[0], "stop"
        return outputs

    @property
    def failed(self) -> bool:
        """True once the process is gone: every call will fail."""
        return self._child.process.poll() is not None

    def close(self) -> None:
        """End the process; also from another thread, in the midst of a call."""
        self._child.end()

    def _whole(self, ids: Sequence[int], max_tokens: int) -> RequestOutput:
        *text, last = ids
        began = time.perf_counter()
        with self.prefill(text):
            output = self._answer([last], max_tokens)
        output.prompt_token_ids = [*text, last]
        output.metrics.total_seconds = time.perf_counter() - began
        return output

    def _answer(self, ids: list[int], max_tokens: int) -> RequestOutput:
        began = time.perf_counter()
        tokens: list[int] = self._call("answer", ids, max_tokens)
        ended = tokens[-1] in self._eos
        said, text = tokens[:-1] if ended else tokens, ""
        if self._tokenizer is not None:
            text = str(self._tokenizer.decode(said, skip_special_tokens=True))
        reason = "stop" if ended else "length"
        answer = CompletionOutput(text=text, token_ids=tokens, finish_reason=reason)
        metrics = RequestMetrics(total_seconds=time.perf_counter() - began)
        name = str(next(self._ids))
        return RequestOutput(name, None, ids, outputs=[answer], finished=True, metrics=metrics)

    def _call(self, method: str, *arguments: Any) -> Any:
        with suppress(OSError):  # of a process that has ended
            self._child.connection.send((method, arguments))
        return self._answered()

    def _answered(self) -> Any:
        try:
            status, value = self._child.connection.recv()
        except (EOFError, OSError) as error:
            press, code = self.config.press, self._child.process.wait()
            advice = "; the attention weights of a long text may need more memory than is"
            raise EngineError(
                f"the process of the method {press} ended (code {code})"
                + (advice if PRESSES[press].attention == "eager" else "")
            ) from error
        if status == "failed":
            raise value
        return value
