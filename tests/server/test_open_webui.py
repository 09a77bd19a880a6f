"""Open WebUI's filter function, on streams of the server: a recorded one and those of now."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.process import ROOT, server_on

# The answer of the embedded model to the question in `client_bodies.json` that the filter has
# changed, most of its progress left out.
RECORDED = Path(__file__).with_name("open_webui_stream.txt").read_text()
SAMPLE = (ROOT / "razor_dist/server/page/sample.js").read_text()
HARBOUR = re.findall("`(.*?)`", SAMPLE, re.DOTALL)[0]
Filter = runpy.run_path(str(ROOT / "deploy/open-webui/razor_dist_filter.py"))["Filter"]


def document(name: str, text: str) -> dict[str, Any]:
    """A document as Open WebUI's metadata have it."""
    return {"source": {"name": name}, "document": [text], "metadata": [{"name": name}]}


def shown(text: str, *documents: dict[str, Any], **valves: Any) -> list[tuple[str, dict[str, Any]]]:
    """The types and data of the events that the filter shows for a stream."""
    events: list[tuple[str, dict[str, Any]]] = []
    chosen, metadata = Filter(), {"sources": list(documents)}
    chosen.valves = chosen.Valves(**valves)

    async def emit(event: dict[str, Any]) -> None:
        events.append((event["type"], event["data"]))

    async def run() -> None:
        for line in re.findall(r"^data: (\{.*\})$", text, re.MULTILINE):
            chunk = json.loads(line)
            assert await chosen.stream(chunk, emit, metadata) is chunk
            assert chunk == json.loads(line)

    asyncio.run(run())
    json.dumps(metadata)  # Open WebUI keeps them
    return events


def statuses(events: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [data for kind, data in events if kind == "status"]


def test_a_recorded_answer() -> None:
    documents = document("license.txt", "Apache License"), document("harbour.md", HARBOUR)
    events = shown(RECORDED, *documents)
    said = statuses(events)
    assert said[0] == {"description": "Reading: 0 % of 2,636 tokens", "done": False}
    assert [s["done"] for s in said] == [False] * (len(said) - 1) + [True]
    assert re.fullmatch(r"Reading: 22 % of 2,636 tokens, about \d+ s left", said[1]["description"])
    assert re.fullmatch(r"Read 2,636 tokens, \d+\.\d s", said[-1]["description"])
    percents = [int(s["description"].split()[1]) for s in said[:-1]]
    assert all(later - sooner >= 5 for sooner, later in pairwise(percents))
    passages = [data for kind, data in events if kind == "source"]
    assert [kind for kind, _ in events].index("source") == len(said)
    keeper = "The first keeper was Joseph Marl, who lived there for thirty years with his sister "
    assert [p["document"] for p in passages] == [
        [f"{keeper}and a dog called Pepper."],
        ["# The harbour of Nelby"],  # Open WebUI's tag before it is left out
    ]
    title = (
        "harbour.md: The first keeper was Joseph Marl, who lived there for thirty years with his..."
    )
    assert passages[0]["source"] == {"name": title}
    assert len({p["metadata"][0]["source"] for p in passages}) == 2
    # What is no document's is named by its message; the filter's settings count.
    [(_, named)] = shown(RECORDED, least_tokens=10_000, least_weight=0.2)
    assert named["source"]["name"].startswith("message 1: The first keeper")
    assert shown(RECORDED, least_tokens=10_000, least_grounded=0.99) == []


@pytest.mark.long
def test_an_answer_of_now() -> None:
    """The server answers the filter's request in the form that it reads; a second one is cached."""
    castle = "The castle is old."
    text = f"The grass is green. {castle} " + "The sky is blue. " * 80
    body = {"model": "smollm2", "stream": True, "max_tokens": 60, "messages": []}
    body["messages"] = [{"role": "system", "content": text}, {"role": "user", "content": "Why so?"}]
    model = {"id": "smollm2", "owned_by": "openai", "openai": {"owned_by": "razor_dist"}}
    asked = Filter().request(dict(body), model)
    assert asked == {**body, "return_progress": True, "return_sources": 3}
    assert Filter().request(dict(body), {"openai": {"owned_by": "vllm"}}) == body
    assert Filter().request({**body, "stream": False}, model) == {**body, "stream": False}
    with server_on("tests.server.page_rank", "--max-model-len", "4096") as server:
        url = f"{server.url()}/v1/chat/completions"
        answers = [httpx.post(url, json=asked, timeout=60).text for _ in range(2)]
    for again, answer in enumerate(answers):
        events = shown(answer, document("castle.txt", text), least_tokens=100)
        [passage] = [data for kind, data in events if kind == "source"]
        assert passage["document"] == [castle]
        assert passage["source"] == {"name": f"castle.txt: {castle}"}
        said = statuses(events)
        assert again == (not said) and (again or said[-1]["done"])
    fresh = statuses(shown(answers[1], least_tokens=0))
    total = fresh[-1]["description"].split()[1]
    assert fresh[-1]["description"].startswith(f"Read {total} tokens, {total} of them from the")
