"""An engine as tasks see it, without a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from razor_dist.config.schema import EngineConfig
from razor_dist.frontend.outputs import AnswerSentence, CompletionOutput, RequestOutput
from razor_dist.frontend.passages import Trace
from razor_dist.llm.generation import Encoded
from razor_dist.llm.progress import OnProgress
from razor_dist.protocol.messages import EngineInfo, Progress
from razor_dist.protocol.sampling_params import SamplingParams
from tests.tokenizer import smollm2_tokenizer

SENTENCE = "Nothing of note is said here, nor there. "


def document(chapters: int, sentences: int = 10) -> str:
    """Chapters with one word each that summaries keep."""
    return "\n\n".join(
        f"# Chapter {n}\n\n{SENTENCE * sentences}fact{n} {SENTENCE}" for n in range(chapters)
    )


def plain_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer without a chat template."""
    tokenizer = smollm2_tokenizer()
    return type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer)


class Quoter:
    """Answers each prompt with the words of its text that hold digits.

    Asked for sources it makes a sentence of each, in which it looks at the word that it quotes.

    Attributes
    ----------
    prompts : list of str
        As texts, in order: one call after the other.
    """

    def __init__(self, max_model_len: int, tokenizer: PreTrainedTokenizerBase | None = None):
        self.config = EngineConfig(max_num_seqs=1)
        self.info = EngineInfo(max_model_len, 49152)
        self.prompts: list[str] = []
        self.params: SamplingParams | None = None
        self._tokenizer = tokenizer or smollm2_tokenizer()

    failed = False

    def close(self) -> None:
        pass

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    def generate(self, prompts: Sequence[Encoded], params: SamplingParams) -> list[RequestOutput]:
        self.params = params
        assert params.max_tokens is not None
        outputs, texts = [], []
        for prompt in prompts:
            ids = prompt.ids
            assert len(ids) + params.max_tokens <= self.info.max_model_len
            texts.append(self._tokenizer.decode(ids))
            found = [word for word in texts[-1].split() if word.startswith("fact")]
            said = " ".join(found)
            if params.return_sources:
                said = "\n" + " ".join(f"Of {word.rstrip('.')}." for word in found)
            answer = self._tokenizer(said)["input_ids"]
            cut = answer[: params.max_tokens]
            text = self._tokenizer.decode(cut)
            reason = "length" if len(cut) < len(answer) else "stop"
            output = CompletionOutput(0, text, cut, None, finish_reason=reason)
            if params.return_sources:
                output.sentences = self._sentences(prompt, texts[-1], text, params.return_sources)
            outputs.append(RequestOutput("r", None, ids, outputs=[output]))
        self.prompts += texts
        return outputs

    def stream(
        self, prompt: Encoded, params: SamplingParams, *, on_progress: OnProgress
    ) -> Iterator[RequestOutput]:
        for processed in (0, len(prompt.ids)):
            on_progress(Progress("r", processed, len(prompt.ids), 0, 0, 0.0))
        for output in self.generate([prompt], params):
            output.finished = True
            yield output

    def _sentences(
        self, prompt: Encoded, asked: str, answer: str, most: int
    ) -> list[AnswerSentence]:
        assert prompt.where is not None
        trace = Trace(np.array(prompt.ids, np.int32), prompt.where, None, most)
        for begin, end in self._tokenizer(answer, return_offsets_mapping=True)["offset_mapping"]:
            before = answer.rfind("fact", 0, end)
            word = answer[before:].split(".")[0].split()[0] if before >= 0 else ""
            if answer[begin:end].strip() in ("", ".", "Of") or not word:
                trace.add([(0, 1.0)], begin, answer[begin:end])
                continue
            at = re.search(rf"{word}(?!\d)", asked)
            assert at is not None
            position = int(np.searchsorted(prompt.where.ends, at.end()))
            trace.add([(position, 1.0)], begin, answer[begin:end])
        return trace.sentences(trace.ended(last=True))
