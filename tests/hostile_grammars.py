"""Grammars, schemas and expressions that explode, by hand and at random.

``python -m tests.hostile_grammars URL [COUNT [SEED]]`` asks a running server for answers that match
COUNT random ones, some at a time, while another client chats, and prints what came of it.
"""

from __future__ import annotations

import json
import random
import string
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.schemas import random_schema

Structured = dict[str, Any]


def chained_rules(count: int) -> str:
    rules = "".join(f'r{i}: r{i + 1} "a"\n' for i in range(count))
    return f'start: r0\n{rules}r{count}: "b"\n'


def chained_terminals(count: int) -> str:
    rules = "".join(f'T{i}: T{i + 1} "a"\n' for i in range(count))
    return f'start: T0\n{rules}T{count}: "b"\n'


def chained_gbnf(count: int) -> str:
    rules = "".join(f'r{i} ::= r{i + 1} "a"\n' for i in range(count))
    return f'root ::= r0\n{rules}r{count} ::= "b"\n'


def chained_references(count: int) -> dict[str, Any]:
    defs: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {"n": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(count)
    }
    return {"$defs": defs | {f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


# No thread's stack survives it, and no bound sees it before llguidance does.
_LINKS = ",".join(f'"d{i}":{{"items":{{"$ref":"#/$defs/d{i + 1}"}}}}' for i in range(5500))
CRASHES = f'start: %json {{"$defs":{{{_LINKS},"d5500":{{}}}},"$ref":"#/$defs/d0"}}'


def nested_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def doubling_terminals(count: int) -> str:
    """Terminals of which each is twice the next: a few hundred bytes that are a long expression."""
    rules = "".join(f"T{i}: T{i - 1} T{i - 1}\n" for i in range(1, count))
    return f"start: T{count - 1}\nT0: /[a-z]{{0,50}}/\n{rules}"


def multiples(count: int) -> dict[str, Any]:
    items = [{"type": "integer", "multipleOf": 1009 * k + 9001} for k in range(count)]
    return {"type": "array", "prefixItems": items, "minItems": count}


def random_structured(rng: random.Random) -> Structured:
    """Return what a request may ask its answer to match: most are valid, some explode."""
    kind = rng.choice([_lark, _gbnf, _json, _json, _regex, _regex, _choice])
    return kind(rng)


def _word(rng: random.Random, most: int = 8) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, most)))


def _expression(rng: random.Random, depth: int) -> str:
    if depth <= 0:
        return rng.choice([_word(rng), r"\d", r"\w", ".", "[a-z]", "[^b]", r"\s", "(?:x|y)", ""])
    parts = [_expression(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    text = rng.choice(["", "|", "a?"]).join(parts)
    least = rng.choice([0, 1, 2, 10, 500])
    counts = ["", "", "*", "+", "?", f"{{{least}}}", f"{{{least},{least + rng.randint(0, 2000)}}}"]
    return f"({text}){rng.choice(counts)}"


def _regex(rng: random.Random) -> Structured:
    return {"regex": _expression(rng, rng.randint(0, 5))}


def _choice(rng: random.Random) -> Structured:
    return {"choice": [_word(rng, 30) for _ in range(rng.choice([1, 5, 50, 2000]))]}


def _body(rng: random.Random, names: list[str]) -> str:
    alternatives = []
    for _ in range(rng.randint(1, 4)):
        parts = []
        for _ in range(rng.randint(1, 4)):
            part = rng.choice(names) if rng.random() < 0.6 else f'"{_word(rng)}"'
            counts = ["", "", "", "?", "*", "+", f"{{1,{rng.randint(1, 99)}}}"]
            parts.append(part + rng.choice(counts))
        alternatives.append(" ".join(parts))
    return " | ".join(alternatives)


def _lark(rng: random.Random) -> Structured:
    count = rng.choice([1, 3, 10, 100, 400])
    rules, terminals = [f"r{i}" for i in range(count)], [f"T{i}" for i in range(count)]
    lines = [f"start: {_body(rng, rules)}"]
    lines += [f"{name}: {_body(rng, rules + terminals)}" for name in rules]
    for at, name in enumerate(terminals):
        later = terminals[at + 1 :]
        if later and rng.random() < 0.5:
            lines.append(f"{name}: {_body(rng, later)}")
        else:
            expression = _expression(rng, rng.randint(0, 3)).replace("/", "") or "x"
            lines.append(f"{name}: /{expression}/")
    return {"grammar": "\n".join(lines)}


def _gbnf(rng: random.Random) -> Structured:
    names = [f"r{i}" for i in range(rng.choice([1, 3, 10, 100, 400]))]
    lines = [f"{name} ::= {_body(rng, names)}" for name in ["root", *names]]
    return {"grammar": "\n".join(lines)}


def _json(rng: random.Random) -> Structured:
    schema = random_schema(rng, rng.randint(1, 6))
    for _ in range(rng.randint(0, 3)):
        _spoil(rng, schema)
    return {"json": schema}


def _spoil(rng: random.Random, schema: dict[str, Any]) -> None:
    """Add something to a schema that may be large, contradictory, circular or wrong."""
    own: dict[str, Any] = rng.choice(
        [
            {"multipleOf": rng.choice([3, 7919, 0.01, 99991]), "type": "integer"},
            {"pattern": _expression(rng, 3), "type": "string"},
            {"$ref": "#"},
            {"$ref": "#/properties/" + _word(rng)},
            chained_references(rng.choice([5, 150])),
            nested_schema(rng.choice([5, 190])),
            {"allOf": [{"pattern": _expression(rng, 2)} for _ in range(4)], "type": "string"},
            {"anyOf": [random_schema(rng, 2) for _ in range(8)]},
            {"enum": [_word(rng, 20) for _ in range(rng.choice([3, 1000]))]},
            {"minLength": rng.randint(0, 3000), "maxLength": 3000, "type": "string"},
            {"type": rng.choice(["foo", 5, None, ["string", "null"]])},
            {"patternProperties": {_expression(rng, 2): {"type": "integer"}}, "type": "object"},
            {"minItems": rng.randint(0, 2000), "items": {"type": "integer"}, "type": "array"},
        ]
    )
    schema.setdefault("properties", {})[_word(rng)] = own


def _measure(url: str, count: int, seed: int, at_once: int = 4) -> None:
    """Ask ``at_once`` requests at a time; another client chats and a third polls /health."""
    rng = random.Random(seed)
    asked = [random_structured(rng) for _ in range(count)]
    statuses: Counter[str] = Counter()
    seconds: dict[str, list[float]] = {"asked": [], "chat": [], "health": []}
    done, http = threading.Event(), httpx.Client(timeout=120)
    chat = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}]}

    def ask(structured: Structured) -> None:
        begin = time.perf_counter()
        body = json.dumps(chat | {"max_tokens": 4, "structured_outputs": structured})
        answer = http.post(
            f"{url}/v1/chat/completions",
            content=body,
            headers={"Content-Type": "application/json"},
            timeout=120,
        )
        taken = time.perf_counter() - begin
        seconds["asked"].append(taken)
        statuses[str(answer.status_code)] += 1
        if answer.status_code not in (200, 400):
            print("unexpected", answer.status_code, answer.text[:300], body[:2000])
        for word in ("longer than", "crashed", "took more than"):
            statuses[word] += answer.status_code == 400 and word in answer.text

    def repeat(name: str, request: Any) -> None:
        while not done.is_set():
            begin = time.perf_counter()
            assert request().status_code == 200
            seconds[name].append(time.perf_counter() - begin)
            done.wait(0.05)

    def talk() -> httpx.Response:
        body = chat | {"max_tokens": 4, "ignore_eos": True}
        return http.post(f"{url}/v1/chat/completions", json=body)

    others = [
        threading.Thread(target=repeat, args=("chat", talk)),
        threading.Thread(target=repeat, args=("health", lambda: http.get(f"{url}/health"))),
    ]
    for thread in others:
        thread.start()
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(ask, asked))
    done.set()
    for thread in others:
        thread.join()
    print(f"{count} from seed {seed}: {dict(statuses)}")
    for name, found in seconds.items():
        found.sort()
        tail = [found[int(q * (len(found) - 1))] for q in (0.5, 0.99, 1.0)]
        print(
            f"{name}: {len(found)}, median / 99 % / worst {' / '.join(f'{t:.3f}' for t in tail)} s"
        )


if __name__ == "__main__":
    _measure(sys.argv[1], *map(int, sys.argv[2:4] or ["200"]), *([0] if len(sys.argv) < 4 else []))
