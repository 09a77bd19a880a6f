"""Pictures of the page for the documentation.

``python -m tests.server.page_pictures [FOLDER]``: the embedded model on two ranks reads a part of
Python's language reference and is asked about it. ``... FOLDER DOCUMENT QUESTION``: it reads a
document, with the windows that it has by default, and the answer's first source is opened.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, expect

from razor_dist.documents.corpus import reference_paragraphs
from tests.server.browser import chromium
from tests.server.process import ROOT, ServerProcess

CHARACTERS = 16_000
QUESTIONS = ("What is an expression list?", "And what is a generator?")
SCREENS = {"light": (1100, 760), "dark": (1100, 760), "phone": (390, 780)}


def take(browser: Browser, url: str, screen: str, folder: Path) -> None:
    """Take a picture while the document is read, and one after an answer."""
    width, height = SCREENS[screen]
    options: Any = {"viewport": {"width": width, "height": height}}
    scheme: Any = "light" if screen == "light" else "dark"
    page = browser.new_context(color_scheme=scheme, **options).new_page()
    page.add_init_script("sessionStorage['razor_dist settings'] = '{\"maxTokens\": 60}'")
    page.goto(url)
    # Another beginning each time, so that it is read anew.
    text = f"For the {screen} screen.\n\n" + "\n\n".join(reference_paragraphs())
    data = text[:CHARACTERS].encode()
    name = "language-reference.md"
    page.locator("#files").set_input_files({"name": name, "mimeType": "", "buffer": data})  # type: ignore[arg-type]
    expect(page.locator("#pending")).to_contain_text("tokens", timeout=30_000)
    for number, question in enumerate(QUESTIONS):
        page.locator("#question").fill(question)
        page.locator("#question").press("Enter")
        turn = page.locator("article").last
        if number == 0:
            expect(turn.locator(".reading p")).to_contain_text("a second", timeout=60_000)
            page.wait_for_timeout(1500)
            page.screenshot(path=folder / f"page-{screen}-reading.png")
        expect(turn.locator(".copy")).to_be_visible(timeout=120_000)
    page.wait_for_timeout(5000)  # for the gauge
    page.screenshot(path=folder / f"page-{screen}-answer.png")
    page.context.close()


def take_source(browser: Browser, url: str, folder: Path, document: Path, question: str) -> None:
    """Take pictures of a document in which the first source of an answer is lit."""
    page = browser.new_context(viewport={"width": 1100, "height": 760}).new_page()
    page.goto(url)
    page.locator("#files").set_input_files(document)
    expect(page.locator("#pending")).to_contain_text("tokens", timeout=30_000)
    page.locator("#question").fill(question)
    page.locator("#question").press("Enter")
    turn = page.locator("article").last
    expect(turn.locator(".copy")).to_be_visible(timeout=600_000)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.screenshot(path=folder / f"page-{scheme}-sources.png")
        turn.locator("button.source").first.click()
        expect(page.locator("#reader mark")).to_be_in_viewport()
        page.screenshot(path=folder / f"page-{scheme}-source.png")
        page.locator("#close-reader").click()
    page.context.close()


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/images"
    command = [sys.executable, "-m", "razor_dist", "serve", "--world-size", "2"]
    chunks = ["--chunked-prefill-size", "512", "--window-max", "256", "--window-min", "256"]
    chunks += ["--prefix-tail-tokens", "128"]
    document = sys.argv[2:]
    with ServerProcess(*command, *([] if document else chunks)) as server, chromium() as browser:
        url = server.url(timeout=180)
        if document:
            take_source(browser, url, folder, Path(document[0]), document[1])
            return
        for screen in SCREENS:
            take(browser, url, screen, folder)


if __name__ == "__main__":
    main()
