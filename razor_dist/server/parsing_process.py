"""`parse_request` in a process of its own, for bodies of megabytes.

Parsing a million token ids, or tokenising a million words, holds the interpreter's lock for longer
than /health and the heartbeats of other requests may wait (numbers in docs/LOG.md). So the frontend
sends long bodies to this process and gets token ids back, which it need not look at.

``python -m razor_dist.server.parsing_process FOLDER [--trust-remote-code]`` reads from its standard
input a msgpack frame (`razor_dist.engine.messages`) and the body that it announces, and answers
with a frame on its standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import BinaryIO

from razor_dist.config.errors import EngineError, ProcessKilledError, RequestError
from razor_dist.config.logs import inherit_logging
from razor_dist.engine.messages import (
    HEADER_SIZE,
    Message,
    body_length,
    decode,
    encode,
    error_message,
    exception_of,
    pack,
    unpack,
)
from razor_dist.engine.sampling_params import SamplingParams
from razor_dist.frontend.guard import child_environment, guarded, send_signal
from razor_dist.frontend.passages import PromptText
from razor_dist.frontend.prompts import Checked, PromptEncoder
from razor_dist.models.tokenizer import load_tokenizer
from razor_dist.server.request_parsing import Endpoint, Limits, ParsedRequest, parse_request
from razor_dist.server.tools import ToolUse

log = logging.getLogger(__name__)

_FAILED = "the request could not be read; see the server's log"
# Bytes of a body that are written to the process at a time.
_PIECE = 1 << 20
# Seconds that the process may take for a body, and more for each of its megabytes: tokenizers take
# up to a few seconds for one, and the first body waits for their loading as well.
_PATIENCE, _PATIENCE_PER_MB = 120.0, 60.0


class ParsingProcess:
    """The frontend's handle of the process, which is started by the first body that needs it."""

    def __init__(self, folder: Path, *, trust_remote_code: bool) -> None:
        self._arguments = [str(folder), *(["--trust-remote-code"] if trust_remote_code else [])]
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._asking: asyncio.Task[Message] | None = None
        self._ended = False

    async def parse_request(
        self, endpoint: Endpoint, raw: bytes | bytearray, limits: Limits
    ) -> ParsedRequest:
        """Parse as `request_parsing.parse_request`, one body after the other.

        If this is cancelled, since its client hung up, a body that waits is forgotten. One that is
        being read is read to its end, and the answer dropped: a new process would take as long to
        load the tokenizer again.

        Raises `RequestError` if the request cannot be served, and `EngineError` if the process
        dies or is stuck (`_PATIENCE`); the next body then gets a new one.
        """
        await self._turn.acquire()
        # In a task of its own, which passes the turn on: the answer must be taken from the process
        # before the next body, whoever still waits for it.
        self._asking = asyncio.create_task(self._ask(endpoint, raw, limits))
        # If nobody waits any more, nobody need hear of an error either.
        self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        answer = await asyncio.shield(self._asking)
        if "error" in answer:
            raise exception_of(answer["error"])
        return _parsed_of(answer)

    async def _ask(self, endpoint: Endpoint, raw: bytes | bytearray, limits: Limits) -> Message:
        """Get the process's answer to one body, and pass the turn on."""
        patience = _PATIENCE + _PATIENCE_PER_MB * len(raw) / 2**20
        try:
            async with asyncio.timeout(patience):
                return await _exchange(await self._running(), endpoint, raw, limits)
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise EngineError(
                    f"the request was not read within {patience:.0f} s and is given up"
                ) from None
            if isinstance(error, asyncio.IncompleteReadError | ConnectionError):
                raise ProcessKilledError(
                    "the process that reads long requests has died; send the request again"
                ) from None
            raise
        finally:
            self._turn.release()

    async def _running(self) -> Process:
        if self._ended:
            raise EngineError("the server is ending")
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *guarded("razor_dist.server.parsing_process", *self._arguments),
                stdin=PIPE,
                stdout=PIPE,
                env=child_environment(),
                start_new_session=True,  # a terminal's Ctrl-C is the frontend's to handle
            )
            if self._ended:  # meanwhile
                await self.aclose()
                raise EngineError("the server is ending")
        return self._process

    async def aclose(self) -> None:
        """Kill the process and wait for its end; no body that still waits may start another."""
        self._ended = True
        process = self._process
        self.close()
        if process is not None:
            await process.wait()

    def close(self) -> None:
        """Kill the process, whatever it is doing. Never waits."""
        process, self._process = self._process, None
        if process is not None:
            send_signal(process, signal.SIGKILL)


async def _exchange(
    process: Process, endpoint: Endpoint, raw: bytes | bytearray, limits: Limits
) -> Message:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(encode({"endpoint": endpoint, "limits": limits, "bytes": len(raw)}))
    # In pieces: each write copies what the pipe does not take at once.
    view = memoryview(raw)
    for begin in range(0, len(raw), _PIECE):
        process.stdin.write(view[begin : begin + _PIECE])
        await process.stdin.drain()
    header = await process.stdout.readexactly(HEADER_SIZE)
    return decode(await process.stdout.readexactly(body_length(header)))


def _answer(message: Message, raw: bytes, encoder: PromptEncoder) -> bytes:
    """Return the frame that answers one body, whatever it holds."""
    try:
        limits = Limits(*message["limits"])
        return encode(_message_of(parse_request(message["endpoint"], raw, encoder, limits)))
    except RequestError as error:
        return encode({"error": error_message("", error)})
    except Exception:
        log.exception("a body cannot be read")
        return encode({"error": error_message("", EngineError(_FAILED))})


def _message_of(parsed: ParsedRequest) -> Message:
    prompts = [
        [pack(tokens), params.to_wire(), text and text.to_wire()]
        for tokens, params, text in parsed.prompts
    ]
    flags = {k: v for k, v in vars(parsed).items() if k != "prompts"}
    # As text: it repeats the client's own objects, whose numbers msgpack may not hold.
    return {"prompts": prompts, "flags": flags | {"described": json.dumps(parsed.described)}}


def _parsed_of(answer: Message) -> ParsedRequest:
    prompts = [
        Checked(unpack(tokens), SamplingParams(**params), text and PromptText.from_wire(text))
        for tokens, params, text in answer["prompts"]
    ]
    flags = answer["flags"]
    tools = flags["tools"] and ToolUse(*flags["tools"])
    described = json.loads(flags["described"])
    return ParsedRequest(prompts, **flags | {"tools": tools, "described": described})


def _serve(encoder: PromptEncoder, source: BinaryIO, sink: BinaryIO) -> None:
    while header := source.read(HEADER_SIZE):
        message = decode(source.read(body_length(header)))
        sink.write(_answer(message, source.read(message["bytes"]), encoder))
        sink.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trust-remote-code", action="store_true")
    arguments = parser.parse_args()
    inherit_logging(discreet=True)
    # What a tokenizer may print must not get between the frames.
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    tokenizer = load_tokenizer(arguments.folder, trust_remote_code=arguments.trust_remote_code)
    _serve(PromptEncoder(tokenizer), sys.stdin.buffer, sink)


if __name__ == "__main__":
    main()
