"""The offline API: an engine for scripts, tests and Ray jobs."""

from __future__ import annotations

import asyncio
import itertools
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, cast

from transformers import PreTrainedTokenizerBase

from razor_dist.config import EngineConfig
from razor_dist.config_sources import build_config
from razor_dist.engine.assembler import Assembler, Piece, prompt_logprobs
from razor_dist.engine.client import EngineClient, EngineInfo
from razor_dist.engine.local import LocalEngine
from razor_dist.engine.loop_thread import LoopThread
from razor_dist.engine.prompts import Checked, PromptEncoder, check_prompt, load_tokenizer
from razor_dist.engine.protocol import Message
from razor_dist.engine.ranks import WORKER
from razor_dist.errors import EngineError, RequestError
from razor_dist.models.registry import resolve_model
from razor_dist.outputs import CompletionOutput, RequestOutput
from razor_dist.prefix import Prefix
from razor_dist.progress import PromptBar, UseTqdm
from razor_dist.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, str | Sequence[int]]
Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """A model on ``world_size`` ranks of this host, ready when the constructor returns.

    Parameters
    ----------
    model : str
        "smollm2" (embedded), a local folder, or a hub id.
    world_size : int
        Number of ranks.
    attention : str
        "razor" (by head map), "full" or "streaming".
    **config
        Any other field of `EngineConfig`.

    Raises
    ------
    ConfigError
        If a setting is unknown or wrong.
    ModelError
        If the model cannot be found.
    EngineError
        If the ranks cannot be started; the message is theirs.

    Examples
    --------
    >>> with LLM("smollm2", world_size=2) as llm:
    ...     [output] = llm.generate("Once upon a time", SamplingParams(max_tokens=8))
    ...     print(output.outputs[0].text)
    """

    _worker: ClassVar[str] = WORKER

    def __init__(
        self,
        model: str = "smollm2",
        *,
        world_size: int = 1,
        attention: str = "razor",
        **config: Any,
    ) -> None:
        self.config = build_config(
            EngineConfig, model=model, world_size=world_size, attention=attention, **config
        )
        trust = self.config.trust_remote_code
        folder = resolve_model(model, trust_remote_code=trust)
        self._ids = itertools.count()
        self._loop = LoopThread()
        self._engine = self._loop.run(self._start())
        self._close = weakref.finalize(self, _close, self._loop, self._engine)
        try:
            # The ranks load the model meanwhile.
            tokenizer = load_tokenizer(folder, trust_remote_code=trust)
            self._encoder = PromptEncoder(tokenizer)
            self._loop.run(self._engine.client.ready())
        except BaseException:
            self.close()
            raise

    async def _start(self) -> LocalEngine:
        engine = LocalEngine(self.config, worker=self._worker)
        await engine.start()
        return engine

    # ------------------------------------------------------------------- use

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = False,
        prefix: Prefix | None = None,
    ) -> list[RequestOutput]:
        """Generate one answer for each prompt.

        Parameters
        ----------
        prompts : str, list of int, vLLM's mappings, or a list of these
            ``{"prompt": "..."}`` is a text, ``{"prompt_token_ids": [...]}`` token ids, which are
            taken as they are.
        sampling_params : SamplingParams or a list with one for each prompt, optional
            The defaults of `SamplingParams` if not given.
        use_tqdm : bool or callable
            Show a progress bar of prompt tokens, which moves with every wave that is read. A
            callable is called in tqdm's place, as vLLM does: see `PromptBar`.
        prefix : Prefix, optional
            What `prefill` returned: every prompt continues it, as if its tokens stood before the
            prompt's. Texts are tokenised by themselves and get no special tokens, such as a
            beginning of sequence, before them.

        Returns
        -------
        list of RequestOutput
            In the order of ``prompts``. With a prefix, ``prompt_token_ids`` and
            ``prompt_logprobs`` are those of the prompt alone, and ``num_cached_tokens`` is the
            prefix's length.

        Raises
        ------
        RequestError
            If a prompt or its parameters cannot be served, or the prefix was released or is
            another engine's; no answer is returned then.
        EngineError
            If the engine dies meanwhile, or died with the prefix. It is restarted for the next
            call. Also if the `LLM` was closed.
        """
        if prefix is not None:
            prefix.stream_for(self._client)  # refused before anything is tokenised
        texts_and_ids = [self._encode(prompt, prefix) for prompt in _as_list(prompts)]
        return self._run(texts_and_ids, sampling_params, use_tqdm, prefix)

    def prefill(self, prompt: Prompt, use_tqdm: UseTqdm = False) -> Prefix:
        """Read a prompt once and keep its caches, for `generate` to continue it many times.

        A prefix takes one of the ``max_num_seqs`` sequences and its tokens' share of
        ``kv_tokens`` until it is released. What continues it is always read with local prefill,
        whatever ``prefill`` was set to.

        Parameters
        ----------
        prompt : str, list of int, or mapping
            One prompt, as `generate` takes it.
        use_tqdm : bool or callable
            As in `generate`.

        Returns
        -------
        Prefix
            A handle, to be released.

        Raises
        ------
        RequestError
            If the prompt cannot be served, or leaves no room to continue it.
        EngineError
            If the engine dies meanwhile.
        """
        _, ids = self._encode(prompt)
        return self._keep(ids, use_tqdm)

    def prefill_chat(
        self,
        messages: Conversation,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: UseTqdm = False,
    ) -> Prefix:
        """Read the beginning of a conversation once, for `chat` to continue it many times.

        It ends where the last message's content does, not where that message does: a question may
        follow in the same message. What follows is tokenised by itself, so let it begin as a new
        paragraph does.

        Parameters
        ----------
        messages : list of ``{"role": ..., "content": ...}``
            Such as one of the user's that holds a document.
        chat_template_kwargs : mapping, optional
            Passed to the model's chat template.
        use_tqdm : bool or callable
            As in `generate`.

        Returns
        -------
        Prefix
            A handle, to be released: see `prefill`.

        Raises
        ------
        RequestError, EngineError
            As `prefill` and `chat` do.

        Examples
        --------
        >>> with llm.prefill_chat([{"role": "user", "content": document}]) as prefix:
        ...     asked = [{"role": "user", "content": f"{document}\\n\\n{question}"}]
        ...     outputs = llm.chat(asked, prefix=prefix)
        """
        text = self._encoder.chat_text(
            messages,
            add_generation_prompt=False,
            template_kwargs={**(chat_template_kwargs or {}), "continue_final_message": True},
        )
        return self._keep(self._encoder.text(text, special_tokens=False), use_tqdm, text)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = False,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        prefix: Prefix | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of each conversation.

        Parameters
        ----------
        messages : list of ``{"role": ..., "content": ...}``, or a list of such lists
            One conversation or several.
        sampling_params, use_tqdm
            As in `generate`.
        add_generation_prompt : bool
            End the prompt with the beginning of an assistant's message.
        chat_template_kwargs : mapping, optional
            Passed to the model's chat template.
        prefix : Prefix, optional
            What `prefill_chat` returned. Every conversation begins with its messages, as texts;
            what is beyond them is read, and told as `generate` tells it.

        Returns
        -------
        list of RequestOutput
            One per conversation.

        Raises
        ------
        RequestError, EngineError
            As `generate` does; also if a conversation does not begin as the prefix does.
        """
        if prefix is not None:
            prefix.stream_for(self._client)  # refused before anything is tokenised
        single = not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single else messages
        encoded = [
            self._encode_chat(conversation, prefix, add_generation_prompt, chat_template_kwargs)
            for conversation in conversations
        ]
        return self._run([(None, ids) for ids in encoded], sampling_params, use_tqdm, prefix)

    def stats(self) -> Message:
        """The engine's counters: see ``stats`` in `razor_dist.engine.protocol`."""
        return self._loop.run(self._client.stats())

    @property
    def info(self) -> EngineInfo:
        """The engine's ``max_model_len`` and ``vocab_size``, and all that it says of itself.

        Raises
        ------
        EngineError
            If it cannot be started again after a failure.
        """
        return self._loop.run(self._client.ready())

    @property
    def failed(self) -> bool:
        """Whether the ranks died too often to be started again: every call will fail."""
        return self._engine.client.status.state == "failed"

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer; ``None`` if its folder has none."""
        return self._encoder.tokenizer

    def close(self) -> None:
        """End the ranks. Another `close` does nothing; other calls raise `EngineError`."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ----------------------------------------------------------------- inside

    @property
    def _client(self) -> EngineClient:
        """The engine's, for calls that come from outside; refused once `close` was called."""
        if not self._close.alive:
            raise EngineError("the LLM was closed; make a new one")
        return self._engine.client

    def _encode(self, prompt: Prompt, prefix: Prefix | None = None) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if set(prompt) not in ({"prompt"}, {"prompt_token_ids"}):
                raise RequestError(
                    "a prompt given as a mapping has one key, prompt (a text) or "
                    f"prompt_token_ids, not {set(prompt)}",
                    param="prompt",
                )
            [(key, prompt)] = prompt.items()
            if isinstance(prompt, str) != (key == "prompt"):
                raise RequestError(f"{key} is no place for {prompt!r:.80}", param=key)
        if isinstance(prompt, str):
            return prompt, self._encoder.text(prompt, special_tokens=prefix is None)
        if not isinstance(prompt, Sequence) or not all(isinstance(t, int) for t in prompt):
            raise RequestError(
                f"a prompt is a text or a list of token ids, not {prompt!r:.80}", param="prompt"
            )
        return None, [int(token) for token in prompt]

    def _encode_chat(
        self,
        messages: Conversation,
        prefix: Prefix | None,
        generation_prompt: bool,
        template_kwargs: Mapping[str, Any] | None,
    ) -> list[int]:
        how: Any = {
            "add_generation_prompt": generation_prompt,
            "template_kwargs": template_kwargs,
        }
        if prefix is None:
            return self._encoder.chat(messages, **how)
        rest = prefix.rest_of(self._encoder.chat_text(messages, **how))
        return self._encoder.text(rest, special_tokens=False)

    def _keep(self, ids: list[int], use_tqdm: UseTqdm, chat_text: str | None = None) -> Prefix:
        if self.config.max_num_seqs < 2:
            raise RequestError(
                "a prefix and what continues it are two sequences: start the engine with "
                "max_num_seqs of at least 2",
                param="max_num_seqs",
            )
        [checked] = self._check([ids], [SamplingParams(max_tokens=1)])
        return self._loop.run(self._prefill(checked, use_tqdm, chat_text))

    def _run(
        self,
        prompts: list[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: UseTqdm,
        prefix: Prefix | None = None,
    ) -> list[RequestOutput]:
        params = _params_for(sampling_params, len(prompts))
        before = 0 if prefix is None else prefix.num_tokens
        checked = self._check([ids for _, ids in prompts], params, before)
        return self._loop.run(self._answer_all(prompts, checked, use_tqdm, prefix))

    def _check(
        self, prompts: list[list[int]], params: list[SamplingParams], before: int = 0
    ) -> list[Checked]:
        info = self.info
        return [
            check_prompt(
                ids,
                p,
                max_model_len=info.max_model_len,
                vocab_size=info.vocab_size,
                has_tokenizer=self._encoder.tokenizer is not None,
                before=before,
            )
            for ids, p in zip(prompts, params, strict=True)
        ]

    async def _prefill(self, prompt: Checked, use_tqdm: UseTqdm, chat_text: str | None) -> Prefix:
        client, tokens = self._engine.client, len(prompt.tokens)
        stream = client.generate(str(next(self._ids)), *prompt, keep=True)
        with PromptBar(use_tqdm, [tokens]) as bar:
            async for message in stream:
                bar.progress(message)
                if message["processed"] == message["total"]:
                    break  # and leave the stream open: closing it would release the caches
        return Prefix(stream, client, tokens, asyncio.get_running_loop(), chat_text)

    async def _answer_all(
        self,
        prompts: list[tuple[str | None, list[int]]],
        checked: list[Checked],
        use_tqdm: UseTqdm,
        prefix: Prefix | None,
    ) -> list[RequestOutput]:
        # The engine keeps the waiting prompts in memory, so it gets no more than keep it busy.
        room = asyncio.Semaphore(2 * self.config.max_num_seqs)
        bar = PromptBar(use_tqdm, [len(prompt.tokens) for prompt in checked])

        async def answer(text: str | None, ids: list[int], prompt: Checked) -> RequestOutput:
            async with room:
                output = await self._answer(text, ids, prompt, prefix, bar)
            bar.answered()
            return output

        with bar:
            tasks = [
                asyncio.create_task(answer(text, ids, prompt))
                for (text, ids), prompt in zip(prompts, checked, strict=True)
            ]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:  # one failed, or the caller was interrupted: abort the others
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(
        self,
        text: str | None,
        ids: list[int],
        prompt: Checked,
        prefix: Prefix | None,
        bar: PromptBar,
    ) -> RequestOutput:
        tokens, params = prompt
        tokenizer = self._encoder.tokenizer
        assembler = Assembler(tokenizer, params)
        result = RequestOutput(str(next(self._ids)), text, ids)
        pieces: list[Piece] = []
        entries: list[Any] = []
        client, kept = self._engine.client, None
        if prefix is not None:
            result.num_cached_tokens = prefix.num_tokens
            kept = prefix.stream_for(client)  # again: another thread may have released it
        begin = time.perf_counter()
        with client.generate(result.request_id, tokens, params, prefix=kept) as stream:
            async for message in stream:
                if message["t"] == "progress":
                    bar.progress(message)
                    result.metrics.prefill_seconds = message["seconds"]
                elif message["t"] == "prompt":
                    entries += message["logprobs"]  # a message per wave
                elif message["t"] == "token":
                    if not pieces:
                        result.metrics.time_to_first_token = time.perf_counter() - begin
                    pieces.append(assembler.push(message))
                    if pieces[-1].finish_reason is not None:
                        break
        result.metrics.total_seconds = time.perf_counter() - begin
        if params.prompt_logprobs is not None:
            result.prompt_logprobs = prompt_logprobs(tokenizer, ids, entries)
        last = pieces[-1]
        answer = CompletionOutput(
            text="".join(piece.text for piece in pieces),
            token_ids=[piece.token for piece in pieces],
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
        )
        if params.logprobs is not None:
            answer.logprobs = [piece.logprobs or {} for piece in pieces]
            chosen = zip(answer.logprobs, answer.token_ids, strict=True)
            answer.cumulative_logprob = sum(entry[token].logprob for entry, token in chosen)
        result.outputs, result.finished = [answer], True
        return result


def _close(loop: LoopThread, engine: LocalEngine) -> None:
    loop.finish(engine.close())


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list; a list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _params_for(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(
            f"sampling_params must be one or as many as the prompts: {len(params)} for {count}",
            param="sampling_params",
        )
    return list(params)
