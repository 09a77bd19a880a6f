"""Measurements of the prefix cache: questions and turns over HTTP, and hits under load.

``python -m razor_dist.evals.bench.prefix [--world-size P]`` starts a server of the embedded model,
asks with the official client, and prints Markdown (docs/benchmarks/prefix.md). ``--restart`` kills
the server and asks another one that has the same store; ``--needle N`` does that with the needle
model and a document of N tokens; ``--zipf`` is a load on a pool that is too small.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, cast

import httpx
import openai
import psutil

from razor_dist.config.schema import EngineConfig
from razor_dist.evals.needle.documents import hide_words
from razor_dist.evals.needle.model import HEAD_MAP, build_needle_model
from razor_dist.evals.one_rank import messages, one_rank_engine
from razor_dist.protocol.messages import Progress, Token
from razor_dist.protocol.sampling_params import SamplingParams

QUESTIONS = (
    "What is this text about?",
    "Which statement is explained first?",
    "Name one operator of the text.",
    "What does the text say about names?",
    "How does the text begin?",
)
TURNS = ("What is this text about?", "Say it in fewer words.", "Now in one word.")
_WORDS_PER_TOKEN = 0.68  # of that text, with the embedded model's tokenizer


@dataclass
class Asked:
    seconds: float  # to the first token
    prompt: int
    cached: int
    text: str


@contextmanager
def server(*flags: str, kill: bool = False) -> Iterator[openai.OpenAI]:
    """Start ``razor-dist serve``; yield a client of it. With ``kill`` it ends by SIGKILL."""
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "razor_dist", "serve", "--port", "0", *flags]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            for _ in range(1200):
                time.sleep(0.1)
                log.seek(0)
                found = re.findall(r"^Serving .* on (http://\S+)$", log.read(), re.MULTILINE)
                if found or process.poll() is not None:
                    break
            client = openai.OpenAI(base_url=f"{found[-1]}/v1", api_key="-", timeout=7200)
            while True:
                try:
                    client.models.list()
                    ask(client, [{"role": "user", "content": "Hi"}])
                    break
                except openai.APIStatusError:  # the model is being loaded
                    time.sleep(0.5)
            yield client
        finally:
            if kill:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
            process.terminate()
            process.wait()


def saved(client: openai.OpenAI) -> dict[str, Any]:
    """Wait until nothing is left to be saved; return the counters of the disk."""
    while True:
        stats_now: Any = httpx.get(str(client.base_url.join("/stats"))).json()
        if not stats_now["prefix_cache"]["saving"]:
            return dict(stats_now["prefix_cache"]["disk"])
        time.sleep(0.1)


def ask(client: openai.OpenAI, messages: Sequence[dict[str, str]], tokens: int = 16) -> Asked:
    """Ask for a greedy answer of ``tokens`` tokens."""
    began, first, text, usage = time.perf_counter(), 0.0, "", None
    stream: Any = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=cast("Any", messages),
        temperature=0,
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter() - began
            text += chunk.choices[0].delta.content
        usage = chunk.usage or usage
    assert usage is not None
    return Asked(first, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, text)


def conversations(document: str) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Five questions as separate conversations, each with a name."""
    for number, question in enumerate(QUESTIONS, 1):
        yield f"question {number}", [{"role": "user", "content": f"{document}\n\n{question}"}]


def over_http(world_size: int, tokens: int) -> None:
    """Print times to the first token of questions and turns, and whether answers are the same."""
    words = " ".join(topics[name] for name in sorted(topics)).split()
    document = " ".join(words[: round(tokens * _WORDS_PER_TOKEN)])
    halves = [" ".join(reversed(words[a : a + 1500])) for a in (0, 5000, 9000)]
    shared = " ".join(words[20000 : 20000 + 1500])
    flags = ("--world-size", str(world_size), "--max-num-seqs", "8")
    rows: list[tuple[str, Asked]] = []
    with server(*flags) as client:
        for name, messages in conversations(document):
            rows.append((name, ask(client, messages)))
        messages = []
        for number, turn in enumerate(TURNS, 1):
            text = f"{document}\n\n{turn}" if number == 1 else turn
            messages.append({"role": "user", "content": text})
            rows.append((f"turn {number}", ask(client, messages)))
            messages.append({"role": "assistant", "content": rows[-1][1].text})
        for number, half in enumerate(halves, 1):
            message = {"role": "user", "content": f"{shared}\n\n{half}"}
            rows.append((f"document {number} of a shared half", ask(client, [message])))
    plain = {}
    with server(*flags, "--no-prefix-cache") as client:
        for name, messages in list(conversations(document))[:2]:
            plain[name] = ask(client, messages)
    _table(f"P = {world_size}", rows)
    same = all(dict(rows)[name].text == answer.text for name, answer in plain.items())
    print(
        f"\nAnswers without the cache are {'the same' if same else 'others'}: {len(plain)} asked; "
    )
    print(f"their first tokens: {', '.join(f'{a.seconds:.2f} s' for a in plain.values())}.\n")


def after_a_kill(world_size: int, tokens: int) -> None:
    """Print times of a question to a server that is killed then, and to one after it."""
    words = " ".join(topics[name] for name in sorted(topics)).split()
    document = " ".join(words[: round(tokens * _WORDS_PER_TOKEN)])
    named = list(conversations(document))
    with tempfile.TemporaryDirectory() as store:
        flags = ("--world-size", str(world_size), "--max-num-seqs", "8", "--prefix-store", store)
        with server(*flags, kill=True) as client:
            fresh = ask(client, named[0][1])
            disk = saved(client)
        rows = [("fresh read", fresh)]
        with server(*flags) as client:
            rows += [(f"after the kill, {name}", ask(client, m)) for name, m in named[:2]]
    _table(f"P = {world_size}", rows)
    same = "the same" if rows[1][1].text == fresh.text else "another"
    print(f"\nAfter the kill the answer is {same}. {disk['bytes'] / 2**20:.1f} MiB on disk.\n")


def needle(world_size: int, tokens: int) -> None:
    """Print times of questions about a document for the needle model, then after a restart."""
    with tempfile.TemporaryDirectory() as folder:
        model, store = build_needle_model(Path(folder) / "needle"), Path(folder) / "store"
        text, facts = hide_words(tokens - 64, [10, 50, 90])
        flags = [
            *("--world-size", str(world_size), "--model", str(model), "--max-model-len", "1100K"),
            *("--head-map", str(model / HEAD_MAP), "--prefix-store", str(store)),
            *("--max-num-seqs", "2", "--collective-timeout", "3600"),
        ]
        rows, right = [], []
        for run in ("first server", "after a kill"):
            with server(*flags, kill=True) as client:
                for number, fact in enumerate(facts, 1):
                    content = f"{text} {fact.question}"
                    one = ask(client, [{"role": "user", "content": content}])
                    rows.append((f"{run}, question {number}", one))
                    right.append(fact.answer in one.text)
                disk = saved(client)
    _table(f"P = {world_size}, needle model", rows)
    per_token = disk["bytes"] / rows[0][1].prompt
    print(f"\n{sum(right)} of {len(right)} answers right. {per_token:.0f} bytes on disk a token.\n")


def _table(title: str, rows: Sequence[tuple[str, Asked]]) -> None:
    first = rows[0][1].seconds
    print(f"{title}\n")
    print("| request | prompt tokens | cached | first token, s | of the first's |")
    print("|---|---|---|---|---|")
    for name, one in rows:
        numbers = f"{one.prompt} | {one.cached} | {one.seconds:.2f} | {one.seconds / first:.3f}"
        print(f"| {name} | {numbers} |")


def under_load(requests: int = 200, documents: int = 10, length: int = 240) -> None:
    """Print the hit rate of a pool with room for two documents, and the best possible one."""
    block = 16
    folder = tempfile.TemporaryDirectory()
    config = EngineConfig(
        model=str(build_needle_model(Path(folder.name) / "needle")),
        attention="full",
        max_model_len=512,
        page_size=block,
        kv_tokens=3 * (length + 3 * block),  # two documents, and a request
        max_num_seqs=1,
        threads=2,
        device="cpu",
        seed=0,
    )
    core = one_rank_engine(config).core
    draw = random.Random(0)
    weights = [1 / (rank + 1) for rank in range(documents)]
    trace = draw.choices(range(documents), weights, k=requests)
    texts = [[draw.randrange(20, 1900) for _ in range(length)] for _ in range(documents)]
    found = []
    for number, document in enumerate(trace):
        question = [draw.randrange(20, 1900) for _ in range(8)]
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        core.add(str(number), texts[document] + question, params)
        cached = answered = 0
        for message in messages(core):
            cached = message.cached if isinstance(message, Progress) else cached
            answered += isinstance(message, Token)
        assert answered == 4
        found.append(cached >= length)
    stats = core.stats()
    best = belady(trace, 2)
    print(f"{requests} requests over {documents} documents in Zipf order, room for two of them:")
    print(f"hits {sum(found)}, the optimum (Belady) {best}, {sum(found) / best:.2f} of it.")
    used, resident = stats["kv_bytes_per_rank"], stats["rss_per_rank"]
    print(f"KV bytes in use at the end {used}, resident {resident}, {stats['prefix_cache']}\n")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--restart", action="store_true", help="kill it, and ask another instead")
    parser.add_argument("--needle", type=int, metavar="N", help="the same with the needle model")
    parser.add_argument("--zipf", action="store_true", help="the load on a small pool instead")
    arguments = parser.parse_args()
    if arguments.zipf:
        under_load()
    elif arguments.needle:
        needle(arguments.world_size, arguments.needle)
    elif arguments.restart:
        after_a_kill(arguments.world_size, arguments.tokens)
    else:
        over_http(arguments.world_size, arguments.tokens)


if __name__ == "__main__":
    main()
