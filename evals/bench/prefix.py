"""Measure the prefix cache: questions and turns over HTTP, after kills, and hits under load.

Loads: ``questions`` asks a server of the embedded model about one document, goes on with a
conversation, and sends documents that share their first half; ``kill`` ends the server by SIGKILL
and asks another with the same store; ``needle`` does that with the needle model; ``zipf`` asks for
ten documents with room for two, beside the best that any eviction could do. ``contexts`` and
``needle-contexts`` keep a document and ask by its handle and by its text, before and after kills;
``pins`` keeps and ends many short ones and looks at the memory.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from razor_dist.documents.corpus import reference_prose
from razor_dist.evals.bench.measure import BenchRecord, Table
from razor_dist.evals.bench.settings import PrefixBenchSettings
from razor_dist.evals.needle.documents import hide_words
from razor_dist.evals.needle.model import HEAD_MAP, build_needle_model
from razor_dist.evals.serving import Answer, ServerProcess, ask, connect, serve, wait_until
from razor_dist.llm.llm import LLM
from razor_dist.protocol.sampling_params import SamplingParams

QUESTIONS = (
    "What is this text about?",
    "Which statement is explained first?",
    "Name one operator of the text.",
    "What does the text say about names?",
    "How does the text begin?",
)
TURNS = ("What is this text about?", "Say it in fewer words.", "Now in one word.")
_WORDS_PER_TOKEN = 0.74  # of `prose`, with the embedded model's tokenizer
# Of the Zipf load: requests, documents and their tokens, and documents that the pool holds.
_REQUESTS, _DOCUMENTS, _LENGTH, _ROOM = 200, 10, 240, 2

# Of the pins: marks of a request, contexts of a round, and rounds; those of the last one expire.
_MARKS, _PINS, _ROUNDS = 4, 52, 4
_EXPIRY_SECONDS = 400.0  # from the last use on, more than their time to live

Rows = list[tuple[str, Answer]]
Part = dict[str, Any]


class Asker:
    """A server with its client, asked for greedy answers."""

    def __init__(self, client: httpx.Client, process: ServerProcess, new_tokens: int) -> None:
        self.client, self.process, self._new_tokens = client, process, new_tokens
        self._model = client.get("/v1/models").json()["data"][0]["id"]

    def ask(
        self, *contents: str | Sequence[Part], new_tokens: int | None = None, **more: Any
    ) -> Answer:
        """Continue a conversation, the user's and the model's messages by turns.

        ``more`` are fields of the request.
        """
        roles = itertools.cycle(("user", "assistant"))
        messages = [{"role": next(roles), "content": content} for content in contents]
        return ask(self.client, self._model, messages, new_tokens or self._new_tokens, **more)

    def contexts(self) -> list[str]:
        return [one["id"] for one in self.client.get("/v1/contexts").json()["data"]]

    def memory(self) -> dict[str, int]:
        """Return the bytes of all ranks' KV caches in use, and those of all processes."""
        stats = self.client.get("/stats").json()
        resident = sum(process.memory_info().rss for process in self.process.family())
        return {"kv": sum(stats["kv_bytes_per_rank"]), "resident": resident}

    def on_disk(self) -> dict[str, Any]:
        """Wait until nothing is left to be saved; return the counters of the disk."""
        while True:
            found = self.client.get("/stats").json()["prefix_cache"]
            if not found["saving"]:
                return dict(found["disk"])
            time.sleep(0.1)


@contextmanager
def asker(settings: PrefixBenchSettings, *flags: str) -> Iterator[Asker]:
    flags = (f"--world-size={settings.world_size}", *flags)
    with serve(*flags) as process, connect(process.url()) as client:
        found = Asker(client, process, settings.new_tokens)
        found.ask("Hi")  # the first request warms up
        yield found


def run(settings: PrefixBenchSettings) -> BenchRecord:
    load = {"questions": questions, "zipf": zipf, "pins": pins}
    load |= {"contexts": by_handle, "needle-contexts": by_handle}
    return load.get(settings.load, after_a_kill)(settings)


def words_of(tokens: int) -> int:
    return round(tokens * _WORDS_PER_TOKEN)


def prose(words: int, begin: int = 0) -> str:
    """Return ``words`` words of the reference's prose, from word ``begin`` on."""
    paragraphs = reference_prose(begin + words, lambda text: len(text.split()))
    return " ".join(" ".join(paragraphs).split()[begin : begin + words])


def questions(settings: PrefixBenchSettings) -> BenchRecord:
    """Time questions and turns, and compare answers with those of a server without the cache."""
    document = prose(words_of(settings.prompt_tokens))
    halves = [" ".join(reversed(prose(1500, begin).split())) for begin in (0, 5000, 9000)]
    shared = prose(1500, 12000)
    flags = ("--max-num-seqs=8",)
    rows: Rows = []
    with asker(settings, *flags) as server:
        for number, question in enumerate(QUESTIONS, 1):
            rows.append((f"question {number}", server.ask(f"{document}\n\n{question}")))
        said: list[str] = []
        for number, turn in enumerate(TURNS, 1):
            said.append(turn if said else f"{document}\n\n{turn}")
            rows.append((f"turn {number}", server.ask(*said)))
            said.append(rows[-1][1].text)
        for number, half in enumerate(halves, 1):
            name = f"document {number} of a shared half"
            rows.append((name, server.ask(f"{shared}\n\n{half}")))
    with asker(settings, *flags, "--no-prefix-cache") as server:
        plain = [server.ask(f"{document}\n\n{question}") for question in QUESTIONS[:2]]
    same = all(row.text == answer.text for (_, row), answer in zip(rows, plain, strict=False))
    seconds = [answer.first_token_seconds for answer in plain]
    note = (
        f"Answers without the cache are {'the same' if same else 'others'}: {len(plain)} asked; "
        f"their first tokens: {', '.join(f'{second:.2f} s' for second in seconds)}."
    )
    figures = {"same_without_cache": same, "first_token_seconds_without_cache": seconds}
    return _record(settings, rows, figures, note)


def after_a_kill(settings: PrefixBenchSettings) -> BenchRecord:
    """Ask questions of a server that is killed then, and of another with the same store."""
    rows: Rows = []
    disk: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        flags, document, asked = _asked(settings, Path(folder))
        for name in ("first server", "after a kill"):
            with asker(settings, f"--prefix-store={folder}/store", *flags) as server:
                for number, (question, _) in enumerate(asked, 1):
                    rows.append((f"{name}, question {number}", server.ask(document + question)))
                disk = server.on_disk()
                server.process.kill()
    answers = [answer.text for _, answer in rows]
    same = answers[: len(asked)] == answers[len(asked) :]
    right = sum(wanted in text for (_, wanted), text in zip(2 * asked, answers, strict=True))
    note = (
        f"After the kill the answers are {'the same' if same else 'others'}; {right} of "
        f"{len(answers)} say what was hidden. {disk['bytes'] / 2**20:.1f} MiB on disk, "
        f"{disk['bytes'] / rows[0][1].prompt_tokens:.0f} bytes a token."
    )
    return _record(
        settings, rows, {"same_after_the_kill": same, "right": right, "disk": disk}, note
    )


def by_handle(settings: PrefixBenchSettings) -> BenchRecord:
    """Keep a document; ask by its handle and by its text, and so after kills."""
    rows: Rows = []
    with tempfile.TemporaryDirectory() as folder:
        flags, document, questions = _asked(settings, Path(folder))
        flags += [f"--prefix-store={folder}/store", "--pinned-gb=64"]
        text, first, *others = map(_part, (document, *(one for one, _ in questions[:3])))
        with asker(settings, *flags) as server:
            mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
            rows.append(("read and kept", server.ask([text | mark, first])))
            [context] = server.contexts()
            # Of questions that were not asked before, whose ends are not cached either.
            rows.append(("by handle", server.ask([others[0]], context=context)))
            rows.append(("text sent again", server.ask([text, others[1]])))
            disk = server.on_disk()
            server.process.kill()
        handle: dict[str, Any] = {"context": context}
        for name, parts, more in (("by handle", [], handle), ("text", [text], {})):
            with asker(settings, *flags) as server:
                for number, question in enumerate(others, 2):
                    answer = server.ask([*parts, question], **more)
                    rows.append((f"after a kill, {name}, question {number}", answer))
                server.process.kill()
    said = [answer.text for _, answer in rows]
    same = said[1:3] == said[3:5] == said[5:7]
    note = f"Answers to one question are {'the same' if same else 'others'}."
    return _record(settings, rows, {"same": same, "disk": disk}, note)


def _part(text: str) -> Part:
    return {"type": "text", "text": text}


def pins(settings: PrefixBenchSettings) -> BenchRecord:
    """Keep short contexts and end them, round after round; the last ones expire."""
    words, rounds = prose(100 * _ROUNDS * _PINS).split(), list[dict[str, Any]]()
    mark = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
    # Small caches: after two rounds every page and slot has been written, and is resident.
    room = ("--pinned-gb=1", "--max-num-seqs=32", "--kv-tokens=30K", "--max-model-len=1K")
    with asker(settings, *room) as server:
        rounds.append({"after": "the start", **server.memory()})
        for number in range(_ROUNDS):
            for request in range(0, _PINS, _MARKS):
                begin = 100 * (number * _PINS + request)
                texts = [" ".join(words[at : at + 100]) for at in range(begin, begin + 400, 100)]
                parts = [_part(f"{text} ") | mark for text in texts]
                server.ask([*parts, _part("Why?")], new_tokens=1)
            kept, during = server.contexts(), server.memory()
            if number < _ROUNDS - 1:
                for one in kept:
                    server.client.delete(f"/v1/contexts/{one}")
            assert wait_until(lambda: not server.contexts(), _EXPIRY_SECONDS)
            rounds.append({"after": f"{(number + 1) * len(kept)} contexts", **server.memory()})
            rounds[-1] |= {"kv of them": during["kv"], "kept": len(kept)}
    table = [["after", "KV bytes of this round's", "KV bytes left", "resident, MB"]]
    for row in rounds:
        counts = (str(row.get("kv of them", "")), str(row["kv"]))
        table.append([str(row["after"]), *counts, f"{row['resident'] / 1e6:.0f}"])
    return BenchRecord("prefix", settings, {"rounds": rounds}, [Table("", table)], [])


def _asked(
    settings: PrefixBenchSettings, folder: Path
) -> tuple[list[str], str, list[tuple[str, str]]]:
    """Return a server's flags, a document, and questions to follow it with what is hidden."""
    if "needle" not in settings.load:
        document = prose(words_of(settings.prompt_tokens))
        return ["--max-num-seqs=8"], document, [(f"\n\n{one}", "") for one in QUESTIONS[:3]]
    model = build_needle_model(folder / "needle")
    text, facts = hide_words(settings.prompt_tokens - 64, [10, 50, 90])
    flags = [f"--model={model}", f"--head-map={model / HEAD_MAP}", "--max-model-len=1100K"]
    flags += ["--max-num-seqs=2", "--collective-timeout=3600"]
    return flags, text, [(f" {fact.question}", fact.answer) for fact in facts]


def _record(
    settings: PrefixBenchSettings, rows: Rows, figures: Mapping[str, Any], note: str
) -> BenchRecord:
    first = rows[0][1].first_token_seconds
    table = [["request", "prompt tokens", "cached", "first token, s", "of the first's"]]
    for name, answer in rows:
        seconds = answer.first_token_seconds
        counts = (str(answer.prompt_tokens), str(answer.cached_tokens))
        table.append([name, *counts, f"{seconds:.2f}", f"{seconds / first:.3f}"])
    answers = [{"request": name, **vars(answer)} for name, answer in rows]
    return BenchRecord(
        "prefix", settings, {"answers": answers, **figures}, [Table("", table)], [note]
    )


def zipf(settings: PrefixBenchSettings) -> BenchRecord:
    """Count the hits of a pool with room for two documents, and the most possible."""
    draw = random.Random(0)
    weights = [1 / (rank + 1) for rank in range(_DOCUMENTS)]
    trace = draw.choices(range(_DOCUMENTS), weights, k=_REQUESTS)
    texts = [[draw.randrange(20, 1900) for _ in range(_LENGTH)] for _ in range(_DOCUMENTS)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    page = 16
    hits = 0
    with tempfile.TemporaryDirectory() as folder:
        pool = {"page_size": page, "kv_tokens": (_ROOM + 1) * (_LENGTH + 3 * page)}
        with LLM(
            str(build_needle_model(Path(folder) / "needle")),
            attention="full",
            max_model_len=512,
            max_num_seqs=1,
            threads=2,
            device="cpu",
            world_size=settings.world_size,
            **pool,
        ) as llm:
            for document in trace:
                question = [draw.randrange(20, 1900) for _ in range(8)]
                [output] = llm.generate(texts[document] + question, params)
                hits += output.num_cached_tokens >= _LENGTH
            stats = llm.stats()
    best = belady(trace, _ROOM)
    kept = {"KV bytes in use at the end": stats["kv_bytes_per_rank"]}
    kept |= {"resident bytes": stats["rss_per_rank"], "prefix cache": stats["prefix_cache"]}
    rows = [["requests", "documents", "room for", "hits", "optimum (Belady)", "of it"]]
    rows.append([*map(str, (_REQUESTS, _DOCUMENTS, _ROOM, hits, best)), f"{hits / best:.2f}"])
    notes = [f"{name}: {value}" for name, value in kept.items()]
    figures = {"hits": hits, "optimum": best, **kept}
    return BenchRecord("prefix", settings, figures, [Table("", rows)], notes)


def belady(trace: Sequence[int], room: int) -> int:
    """Hits of a cache that evicts what is used again last, and need not keep what it has read."""
    held: set[int] = set()
    hits = 0
    for at, item in enumerate(trace):
        hits += item in held
        held.add(item)
        if len(held) > room:
            rest = list(trace[at + 1 :])
            held.remove(max(held, key=lambda one: rest.index(one) if one in rest else len(rest)))
    return hits
