"""An engine as tasks see it, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from razor_dist.config.schema import EngineConfig
from razor_dist.engine.sampling_params import SamplingParams
from razor_dist.frontend.client import EngineInfo
from razor_dist.frontend.outputs import CompletionOutput, RequestOutput
from tests.tokenizer import smollm2_tokenizer


class Quoter:
    """Answers each prompt with the words of its text that hold digits.

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

    def generate(
        self, prompts: Sequence[Mapping[str, Any]], params: SamplingParams
    ) -> list[RequestOutput]:
        self.params = params
        assert params.max_tokens is not None
        outputs, texts = [], []
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            assert len(ids) + params.max_tokens <= self.info.max_model_len
            texts.append(self._tokenizer.decode(ids))
            found = [word for word in texts[-1].split() if word.startswith("fact")]
            answer = self._tokenizer(" ".join(found))["input_ids"]
            cut = answer[: params.max_tokens]
            text = self._tokenizer.decode(cut)
            reason = "length" if len(cut) < len(answer) else "stop"
            outputs.append(
                RequestOutput("r", None, ids, outputs=[CompletionOutput(0, text, cut, None)])
            )
            outputs[-1].outputs[0].finish_reason = reason
        self.prompts += texts
        return outputs
