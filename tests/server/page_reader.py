"""Somebody who uses the page at ``/`` in a browser."""

from __future__ import annotations

import json
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import BrowserContext, Locator, expect

KEY = "sk-reader-0123456789"
STORY = "The fox went over the hill. " * 100


class Reader:
    """Somebody with the page open."""

    def __init__(
        self,
        context: BrowserContext,
        url: str,
        *,
        max_tokens: int = 40,
        key: str = KEY,
        **more: Any,
    ) -> None:
        self.context, self.url = context, url
        self.problems: list[str] = []
        self.foreign: list[str] = []
        settings = json.dumps({"maxTokens": max_tokens, **more})
        context.add_init_script(
            f"if (!sessionStorage['razor_dist key']) sessionStorage['razor_dist key'] = '{key}';"
            f"sessionStorage['razor_dist settings'] = '{settings}';"
            "window.hacked = () => { window.isHacked = true; };"
            "addEventListener('securitypolicyviolation', (e) => console.error(e.violatedDirective))"
        )
        self.page = context.new_page()
        self.page.set_default_timeout(20_000)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda m: self.problems.append(m.text) if self._bad(m) else None)
        self.page.on("request", self._note)
        self.open()

    def open(self) -> None:
        self.page.goto(self.url)
        expect(self.page.locator("html[data-loaded]")).to_be_attached()

    def _bad(self, message: Any) -> bool:
        return message.type == "error" and "Failed to load resource" not in message.text

    def _note(self, request: Any) -> None:
        if not request.url.startswith((self.url, "blob:" + self.url)):
            self.foreign.append(request.url)

    def __getattr__(self, id: str) -> Locator:
        """The element of an id, with ``_`` for ``-``."""
        if id.startswith("_"):
            raise AttributeError(id)
        return self.page.locator("#" + id.replace("_", "-"))

    def add(self, *named: tuple[str, bytes]) -> None:
        payloads = [{"name": n, "mimeType": "", "buffer": data} for n, data in named]
        self.files.set_input_files(payloads)  # type: ignore[arg-type]

    def ask(self, question: str) -> Locator:
        """Type a question and Enter; the turn that it makes."""
        turns = self.page.locator("article")
        turn = turns.nth(turns.count())  # not the last: that is another one later
        self.question.fill(question)
        expect(self.send).to_be_visible()
        self.question.press("Enter")
        return turn

    def answered(self, question: str) -> Locator:
        turn = self.ask(question)
        expect(turn.locator(".copy")).to_be_visible()
        return turn

    def told(self, question: str, answer: str, finish: str = "stop", **choice: Any) -> Locator:
        """A turn with an answer that the server is made to give."""
        chunks = [
            {"choices": [{"delta": {"content": answer}, "finish_reason": None}]},
            {"choices": [{"delta": {}, "finish_reason": finish, **choice}]},
        ]
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        headers, path = {"Content-Type": "text/event-stream"}, "**/v1/chat/completions"
        self.page.route(path, lambda route: route.fulfill(body=body, headers=headers))
        turn = self.answered(question)
        self.page.unroute(path)
        return turn

    def faults(self) -> list[tuple[str, str, list[str]]]:
        """The violations that axe-core finds, light and dark."""
        found, schemes = [], ("light", "dark")
        for scheme in schemes:
            self.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            for rule in Axe().run(self.page).response["violations"]:
                found.append((scheme, rule["id"], [node["html"] for node in rule["nodes"]]))
        return found
