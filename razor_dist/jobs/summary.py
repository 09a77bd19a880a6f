"""Summaries of documents of any length by one model.

A document is one prompt as long as the model's context holds it: that is the point of a long
context. What is longer is cut at chapters or paragraphs (`split`), each part summarised, and then
the parts' summaries; where these are too many for one prompt, once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from razor_dist.config.errors import ConfigError, DocumentError
from razor_dist.documents.split import split
from razor_dist.documents.style import Style
from razor_dist.frontend.outputs import RequestOutput
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.llm.llm import LLM

# What a text is, as its prompt says it.
_WHOLE, _PART = "a document", "part {} of {} of a long document"
_SUMMARIES = "the summaries of the consecutive parts of a long document"
# How much less is tried when a part turns out longer than the sum of its units.
_LESS = 15 / 16


class Summarizer:
    """Asks a model for summaries.

    Parameters
    ----------
    llm : LLM
        ``info``, ``get_tokenizer`` and ``generate`` are used.
    style : Style

    Raises
    ------
    ConfigError
        If the model has no tokenizer.
    """

    def __init__(self, llm: LLM, style: Style) -> None:
        tokenizer = llm.get_tokenizer()
        if tokenizer is None:
            raise ConfigError(f"{llm.config.model} has no tokenizer, so it reads no documents")
        self._llm, self._style, self._tokenizer = llm, style, tokenizer
        self._encoder = PromptEncoder(tokenizer)
        self._room = llm.info.max_model_len - (style.sampling.max_tokens or 0)

    def summarize(self, text: str) -> dict[str, Any]:
        """Summarise a text.

        Returns
        -------
        dict
            ``tokens`` (the text's), ``summary``, ``finish_reason`` ("stop" or "length"), ``parts``
            (how many prompts the text itself was read in; 1: whole), ``levels`` (how often
            summaries were summarised), and, of more than one part, ``part_summaries``: each
            part's ``tokens``, ``summary`` and ``finish_reason``.

        Raises
        ------
        DocumentError
            If the context is too short to summarise anything in it.
        RequestError, EngineError
            As `LLM.generate`.
        """
        [tokens] = self._count([text])
        parts: list[dict[str, Any]] = []
        summaries: list[dict[str, Any]] = []
        levels, kind, now = 0, _WHOLE, text
        while not self._fits(prompt := self._encode(now, kind)):
            texts = self._split(now, len(prompt))
            if levels and len(texts) >= len(summaries):
                raise DocumentError(
                    f"a context of {self._llm.info.max_model_len} tokens is too short for "
                    "summaries of summaries; ask for fewer words"
                )
            summaries = self._ask(self._encode_parts(texts))
            parts = parts or [
                {"tokens": count, **summary}
                for count, summary in zip(self._count(texts), summaries, strict=True)
            ]
            now = _joined([summary["summary"] for summary in summaries])
            levels, kind = levels + 1, _SUMMARIES
        [answer] = self._ask([prompt])
        result = {"tokens": tokens, **answer, "parts": len(parts) or 1, "levels": levels}
        return result | ({"part_summaries": parts} if parts else {})

    def _split(self, text: str, tokens: int) -> list[str]:
        """Parts that fit the context with their prompt."""
        [alone] = self._count([text])
        limit = self._room - max(tokens - alone, len(self._encode("", _PART.format(9999, 9999))))
        while limit >= 1:
            parts = split(text, limit, self._count)
            if all(self._fits(prompt) for prompt in self._encode_parts(parts)):
                return parts
            limit = int(limit * _LESS)
        raise DocumentError(
            f"a context of {self._llm.info.max_model_len} tokens leaves no room for a part of the "
            "document beside the prompt and the answer; ask for fewer words"
        )

    def _encode_parts(self, texts: Sequence[str]) -> list[list[int]]:
        return [
            self._encode(text, _PART.format(number, len(texts)))
            for number, text in enumerate(texts, start=1)
        ]

    def _encode(self, text: str, kind: str) -> list[int]:
        prompt = self._style.prompt(text.strip(), kind)
        if getattr(self._tokenizer, "chat_template", None):
            return self._encoder.chat([{"role": "user", "content": prompt}])
        return self._encoder.text(f"{prompt}\n\nSummary:")

    def _fits(self, prompt: Sequence[int]) -> bool:
        return len(prompt) <= self._room

    def _count(self, texts: Sequence[str]) -> list[int]:
        return [
            len(ids) for ids in self._tokenizer(list(texts), add_special_tokens=False).input_ids
        ]

    def _ask(self, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], self._style.sampling
        )
        return [_answer(output) for output in outputs]


def _answer(output: RequestOutput) -> dict[str, Any]:
    [answer] = output.outputs
    return {"summary": answer.text.strip(), "finish_reason": answer.finish_reason}


def _joined(summaries: Sequence[str]) -> str:
    """Summaries of parts as one text, which can be cut between them."""
    numbered = enumerate(summaries, start=1)
    return "\n\n".join(f"# Part {number}\n\n{summary}" for number, summary in numbered)
