"""
title: razor_dist: reading progress and sources
description: Shows how much of a prompt has been read, and the passages that an answer came from.
version: 1.0.0
required_open_webui_version: 0.12.0
license: Apache-2.0
"""

# A filter function of Open WebUI. docs/recipes.md says how to install it, and which settings of
# Open WebUI belong to it.

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from textwrap import shorten
from typing import Any

from pydantic import BaseModel, Field

Json = dict[str, Any]
Emit = Callable[[Json], Awaitable[None]]

# Where the filter keeps what it has shown of an answer, in Open WebUI's metadata of the request.
_STATE = "razor_dist_shown"
_PERCENT_STEP = 5
_TITLE_LENGTH = 80
# What Open WebUI writes around a document.
_TAG = re.compile(r"</?source\b[^>]*>")


class Filter:
    """Asks the server for progress and sources, and shows both beside the answer."""

    class Valves(BaseModel):
        """The filter's settings on its page in Open WebUI."""

        priority: int = 0
        passages: int = Field(3, ge=1, le=100, description="Passages of a sentence at most.")
        least_weight: float = Field(
            0.1, ge=0, le=1, description="Passages with less of a sentence's attention are left out"
        )
        least_grounded: float = Field(
            0.4, ge=0, le=1, description="Sentences that are less grounded show no passage."
        )
        least_tokens: int = Field(
            500, ge=0, description="Prompts with fewer new tokens show no progress."
        )

    def __init__(self) -> None:
        self.valves = self.Valves()

    def request(self, body: Json, __model__: Json | None = None) -> Json:
        """Ask for progress and sources; called once documents are in the messages."""
        owner = (__model__ or {}).get("openai", {}).get("owned_by", "razor_dist")
        if body.get("stream") and owner == "razor_dist":
            body |= {"return_progress": True, "return_sources": self.valves.passages}
        return body

    async def stream(
        self, event: Json, __event_emitter__: Emit | None = None, __metadata__: Json | None = None
    ) -> Json:
        """Show what a chunk of the answer tells beside its text, and pass the chunk on."""
        if __event_emitter__ is None or __metadata__ is None:
            return event
        shown = __metadata__.setdefault(_STATE, {"percent": None, "passages": []})
        progress = event.get("prompt_progress")
        if progress and (status := self._status(progress, shown)):
            await __event_emitter__({"type": "status", "data": status})
        for choice in event.get("choices", []):
            for sentence in choice.get("sentences") or []:
                for passage in self._passages(sentence, shown):
                    data = _citation(passage, __metadata__.get("sources") or [])
                    await __event_emitter__({"type": "source", "data": data})
        return event

    def _status(self, progress: Json, shown: Json) -> Json | None:
        """Return what is said of the reading, if that is something new."""
        total, cached, read = progress["total"], progress["cache"], progress["processed"]
        if total - cached < self.valves.least_tokens:
            return None
        percent = 100 * read // total
        if shown["percent"] is not None and percent < min(100, shown["percent"] + _PERCENT_STEP):
            return None
        shown["percent"] = percent
        seconds = progress["time_ms"] / 1000
        known = f", {cached:,} of them from the cache" if cached else ""
        if read == total:
            return {"description": f"Read {total:,} tokens{known}, {seconds:.1f} s", "done": True}
        text = f"Reading: {percent} % of {total:,} tokens{known}"
        if read > cached:
            text += f", about {seconds * (total - read) / (read - cached):.0f} s left"
        return {"description": text, "done": False}

    def _passages(self, sentence: Json, shown: Json) -> list[Json]:
        """Return the passages that a sentence came from and that are not shown yet."""
        if (sentence["grounded"] or 0) < self.valves.least_grounded:
            return []
        new = []
        for passage in sentence["sources"]:
            place = [passage.get("message"), passage["start"], passage["end"]]
            if passage["weight"] >= self.valves.least_weight and place not in shown["passages"]:
                shown["passages"].append(place)
                new.append(passage)
        return new


def _citation(passage: Json, documents: list[Json]) -> Json:
    """Return a passage as a citation of Open WebUI, by the name of the document that has it."""
    text = _TAG.sub("", passage["text"]).strip()
    name = f"message {passage['message'] + 1}"
    for document in documents:
        if any(text in content for content in document.get("document") or []):
            name = document["source"].get("name") or name
            break
    title = f"{name}: {shorten(text, _TITLE_LENGTH, placeholder='...')}"
    # Citations whose metadata have the same source are shown as one.
    place = f"{name}#char={passage['start']},{passage['end']}"
    return {
        "source": {"name": title},
        "document": [text],
        "metadata": [{"source": place, "name": title}],
    }
