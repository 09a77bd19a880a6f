"""A model that reads letters: it finds in what it keeps of a text what it is asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from razor_dist import SamplingParams
from razor_dist.config.schema import EngineConfig
from razor_dist.frontend.outputs import CompletionOutput, RequestOutput
from razor_dist.jobs.pool import EnginePool
from razor_dist.jobs.task import Item


class Letters:
    """A tokenizer with a token for each letter, and 1 before every text."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + [ord(letter) for letter in text]}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(id) for id in ids if id > 1 or not skip_special_tokens)


class Reader:
    """An `LLM` for `NeedleTask.run`.

    It answers with the number, or the words, that the text it kept gives for what it is asked.

    Attributes
    ----------
    read : list of str
        What was prefilled.
    most : int
        Tokens of the longest prompt with its answer.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.read: list[str] = []
        self.most = 0
        self._tokenizer = Letters()
        self._kept = 0

    def get_tokenizer(self) -> Any:
        return self._tokenizer

    def stats(self) -> Mapping[str, Any]:
        return {"kv_bytes_per_rank": [self._kept, self._kept + 1]}

    @contextmanager
    def prefill(self, ids: list[int]) -> Iterator[str]:
        assert ids[0] == 1, "a text begins with the special token"
        self._ids = len(ids)
        text = self._tokenizer.decode(ids)
        self.read.append(text)
        # All that a streaming head keeps: a few tokens at the beginning, and a window.
        kept = text if self.config.attention != "streaming" else text[:4] + text[-300:]
        self._kept = len(kept)
        yield kept

    def generate(
        self, prompts: Sequence[Mapping[str, list[int]]], params: SamplingParams, prefix: str
    ) -> list[RequestOutput]:
        outputs = []
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            self.most = max(self.most, self._ids + len(ids) + params.max_tokens)
            answer = self._answer(prefix, self._tokenizer.decode(ids))
            output = RequestOutput("0", None, ids)
            output.outputs = [CompletionOutput(text=answer, token_ids=[])]
            outputs.append(output)
        return outputs

    def _answer(self, kept: str, asked: str) -> str:
        if subject := re.search(r"The (special magic number of \w+) is$", asked):
            found = re.search(rf"The {subject[1]} is (\d+)\.", kept)
            return f" {found[1]}." if found else " unknown"
        found = re.search(r"San Francisco is (eat [^.]*\.)", kept)
        return found[1] if found else "a book"


@contextmanager
def readers(task: Any, made: list[Reader]) -> Iterator[EnginePool]:
    """A pool of one `Reader`, each put into ``made``."""

    class Engine:
        def __init__(self, name: str) -> None:
            self.llm = Reader(task.engines[name])
            made.append(self.llm)

        def run(self, item: Item) -> Mapping[str, Any]:
            return task.run(self.llm, item)

        def close(self) -> None:
            pass

    yield EnginePool(lambda name, *_: Engine(name), 1)
