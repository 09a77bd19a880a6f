"""The tokens that rank 0 draws after a step, and what is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from razor_dist.config.errors import EngineError, RazorError
from razor_dist.engine.logits import LogitsProcessors
from razor_dist.engine.request import Answer
from razor_dist.engine.runner import ModelRunner
from razor_dist.engine.sampler import Draw, Sampled, likeliest, sample
from razor_dist.protocol.messages import AboutRequest, Failed, Token


@dataclass
class Run:
    """The rows of a step's logits for one answer: after its last token, and after its draft's."""

    answer: Answer
    row: int  # of the step's logits, after the last token
    draft: list[int]
    drawn: int = 0  # tokens drawn by these rows so far
    accepted: int = 0  # tokens of the draft that were drawn
    ends: bool = False
    sound: bool = True  # False if its logits are not finite: its caches may hold anything


class Draws:
    """Draws the next tokens of answers, and says which answers they end; ``runner`` is rank 0's."""

    def __init__(self, runner: ModelRunner, eos_token_ids: Sequence[int]) -> None:
        self._runner, self._eos_token_ids = runner, frozenset(eos_token_ids)
        vocab_size = runner.shape.vocab_size
        self.processors = LogitsProcessors(vocab_size, runner.device, eos_token_ids)
        # Since the start: tokens drawn, the runs that they were drawn after, and answers ended.
        self.tokens = self.runs = self.answers = 0

    def draw(self, runs: Sequence[Run], logits: Tensor) -> list[AboutRequest]:
        """Draw each answer's next tokens by the rows of its run.

        The next row of a run counts if the drawn token is the drafted one, for that was read. Each
        token is drawn by the random numbers of its place, and with all tokens before it counted, as
        if it had been read alone: so drafts change no answer.
        """
        self.runs += len(runs)
        self.processors.begin([run.answer for run in runs])
        recorded = self._runner.likeliest
        peaks = (likeliest(logits) if recorded is None else recorded).tolist()
        found: dict[int, list[AboutRequest]] = {run.answer.key: [] for run in runs}
        while runs:
            answers = [run.answer for run in runs]
            rows = [run.row + run.drawn for run in runs]
            params = [a.params for a in answers]
            draws = [Draw(a.seed, len(a.generated)) for a in answers]
            adjusted = self.processors.adjusted([a.key for a in answers], rows, logits)
            sampled = sample(logits, params, draws, adjusted, rows=rows, peaks=peaks)
            pairs = zip(answers, sampled, strict=True)
            self.processors.accept({a.key: s.token for a, s in pairs if s is not None})
            going = []
            for run, one in zip(runs, sampled, strict=True):
                message = self._advance(run, one)
                found[run.answer.key].append(message)
                if not run.ends and run.accepted == run.drawn:
                    going.append(run)
                elif isinstance(message, Token):
                    message.rejected = len(run.draft) - run.accepted
            runs = going
        return [message for of in found.values() for message in of]

    def _advance(self, run: Run, sampled: Sampled | None) -> AboutRequest:
        """Take an answer's next token, and note if the answer ends with it or fails without it.

        A failure here is rank 0's alone, after the step, and ends this answer only.
        """
        answer = run.answer
        at, run.drawn = run.drawn, run.drawn + 1
        right = sampled is not None and run.draft[at:][:1] == [sampled.token]
        run.accepted += right
        grammar = self.processors.grammar(answer.key)
        error: RazorError | None = None if grammar is None else grammar.error
        if sampled is None:
            run.sound = False
            error = error or EngineError("the model computed logits that are not finite")
        else:
            # Even if the grammar fails: the caches have all tokens but the last one.
            answer.generated.append(sampled.token)
        if sampled is None or error is not None:
            run.ends = True
            assert error is not None
            return Failed.of(answer.id, error)
        self.tokens += 1
        finish = self._finish_reason(answer, sampled.token)
        if grammar is not None and grammar.ended:
            finish = "stop"
        run.ends = finish is not None
        self.answers += run.ends
        sources = self._runner.sources.get(answer.key)
        return Token(
            answer.id,
            sampled.token,
            sampled.logprob,
            list(sampled.top),
            finish,
            None if sources is None else sources[at].merged(),
            right,
        )

    def _finish_reason(self, answer: Answer, token: int) -> str | None:
        params = answer.params
        if token in params.stop_token_ids:
            return "stop"
        if token in self._eos_token_ids and not params.ignore_eos:
            return "stop"
        # With every token, so that a loop that began before `min_tokens` ends there.
        loops = answer.repetition is not None and answer.repetition.push(token)
        if loops and len(answer.generated) >= params.min_tokens:
            return "repetition"
        return "length" if len(answer.generated) >= answer.request.max_tokens else None
