"""A progress bar for the offline API: how much of the prompts has been read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

from tqdm import tqdm

from razor_dist.engine.protocol import Message

# Whether to show a bar, or what makes it: tqdm or a class like it (`ray.experimental.tqdm_ray`).
UseTqdm = bool | Callable[..., Any]


class PromptBar:
    """Counts the tokens of prompts that have been read, wave by wave, and the answers.

    Close it, or use it as a context manager.

    Parameters
    ----------
    use_tqdm : bool or callable
        A callable gets ``total``, ``desc`` and ``unit``, and what it returns is given ``update``,
        ``set_description`` and ``close``, as tqdm's bars have them.
    prompt_tokens : sequence of int
        The prompts' lengths, without what a prefix holds of them.
    """

    def __init__(self, use_tqdm: UseTqdm, prompt_tokens: Sequence[int]) -> None:
        self._prompts, self._answered = len(prompt_tokens), 0
        self._bar: Any = None
        if use_tqdm:
            make = use_tqdm if callable(use_tqdm) else tqdm
            self._bar = make(total=sum(prompt_tokens), desc=self._description, unit="tok")
        self._read: dict[str, int] = {}

    @property
    def _description(self) -> str:
        return f"{self._answered}/{self._prompts} prompts answered"

    def progress(self, message: Message) -> None:
        """Take note of a request's ``progress`` message."""
        read = message["processed"] - message["cached"]
        before = self._read.get(message["id"], 0)
        self._read[message["id"]] = read
        if self._bar is not None:
            self._bar.update(read - before)

    def answered(self) -> None:
        """Take note of an answer that is finished."""
        self._answered += 1
        if self._bar is not None:
            self._bar.set_description(self._description)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.close()
