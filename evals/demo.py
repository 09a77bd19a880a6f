"""``razor-dist demo``: ranks on this machine find one sentence in a document of 7,000 tokens.

Starts ``razor-dist serve`` as a user would, asks over HTTP, streams the answer and prints what
splitting the heads saved. It needs nothing but the embedded model and a CPU.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from razor_dist.config.cores import usable_cores
from razor_dist.config.errors import RazorError
from razor_dist.config.schema import EngineConfig
from razor_dist.documents.corpus import reference_prose
from razor_dist.evals.serving import Answer, ServingError, ask, connect, serve

MODEL = "smollm2"
DOCUMENT_TOKENS = 7000
SENTENCE = "The phone number of Doctor Miller is 482913."
QUESTION = "What is the phone number of Doctor Miller?"
NUMBER = "482913"
# Percent of the document before the sentence.
DEPTH = 40
MAX_ANSWER_TOKENS = 48
# Chunks of two or three seconds on two cores, so that progress can be seen; and a window of
# constant length, which is whole on every rank: with the embedded model's own window of a fifth of
# the context, five ranks or more would keep more than full attention's shards.
SETTINGS = {"device": "cpu", "chunked-prefill-size": "1024", "window-ratio": "none"}
# Between two lines of progress where there is no terminal to draw a bar on.
_LINE_SECONDS = 3.0


def main(world_size: int, serve_flags: Sequence[str]) -> int:
    """`run`, with errors as a line on standard error; 0 only if the answer is right."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `kill` must end the server too
    console = Console(highlight=False)
    try:
        return run(world_size, serve_flags, console)
    except KeyboardInterrupt:
        console.print("\ninterrupted; the server has been ended")
        return 130
    except (RazorError, httpx.HTTPError) as error:
        Console(stderr=True).print(f"demo: {error}", style="red", markup=False)
        return 1


def run(world_size: int, serve_flags: Sequence[str], console: Console) -> int:
    """Start the server, ask, report; return 0 if the answer holds the hidden number, else 1."""
    from tokenizers import Tokenizer

    from razor_dist.models.registry import resolve_model
    from razor_dist.plan.deployment import Deployment

    console.print(f"[bold]1.[/] {MODEL}, the embedded model")
    folder = resolve_model(MODEL)  # the first time this converts it, and says so
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    document = build_document(lambda text: len(tokenizer.encode(text, add_special_tokens=False)))
    settings = {"model": MODEL, "world-size": str(world_size), **SETTINGS}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        with _activity(f"starting {world_size} ranks", console):
            process = stack.enter_context(serve(*flags, *serve_flags, stderr=None))
            url = process.url()
            client = stack.enter_context(connect(url))
        console.print(f"   ready on {url} after {time.monotonic() - began:.0f} s")
        console.print(
            f"[bold]2.[/] sending {len(document):,} characters of Python's language reference, "
            f"with one sentence hidden after {DEPTH} % of it:\n   [italic]{SENTENCE}[/]\n"
            f"   and at the end a question: [italic]{QUESTION}[/]"
        )
        before = client.get("/stats").raise_for_status().json()
        answer = ask_aloud(client, f"{document}\n\n{QUESTION}", console)
        after = client.get("/stats").raise_for_status().json()
    saved = Savings.between(
        before,
        after,
        tokens=answer.prompt_tokens + answer.completion_tokens,
        prompt_tokens=answer.prompt_tokens,
        token_bytes=Deployment.of(EngineConfig(model=MODEL), "cpu").full_kv_bytes,
    )
    console.print("[bold]3.[/] what it took\n", saved.tables())
    console.print(
        f"{answer.first_token_seconds:.1f} s to the first token of the answer, then "
        f"{answer.tokens_per_second:.1f} tokens/s ({answer.completion_tokens} tokens after a "
        f"prompt of {answer.prompt_tokens:,}); {world_size} ranks on "
        f"{usable_cores()} cores"
    )
    right = NUMBER in re.findall(r"\d+", answer.text)
    verdict = "[green]right[/]" if right else f"[red]wrong[/]: it does not say {NUMBER}"
    console.print(f"The answer is {verdict}.")
    return 0 if right else 1


def build_document(count_tokens: Callable[[str], int]) -> str:
    """Join paragraphs of at most `DOCUMENT_TOKENS` tokens, with `SENTENCE` among them."""
    room = DOCUMENT_TOKENS - count_tokens(SENTENCE)
    *chosen, _ = reference_prose(room + 1, lambda text: count_tokens(text + "\n\n"))
    # The paragraph in which the depth lies ends with the sentence.
    before = DEPTH / 100 * sum(map(len, chosen))
    ends = itertools.accumulate(map(len, chosen))
    index = next(i for i, end in enumerate(ends) if end >= before)
    chosen[index] += f" {SENTENCE}"
    return "\n\n".join(chosen)


@contextlib.contextmanager
def _activity(text: str, console: Console) -> Iterator[Callable[[int, int], None]]:
    """Show progress, a bar or else lines; yields what takes the tokens done and their total."""
    columns = (
        SpinnerColumn("line"),
        TextColumn(text),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    shown, lines = time.monotonic(), not console.is_terminal
    with Progress(*columns, console=console, disable=lines) as bar:
        task = bar.add_task("", total=None)

        def tell(done: int, total: int) -> None:
            nonlocal shown
            count = f"{done:,} of {total:,} tokens"
            bar.update(task, total=total, completed=done, description=count)
            if lines and (done == total or time.monotonic() - shown > _LINE_SECONDS):
                shown = time.monotonic()
                console.print(f"   {text}: {count}")

        if lines:
            console.print(f"   {text} ...")
        yield tell


def ask_aloud(client: httpx.Client, content: str, console: Console) -> Answer:
    """Ask one question; the answer is printed as it comes."""
    with contextlib.ExitStack() as reading:
        progress = reading.enter_context(_activity("reading", console))
        said = 0

        def say(piece: str) -> None:
            nonlocal said
            if not said:
                reading.close()
                console.print("   [bold]answer:[/] ", end="")
            said += len(piece)
            console.print(piece, end="", style="cyan", markup=False, soft_wrap=True)

        messages = [{"role": "user", "content": content}]
        answer = ask(client, MODEL, messages, MAX_ANSWER_TOKENS, on_text=say, on_progress=progress)
    console.print()
    if not answer.text:
        raise ServingError("the answer is empty")
    return answer


@dataclass(frozen=True)
class Savings:
    world_size: int
    tokens: int  # of prompt and answer
    prompt_tokens: int
    token_bytes: int  # of a token's keys and values in all heads
    kv_bytes_per_rank: int  # measured: the most that any rank held
    bytes_sent: dict[str, int]  # measured: between ranks by purpose, all ranks together
    retrieval_fraction: float  # of the KV heads
    shared: bool = False  # each rank holds the windows of its own streaming heads alone

    @classmethod
    def between(
        cls, before: Mapping[str, Any], after: Mapping[str, Any], **counted: int
    ) -> Savings:
        """Subtract the engine's counters (``GET /stats``) before a request from those after it.

        The peak of KV bytes is the highest since the start: the request must be the largest yet.
        """
        sent = {p: n - before["bytes_sent"][p] for p, n in after["bytes_sent"].items()}
        return cls(
            world_size=after["world_size"],
            kv_bytes_per_rank=max(after["peak_kv_bytes_per_rank"]),
            bytes_sent={purpose: n for purpose, n in sent.items() if n},
            retrieval_fraction=after["retrieval_fraction"],
            shared=after["decode"] == "tensor",
            **counted,
        )

    @property
    def full_per_rank(self) -> float:
        """Bytes of full attention's keys and values, sharded over the ranks."""
        return self.tokens * self.token_bytes / self.world_size

    @property
    def full_ring_bytes(self) -> float:
        """Bytes of a ring of all heads over the same prefill chunks: each head sends the same."""
        return self.bytes_sent.get("ring", 0) / self.retrieval_fraction

    @property
    def window_tokens(self) -> float:
        """Tokens that each rank holds of the streaming heads, their window above all."""
        streaming = self.kv_bytes_per_rank - self.retrieval_fraction * self.full_per_rank
        return streaming / ((1 - self.retrieval_fraction) * self.token_bytes)

    def tables(self) -> RenderableType:
        held, share = self.kv_bytes_per_rank, self.full_per_rank
        memory = _table("keys and values", "MB", "of full")
        rows = {"full attention, all on one rank": share * self.world_size}
        if self.world_size > 1:
            rows[f"full attention, a rank's share of {self.world_size}"] = share
        rows["razor, most on one rank (measured)"] = held
        for name, nbytes in rows.items():
            of_full = nbytes / (share * self.world_size)
            memory.add_row(name, _mb(nbytes), f"{of_full:.2f}")
        parts: list[RenderableType] = [memory]
        if self.retrieval_fraction < 1 and held >= share and not self.shared:
            parts.append(
                f"Every rank holds the streaming heads' window whole, {self.window_tokens:,.0f} "
                f"tokens; a share of full attention's is {self.tokens / self.world_size:,.0f}. "
                f"With a window of this size, {self.world_size} ranks keep less than full "
                f"attention from about {self.window_tokens * self.world_size:,.0f} tokens on.\n"
            )
        return Group(*parts, *([self._traffic()] if self.world_size > 1 else []))

    def _traffic(self) -> Table:
        rows: dict[str, float] = {**self.bytes_sent}
        rows["razor, all (measured)"] = sum(self.bytes_sent.values())
        if self.retrieval_fraction:
            rows["full attention, its ring alone"] = self.full_ring_bytes
        table = _table("sent between ranks", "MB", "bytes / prompt token")
        for number, (name, sent) in enumerate(rows.items(), 1):
            last = number == len(self.bytes_sent)
            table.add_row(name, _mb(sent), f"{sent / self.prompt_tokens:,.0f}", end_section=last)
        return table


def _table(name: str, *numbers: str) -> Table:
    return Table(name, *(Column(number, justify="right") for number in numbers))


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f}"
