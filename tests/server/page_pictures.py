"""Pictures of the page for the documentation, with real answers of the embedded model on two ranks.

``python -m tests.server.page_pictures [FOLDER]``: the page's own sample and its first question, the
passages of the answer lit in its text; what is kept; Python's language reference while it is read;
a document that is too long; print. Light, dark, and as wide as a phone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, expect

from razor_dist.documents.corpus import reference_paragraphs
from tests.server.browser import chromium
from tests.server.process import ROOT, ServerProcess

# Characters of a document that is read for some seconds, and of one that is beyond 8,192 tokens.
SOME, MANY = 24_000, 120_000
SCREENS = {"light": (1200, 820), "dark": (1200, 820), "phone": (390, 780)}


def take(browser: Browser, url: str, screen: str, folder: Path) -> None:
    """Take the pictures of a screen: empty, settings, answer, source, reading, too long, API."""
    width, height = SCREENS[screen]
    options: Any = {"viewport": {"width": width, "height": height}}
    options["color_scheme"] = "dark" if screen == "dark" else "light"
    page = browser.new_context(**options).new_page()
    page.add_init_script("sessionStorage['razor_dist settings'] = '{\"temperature\": 0}'")

    def picture(name: str) -> None:
        page.screenshot(path=folder / f"page-{screen}-{name}.png")

    page.goto(url)
    expect(page.locator("#state")).to_have_text("Ready")
    page.wait_for_timeout(1000)  # for the gauge
    picture("empty")
    page.locator("#open-settings").click()
    picture("settings")
    page.keyboard.press("Escape")
    page.locator("#samples button").nth(1).click()
    turn = page.locator("article").last
    expect(turn.locator(".copy")).to_be_visible(timeout=120_000)
    page.wait_for_timeout(1000)
    picture("answer")
    if screen == "phone":
        turn.locator("button.source").first.click()
    else:
        turn.locator(".sentence").first.hover()
        expect(page.locator("#card")).to_be_visible()
    expect(page.locator("#reader mark").first).to_be_in_viewport()
    picture("source")
    page.keyboard.press("Escape")
    if screen != "phone":
        page.mouse.move(0, 0)
        page.locator("#keep").click()
        expect(page.locator("#contexts-list li").first).to_be_visible(timeout=60_000)
        expect(page.locator("#stop")).to_be_hidden()
        picture("kept")
    if screen == "light":
        page.emulate_media(media="print")
        page.screenshot(path=folder / "page-print.png", full_page=True)
        page.emulate_media(media="screen")
    page.locator("#new").click()
    text = f"For the {screen} screen.\n\n" + "\n\n".join(reference_paragraphs())
    add(page, "reference.md", text[:SOME])  # another beginning each time: it is read anew
    page.locator("#question").fill("What is an expression list?")
    page.locator("#question").press("Enter")
    words = page.locator("article").last.locator(".reading p")
    expect(words).to_contain_text("a second", timeout=60_000)
    picture("reading")
    page.locator("#stop").click()
    expect(page.locator("#notice")).to_contain_text("Stopped")
    page.locator("#new").click()
    page.locator("#notice button").evaluate("(undo) => undo.parentElement.hidden = true")
    page.locator("#question").fill("")
    add(page, "the-whole-reference.md", text[:MANY])
    page.wait_for_timeout(500)
    picture("too-long")
    page.goto(f"{url}/docs")
    page.locator("summary").first.click()
    picture("api")
    page.context.close()


def add(page: Page, name: str, text: str) -> None:
    file: Any = {"name": name, "mimeType": "", "buffer": text.encode()}
    page.locator("#files").set_input_files(file)
    expect(page.locator("#pending")).to_contain_text("token", timeout=60_000)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/images"
    command = [sys.executable, "-m", "razor_dist", "serve", "--world-size", "2"]
    command += ["--chunked-prefill-size", "512", "--window-max", "512", "--window-min", "512"]
    command += ["--pinned-gb", "0.2"]
    with ServerProcess(*command) as server, chromium() as browser:
        url = server.url(timeout=180)
        for screen in SCREENS:
            take(browser, url, screen, folder)


if __name__ == "__main__":
    main()
