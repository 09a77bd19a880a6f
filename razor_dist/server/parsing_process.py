"""`parse_request` in a process of its own, for bodies of megabytes.

Parsing a million token ids, or tokenising a million words, holds the interpreter's lock for longer
than /health and the heartbeats of other requests may wait (numbers in docs/LOG.md). So the frontend
sends long bodies to this process and gets token ids back, which it need not look at.

``python -m razor_dist.server.parsing_process FOLDER [--trust-remote-code]`` reads from its standard
input a msgpack frame (`razor_dist.protocol.messages`) and the body that it announces, and answers
with a frame on its standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from razor_dist.api.contexts import KeptContext
from razor_dist.api.parsing import parse_request
from razor_dist.api.request import Endpoint, Limits, ParsedRequest
from razor_dist.config.errors import EngineError, ProcessKilledError, RazorError, RequestError
from razor_dist.config.logs import inherit_logging
from razor_dist.documents.read import Document
from razor_dist.frontend.child_process import CLOSED, ChildProcess, Pipes
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.models.tokenizer import load_tokenizer
from razor_dist.protocol.messages import Failed, Message, decoder, encode

log = logging.getLogger(__name__)

_FAILED = "the request could not be read; see the server's log"
# Seconds that the process may take for each megabyte of a body: tokenizers take up to a few.
_SECONDS_PER_MB = 60.0


class Question(msgspec.Struct):
    """A body follows, which is to be parsed."""

    endpoint: Endpoint
    limits: Limits
    files: list[Document]
    kept: KeptContext | None
    nbytes: int  # of the body


class Parsed(Message, tag="parsed"):
    """The answer to a body that can be served."""

    request: ParsedRequest  # without ``described``
    # As JSON: it repeats the client's own objects, whose numbers msgpack may not hold.
    described: str

    @classmethod
    def of(cls, request: ParsedRequest) -> Parsed:
        return cls(replace(request, described=None), json.dumps(request.described))

    @property
    def whole(self) -> ParsedRequest:
        try:
            return replace(self.request, described=json.loads(self.described))
        except RecursionError:  # fewer levels fit this process's stack, which has more frames
            raise RequestError("the body is nested too deeply") from None


_decode_question: Callable[[bytes], Question] = decoder(Question)
_decode_answer: Callable[[bytes], Parsed | Failed] = decoder(Parsed | Failed)


class ParsingProcess(ChildProcess):
    """The frontend's handle of the process, which is started by the first body that needs it.

    ``patience`` are seconds that any body may take: the first one waits for the tokenizer to load.
    """

    patience = 120.0

    def __init__(self, folder: Path, *, trust_remote_code: bool) -> None:
        trust = ["--trust-remote-code"] if trust_remote_code else []
        super().__init__("razor_dist.server.parsing_process", str(folder), *trust)

    async def parse_request(
        self,
        endpoint: Endpoint,
        raw: bytes | bytearray,
        limits: Limits,
        key: Hashable = None,
        files: Sequence[Document] = (),
        kept: KeptContext | None = None,
    ) -> ParsedRequest:
        """Parse as `razor_dist.api.parsing.parse_request`, one body after the other.

        Those of each ``key`` take turns with those of others. If this is cancelled, a body that
        waits is forgotten, and one that is being read is read to its end.

        Raises `RequestError` if the request cannot be served, and `EngineError` if the process
        dies, is stuck (`patience`; the next body then gets a new one) or is closed.
        """

        async def read() -> bytes:
            size = len(raw) + sum(len(file.text) for file in files)
            patience = self.patience + _SECONDS_PER_MB * size / 2**20
            head = encode(Question(endpoint, limits, list(files), kept, len(raw)))
            try:
                return await self.ask(patience, head, raw)
            except TimeoutError:
                raise EngineError(
                    f"the request was not read within {patience:.0f} s and is given up"
                ) from None
            except (asyncio.IncompleteReadError, ConnectionError):
                if self._ended:
                    raise ProcessKilledError(CLOSED) from None
                raise ProcessKilledError(
                    "the process that reads long requests has died; send the request again"
                ) from None

        answer = _decode_answer(await self.in_turn(read, key))
        if isinstance(answer, Failed):
            raise answer.exception
        return answer.whole


def answer(asked: Question, raw: bytes, encoder: PromptEncoder) -> bytes:
    """Return the frame that answers one body, whatever it holds."""
    try:
        parts = asked.limits, asked.files, asked.kept
        parsed = parse_request(asked.endpoint, raw, encoder, *parts)
        return encode(Parsed.of(parsed))
    except RequestError as error:
        refusal: RazorError = error
    except RecursionError:
        refusal = RequestError("the body is nested too deeply")
    except Exception:
        log.exception("a body cannot be read")
        refusal = EngineError(_FAILED)
    return encode(Failed.of("", refusal))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trust-remote-code", action="store_true")
    arguments = parser.parse_args()
    inherit_logging(discreet=True)
    pipes = Pipes()
    tokenizer = load_tokenizer(arguments.folder, trust_remote_code=arguments.trust_remote_code)
    encoder = PromptEncoder(tokenizer)
    while (frame := pipes.read()) is not None:
        question = _decode_question(frame)
        pipes.write(answer(question, pipes.read_bytes(question.nbytes), encoder))


if __name__ == "__main__":
    main()
