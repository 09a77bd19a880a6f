"""The offline API's handle of a prompt that is read once and continued many times."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from typing import Self

from razor_dist.config.errors import RequestError
from razor_dist.frontend.client import EngineClient
from razor_dist.frontend.prompts import Checked
from razor_dist.frontend.stream import RequestStream
from razor_dist.llm.progress import PromptBar, UseTqdm
from razor_dist.protocol.messages import CacheScope, Progress, Tokens

# Tokens at a prefix's end behind which a continuation is tokenised.
_BORDER_TOKENS = 64


class Prefix:
    """A prefilled prompt whose caches an engine keeps, made by `LLM.prefill` or `prefill_chat`.

    Release it, or use it as a context manager: until then it keeps the prompt's part of
    ``kv_tokens`` (`LLM.prefill`). Closing the `LLM` and garbage collection release it as well.

    ``stream`` is the pinned request's, ``client`` its engine's, ``loop`` the event loop in which
    the stream must be closed. ``chat_text`` is the beginning of a conversation as the template
    wrote it, up to the end of the last content.

    Examples
    --------
    >>> with llm.prefill(document) as prefix:
    ...     outputs = llm.generate(questions, prefix=prefix)
    """

    def __init__(
        self,
        stream: RequestStream,
        client: EngineClient,
        tokens: Tokens,
        loop: asyncio.AbstractEventLoop,
        chat_text: str | None,
        cache_salt: str | None,
    ) -> None:
        self._stream, self._client = stream, client
        self._cache_salt = cache_salt
        self.num_tokens = len(tokens)
        self.border = tokens[-_BORDER_TOKENS:].tolist()
        self._chat_text = chat_text
        self._release = weakref.finalize(self, _close, stream, loop)

    @property
    def request_id(self) -> str:
        """The engine's id of the prefix, which errors mention."""
        return self._stream.request_id

    @property
    def released(self) -> bool:
        return not self._release.alive

    def release(self) -> None:
        """Free its caches, once the requests that continue it have ended. Never waits."""
        self._release()

    def stream_for(self, client: EngineClient) -> RequestStream:
        """The pinned request's stream; `RequestError` if released or of another engine."""
        if client is not self._client:
            raise RequestError("the prefix belongs to another LLM", param="prefix")
        if self.released:
            raise RequestError("the prefix was released; prefill it again", param="prefix")
        return self._stream

    def check_salt(self, cache_salt: str | None) -> None:
        """Raise `RequestError` if a prompt's salt is not the prefix's."""
        if cache_salt not in (None, self._cache_salt):
            raise RequestError(
                "cache_salt differs from the prefix's, under which prompts that continue it are "
                "cached: leave it out, or prefill the prefix with it",
                param="cache_salt",
            )

    def rest_of(self, chat_text: str) -> str:
        """Return a conversation's text behind this prefix; `RequestError` if it has another."""
        if self._chat_text is None:
            raise RequestError(
                "the prefix was made by prefill, which generate continues; make one with "
                "prefill_chat",
                param="prefix",
            )
        if not chat_text.startswith(self._chat_text):
            raise RequestError(
                "the conversation does not begin with the prefix's: its messages must be the same "
                "up to the last of prefill_chat's, whose content may go on",
                param="messages",
            )
        return chat_text[len(self._chat_text) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = ", released" if self.released else ""
        return f"Prefix(request_id={self.request_id!r}, num_tokens={self.num_tokens}{state})"


async def read_prefix(
    client: EngineClient,
    request_id: str,
    prompt: Checked,
    use_tqdm: UseTqdm,
    chat_text: str | None,
    cache_salt: str | None,
) -> Prefix:
    """Prefill and pin a prompt; arguments are as in `PromptBar` and `Prefix`."""
    tokens = len(prompt.tokens)
    [stream] = client.submit(
        request_id, prompt.tokens, prompt.params, pin=True, scope=CacheScope(cache_salt)
    )
    try:
        with PromptBar(use_tqdm, [tokens]) as bar:
            async for message in stream:
                if not isinstance(message, Progress):
                    continue
                bar.progress(message)
                if message.processed == message.total:
                    break  # and leave the stream open: closing it would release the caches
    except BaseException:  # the engine's failure, or the caller's bar, which may raise anything
        stream.close()
        raise
    loop = asyncio.get_running_loop()
    return Prefix(stream, client, prompt.tokens, loop, chat_text, cache_salt)


def _close(stream: RequestStream, loop: asyncio.AbstractEventLoop) -> None:
    # A closed loop means that the LLM was closed and its ranks have ended.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(stream.close)
