"""Structured outputs are compiled in a process of its own, which may die of them.

A few bytes can make llguidance, native code, crash or take minutes and gigabytes. So it never runs
in the frontend, and rank 0 compiles only constraints that this process has compiled before.

``python -m razor_dist.frontend.grammar_process BYTES`` reads frames
(`razor_dist.protocol.messages`) from its standard input: first the model's vocabulary, then
constraints of up to that many bytes each, and answers each with a frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import resource
import signal
import sys
import threading
import time
from asyncio.subprocess import Process
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from razor_dist.config.errors import EngineError, ProcessKilledError, RequestError
from razor_dist.documents.read import KILLED
from razor_dist.frontend.child_process import (
    CLOSED,
    ChildProcess,
    Pipes,
    ProcessDiedError,
    exchange,
)
from razor_dist.protocol.messages import Failed, decoder, encode
from razor_dist.protocol.structured_outputs import GrammarText, StructuredOutputsParams, stack_size
from razor_dist.protocol.vocabulary import (
    FIELD,
    SerializedTokenizer,
    Vocabulary,
    load_vocabulary,
    serialized,
    vocabulary_of,
)

if TYPE_CHECKING:  # these imports take seconds and megabytes, and the process needs none
    from llguidance import LLTokenizer
    from transformers import PreTrainedTokenizerBase

    from razor_dist.frontend.prompts import Checked
    from razor_dist.protocol.messages import EngineInfo

# Seconds for the process to start and load the vocabulary.
_START_SECONDS = 120.0
# The process is replaced once its resident memory is larger.
_LARGEST_BYTES = 1 << 29
# The stack on which it compiles: an eighth of rank 0's, which can compile all that fits here.
_STACK_BYTES = 8 << 20
# Constraints whose results are remembered.
_RESULTS = 32
# Constraints of one key that may wait to be compiled.
MOST_WAITING = 16
# Time for which a time-out is remembered: the machine may have been busy.
_TIME_OUT_SECONDS = 60.0
# The answer to a constraint: llguidance's text.
Compiled = str | Failed
_decode_vocabulary: Callable[[bytes], Vocabulary] = decoder(Vocabulary)
_decode_started: Callable[[bytes], Failed | None] = decoder(Failed | None)
_decode_constraint: Callable[[bytes], StructuredOutputsParams] = decoder(StructuredOutputsParams)
_decode_compiled: Callable[[bytes], Compiled] = decoder(Compiled)
_SIMPLER = "make it simpler: fewer, shorter or less nested rules, terminals and repetitions"


class GrammarProcess(ChildProcess):
    """The frontend's handle of the process, which is started by the first constraint.

    Compiling may take ``seconds``, and ``memory`` bytes beyond what the process has at its start.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        info: Callable[[], EngineInfo],
        *,
        seconds: float = 3.0,
        memory: int = 1 << 30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("razor_dist.frontend.grammar_process", str(memory), largest=_LARGEST_BYTES)
        self.seconds, self._clock = seconds, clock
        self._tokenizer, self._info = tokenizer, info
        # Set by `load`; the refusal if the model cannot have structured outputs.
        self._serialized: SerializedTokenizer | None = None
        self._refusal: RequestError | None = None
        # By digest of the constraint: llguidance's text or the refusal, and when it expires.
        self._results: OrderedDict[bytes, tuple[Compiled, float]] = OrderedDict()
        # By key: digests of the constraints that wait or are being compiled.
        self._waiting: dict[Hashable, Counter[bytes]] = {}

    def load(self) -> None:
        """Serialise the tokenizer, in a thread or before the event loop serves: it takes long."""
        try:
            self._serialized = serialized(self._tokenizer)
        except RequestError as error:
            self._refusal = error

    async def compiled(self, prompts: Sequence[Checked], key: Hashable = None) -> list[Checked]:
        """Return the prompts with each constraint compiled to a `GrammarText`.

        Keys take turns. Raises `RequestError` if a constraint cannot be compiled within the bounds
        of time and memory, or, with the code ``rate_limit_exceeded``, if `MOST_WAITING` others of
        the key wait; `ProcessKilledError` if the process was killed from outside, twice.
        """
        # A request's prompts share their parameters.
        texts: dict[int, GrammarText] = {}
        found = []
        for prompt in prompts:
            params, structured = prompt.params, prompt.params.structured_outputs
            if structured is not None and not isinstance(structured, GrammarText):
                if id(structured) not in texts:
                    texts[id(structured)] = await self.compile(structured, key)
                params = replace(params, structured_outputs=texts[id(structured)])
            found.append(prompt._replace(params=params))
        return found

    async def compile(
        self, structured: StructuredOutputsParams, key: Hashable = None
    ) -> GrammarText:
        """Compile a constraint and return llguidance's text of it; raises as `compiled`."""
        question = await asyncio.to_thread(_question, structured)
        digest = hashlib.sha256(question).digest()
        result = self._known(digest)
        if result is None:
            with self._place(digest, key):
                result = await self.in_turn(lambda: self._compile(digest, question), key)
        if isinstance(result, Failed):
            raise result.exception
        return GrammarText(result)

    def _known(self, digest: bytes) -> Compiled | None:
        result, end = self._results.pop(digest, (None, 0.0))
        if result is None or self._clock() >= end:
            return None
        self._results[digest] = result, end  # behind the others
        return result

    async def _compile(self, digest: bytes, question: bytes) -> Compiled:
        if (known := self._known(digest)) is not None:  # compiled while this one waited
            return known
        end = math.inf
        if self._serialized is None and self._refusal is None:
            await asyncio.to_thread(self.load)
        if self._refusal is not None:
            return Failed.of("", self._refusal)
        try:
            result = await self._ask_twice(question)
        except TimeoutError:
            problem = f"compiling it took longer than {self.seconds:g} s; {_SIMPLER}"
            result = _failure(problem, "structured_outputs_timeout")
            end = self._clock() + _TIME_OUT_SECONDS
        except ProcessDiedError as death:
            if self._ended:
                raise ProcessKilledError(CLOSED) from None
            if death.code in KILLED:
                raise ProcessKilledError(
                    "the process that compiles structured outputs was ended by "
                    f"{signal.Signals(-death.code).name}; send the request again"
                ) from None
            result = _failure(f"the process that compiled it crashed; {_SIMPLER}")
        except RequestError as error:
            self._refusal = error  # the vocabulary's: the next process would refuse it as well
            return Failed.of("", error)
        self._results[digest] = result, end
        if len(self._results) > _RESULTS:
            self._results.popitem(last=False)
        return result

    async def _ask_twice(self, question: bytes) -> Compiled:
        """As `ask`, twice if the process was killed from outside, perhaps while it was idle."""
        try:
            return _decode_compiled(await self.ask(self.seconds, question))
        except ProcessDiedError as death:
            if self._ended or death.code not in KILLED:
                raise
        return _decode_compiled(await self.ask(self.seconds, question))

    async def _prepare(self, process: Process) -> None:
        vocabulary = await asyncio.to_thread(self._encoded_vocabulary)
        problem = "the process that compiles structured outputs did not start"
        try:
            async with asyncio.timeout(_START_SECONDS):
                failed = _decode_started(await exchange(process, vocabulary))
        except TimeoutError:
            raise EngineError(problem) from None
        except ProcessDiedError as death:
            if death.code in KILLED:
                raise
            raise EngineError(problem) from None
        if failed is not None:
            raise failed.exception

    def _encoded_vocabulary(self) -> bytes:
        assert self._serialized is not None
        info = self._info()
        return encode(vocabulary_of(self._serialized, info.vocab_size, info.eos_token_ids))

    @contextlib.contextmanager
    def _place(self, digest: bytes, key: Hashable) -> Iterator[None]:
        """Count a constraint that waits; `RequestError` if too many others of its key wait."""
        digests = self._waiting.setdefault(key, Counter())
        if key is not None and digest not in digests and len(digests) >= MOST_WAITING:
            raise RequestError(
                f"{FIELD}: {len(digests)} other constraints of yours wait to be compiled, and no "
                "more may; try again later",
                param=FIELD,
                code="rate_limit_exceeded",
            )
        digests[digest] += 1
        try:
            yield
        finally:
            digests[digest] -= 1
            if not digests[digest]:
                del digests[digest]
            if not digests:
                del self._waiting[key]


def _question(structured: StructuredOutputsParams) -> bytes:
    structured.check()
    return encode(structured)


def _failure(problem: str, code: str | None = None) -> Failed:
    return Failed("", f"{FIELD}: {problem}", FIELD, code)


def _serve(pipes: Pipes, memory: int) -> None:
    vocabulary = pipes.read()
    if vocabulary is None:
        return
    try:
        tokenizer = load_vocabulary(_decode_vocabulary(vocabulary))
    except RequestError as error:
        pipes.write(encode(Failed.of("", error)))
        return
    del vocabulary
    _limit_memory(memory)
    # From now on native code may print what a client wrote.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    pipes.write(encode(None))
    while (question := pipes.read()) is not None:
        pipes.write(encode(_compiled(question, tokenizer, memory)))


def _compiled(question: bytes, tokenizer: LLTokenizer, memory: int) -> Compiled:
    try:
        return _decode_constraint(question).compiled(tokenizer).text
    except RequestError as error:
        return Failed.of("", error)
    except MemoryError:
        return _failure(f"compiling it took more than {memory >> 20} MiB; {_SIMPLER}")
    except Exception as error:  # of native code, or of llguidance's converter
        return _failure(f"it cannot be compiled ({type(error).__name__}); {_SIMPLER}")


def _limit_memory(memory: int) -> None:
    """Bound the address space to ``memory`` bytes beyond its present size."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no KeyboardInterrupt, but exit code -2
    pipes, memory = Pipes(), int(sys.argv[1])
    with stack_size(_STACK_BYTES):
        thread = threading.Thread(target=_serve, args=(pipes, memory))
        thread.start()
    thread.join()


if __name__ == "__main__":
    main()
