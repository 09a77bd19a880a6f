"""The offline API: an engine for scripts, tests and Ray jobs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from functools import partial
from typing import Any

from razor_dist.config.errors import RequestError
from razor_dist.frontend.outputs import RequestOutput
from razor_dist.frontend.prompts import PromptLimits
from razor_dist.llm.conversations import Conversation, conversation_of, conversations_of
from razor_dist.llm.engine import EngineHandle
from razor_dist.llm.generation import (
    CheckedPrompt,
    Encode,
    Encoded,
    GenerationCall,
    Prompt,
    encode,
    encode_chat,
    params_for,
    prompts_of,
)
from razor_dist.llm.prefix import Prefix, read_prefix
from razor_dist.llm.progress import OnProgress, UseTqdm
from razor_dist.protocol.sampling_params import SamplingParams


class LLM(EngineHandle):
    """A model on ``world_size`` ranks of this host, ready when the constructor returns.

    ``model`` is "smollm2" (embedded), a local folder or a hub id, ``config`` any other field of
    `EngineConfig`. The attribute ``use_tqdm``, False at first, is the default of calls.

    Raises `ConfigError` if a setting is unknown or wrong, `ModelError` if there is no such model,
    and `EngineError` if the ranks cannot be started, with their message.

    Examples
    --------
    >>> with LLM("smollm2", world_size=2) as llm:
    ...     [output] = llm.generate("Once upon a time", SamplingParams(max_tokens=8))
    ...     print(output.outputs[0].text)
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        world_size: int = 1,
        attention: str = "razor",
        **config: Any,
    ) -> None:
        self.use_tqdm: UseTqdm = False
        self._ids = itertools.count()
        super().__init__(
            {"model": model, "world_size": world_size, "attention": attention, **config}
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm | None = None,
        prefix: Prefix | None = None,
    ) -> list[RequestOutput]:
        """Generate answers to each prompt, in their order.

        Parameters
        ----------
        prompts : str, list of int, vLLM's mappings, or a list of these
            ``{"prompt": "..."}`` is a text, ``{"prompt_token_ids": [...]}`` token ids, which are
            used unchanged.
        sampling_params : SamplingParams or a list with one for each prompt, optional
            The model's recommended parameters by default.
        use_tqdm : bool or callable
            Show a progress bar of prompt tokens, which moves with every chunk that is read. A
            callable is called in tqdm's place, as vLLM does: see `PromptBar`.
        prefix : Prefix, optional
            The result of `prefill`, which every prompt continues, as if its tokens were before the
            prompt's. Texts are tokenised by themselves, without special tokens such as a
            beginning of sequence. In the outputs, ``prompt_token_ids`` and ``prompt_logprobs`` are
            the prompt's alone, and ``num_cached_tokens`` is the prefix's length.

        Raises
        ------
        RequestError
            If a prompt or its parameters cannot be served, or the prefix was released or belongs to
            another engine. No answer is returned then.
        EngineError
            If the engine dies, or has died with the prefix (it is restarted for the next call), or
            the `LLM` was closed.
        """
        return self._answers(encode, prompts_of(prompts), sampling_params, use_tqdm, prefix)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        prefix: Prefix | None = None,
        *,
        on_progress: OnProgress | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Yield the output of one prompt with every token, until it is ``finished``.

        It is the same object each time, which grows: copy what must not change. ``on_progress`` is
        called with a `razor_dist.protocol.messages.Progress` when the request is admitted and
        after each chunk of the prompt, in the engine's thread: it must not wait. Other arguments
        and errors are as in `generate`. Leaving the iteration aborts the request.

        Examples
        --------
        >>> for output in llm.stream("Once upon a time"):
        ...     print(len(output.outputs[0].token_ids), output.outputs[0].text)
        """
        outputs = self.outputs(encode, prompt, sampling_params, prefix, on_progress)
        try:
            while (output := self.loop.run(_next(outputs))) is not None:
                yield output
        finally:
            self.loop.tidy(closed(outputs))

    def outputs(
        self,
        encode: Encode,
        prompt: Any,
        sampling_params: SamplingParams | None,
        prefix: Prefix | None = None,
        on_progress: OnProgress | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Return the outputs of `stream`, to be iterated over in the engine's event loop, `loop`.

        ``encode`` makes token ids of the prompt: `encode`, or `encode_chat` for a conversation.
        """
        [ready] = self._ready(encode, [prompt], sampling_params, prefix)
        return self.call(prefix).stream(ready, on_progress)

    def prefill(self, prompt: Prompt, use_tqdm: UseTqdm | None = None) -> Prefix:
        """Read a prompt once and keep its caches, for `generate` to continue it many times.

        A prefix takes its tokens' share of ``kv_tokens`` until it is released, and one of the
        ``max_num_seqs`` sequences while it is read, or, without the prefix cache, until it is
        released. Twice ``max_num_seqs`` prefixes, and at least four, may be kept at once. Prompts
        that continue one are read with local prefill, whatever ``prefill`` is, and under the
        ``cache_salt`` given beside the prefix's prompt.

        Takes one prompt, and ``use_tqdm``, as `generate` does. Raises `RequestError` if the prompt
        cannot be served, or leaves no room to continue it, and `EngineError` if the engine dies.
        """
        return self._pinned(prompt, use_tqdm)

    def prefill_chat(
        self,
        messages: Conversation,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: UseTqdm | None = None,
    ) -> Prefix:
        """Read the beginning of a conversation once, for `chat` to continue it many times.

        The prefix ends with the last message's content, not with the message: a question may follow
        in the same message. The text behind it is tokenised by itself, so begin a new paragraph.

        Arguments are as in `chat`, errors as in `prefill` and `chat`; see `prefill` for releasing.

        Examples
        --------
        >>> with llm.prefill_chat([{"role": "user", "content": document}]) as prefix:
        ...     asked = [{"role": "user", "content": f"{document}\\n\\n{question}"}]
        ...     outputs = llm.chat(asked, prefix=prefix)
        """
        conversation = conversation_of(messages)
        ends = {"add_generation_prompt": False, "continue_final_message": True}
        text = self._encoder.chat_text(conversation, **{**(chat_template_kwargs or {}), **ends})
        self._encoder.check_length(text, self.info.max_model_len, "messages")
        ids = self._encoder.text(text, special_tokens=False)
        return self._pinned(Encoded(None, ids), use_tqdm, text)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        prefix: Prefix | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of each conversation; otherwise as `generate`.

        Parameters
        ----------
        messages : list of ``{"role": ..., "content": ...}``, or a list of such lists
            One conversation or several. A content is a text, or a list of
            ``{"type": "text", "text": ...}`` parts, whose texts are joined.
        add_generation_prompt : bool
            End the prompt with the beginning of an assistant's message.
        chat_template_kwargs : mapping, optional
            Passed to the model's chat template.
        prefix : Prefix, optional
            The result of `prefill_chat`. Every conversation must begin with its messages
            (`RequestError` otherwise); only the text behind them is read.
        """
        template = {**(chat_template_kwargs or {}), "add_generation_prompt": add_generation_prompt}
        encode = partial(encode_chat, **template)
        conversations = conversations_of(messages)
        return self._answers(encode, conversations, sampling_params, use_tqdm, prefix)

    def _pinned(
        self, prompt: Prompt, use_tqdm: UseTqdm | None, chat_text: str | None = None
    ) -> Prefix:
        if self.config.max_num_seqs < 2 and not self.config.caches_prefixes:
            raise RequestError(
                "a prefix and the prompt that continues it are two sequences: start the engine "
                "with max_num_seqs of at least 2, or with prefix_cache",
                param="max_num_seqs",
            )
        [(given, checked)] = self._ready(encode, [prompt], SamplingParams(max_tokens=1), None)
        request_id, bar = str(next(self._ids)), self._bar(use_tqdm)
        return self.loop.run(
            read_prefix(self.client, request_id, checked, bar, chat_text, given.cache_salt)
        )

    def _answers(
        self,
        encode: Encode,
        prompts: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: UseTqdm | None,
        prefix: Prefix | None,
    ) -> list[RequestOutput]:
        ready = self._ready(encode, prompts, sampling_params, prefix)
        return self.loop.run(self.call(prefix).run(ready, self._bar(use_tqdm)))

    def _ready(
        self,
        encode: Encode,
        prompts: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        prefix: Prefix | None,
    ) -> list[CheckedPrompt]:
        """Return encoded prompts with checked parameters; raises as `generate` does."""
        if prefix is not None:
            prefix.stream_for(self.client)  # raises before anything is tokenised
        default = self.get_default_sampling_params()
        params = params_for(sampling_params, len(prompts), default, prefix)
        limits = PromptLimits.of(self.info, self.config, fit_max_tokens=True)
        encoded = [
            encode(self._encoder, prompt, prefix, own.return_sources > 0, limits.max_model_len)
            for prompt, own in zip(prompts, params, strict=True)
        ]
        before = 0 if prefix is None else prefix.num_tokens
        known = self._encoder.tokenizer is not None
        return [
            (one, limits.checked(one.ids, own, before=before, text=one.where, has_tokenizer=known))
            for one, own in zip(encoded, params, strict=True)
        ]

    def call(self, prefix: Prefix | None = None) -> GenerationCall:
        """Return a call of the engine, to be run in its event loop, `loop`."""
        return GenerationCall(
            self._engine.client,
            self._encoder.tokenizer,
            self._ids,
            prefix,
            together=2 * self.config.max_num_seqs,  # enough to keep the engine busy
        )

    def _bar(self, use_tqdm: UseTqdm | None) -> UseTqdm:
        return self.use_tqdm if use_tqdm is None else use_tqdm


async def closed(outputs: AsyncGenerator[RequestOutput]) -> None:
    """Close the result of `LLM.outputs`, also while a cancelled step of it is still ending."""
    while True:
        try:
            return await outputs.aclose()
        except RuntimeError:  # "already running"
            await asyncio.sleep(0)


async def _next(outputs: AsyncGenerator[RequestOutput]) -> RequestOutput | None:
    return await anext(outputs, None)
