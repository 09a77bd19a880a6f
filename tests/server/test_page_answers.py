"""Answers on the page: Markdown, numbers that no source has, passages that are cited."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import expect

from tests.server.page_reader import Reader

# Answers with the marks of Markdown in places where offsets could be lost.
MARKDOWN = """# A *title* 🦊

Some **bold _and_ plain** words, `code 🏰`, a [link](https://example.org "t") and &amp; \\* both.
A second line, www.example.org, <b>no HTML</b>, ![a picture](https://evil.example/x.png) [reference]
and [a trap](javascript:hacked()).

1. one `x`
   - inner *item*

     its second paragraph
2. two

> quoted **text**
> goes on

| name | value |
|:-----|------:|
| a 🦊 | **1** |
|  | 2 |

```python
def f(x):
    return x ** 2  # *not emphasis*
```

    indented *code*

***
The end, ~~gone~~"""


def test_markdown_is_shown_with_each_character_in_its_place(reader: Reader) -> None:
    script = """async ([text, size]) => {
      const { blocksOf, blockElement } = await import('/page/markdown.js');
      const marks = [];
      const characters = [...text];
      for (let at = 0, from = 0; at < characters.length; at += size) {
        const raw = characters.slice(at, at + size).join('');
        const make = () => Object.assign(document.createElement('i'), { title: raw });
        marks.push({ from, to: from + raw.length, make });
        from += raw.length;
      }
      const place = document.createElement('div');
      place.append(...blocksOf(text).map((block) => blockElement(text, block, marks)));
      document.body.append(place);
      const pieces = [...place.querySelectorAll('i')].map((i) => [i.title, i.textContent]);
      const plain = document.createElement('p');
      plain.append(...blocksOf(text).map((block) => blockElement(text, block)));
      const same = plain.textContent === place.textContent;
      const found = { pieces, html: plain.innerHTML, same };
      place.remove();
      return found;
    }"""
    for size in (1, 7):
        found = reader.page.evaluate(script, [MARKDOWN, size])
        assert found["same"]
        assert all(shown and shown in raw for raw, shown in found["pieces"])
        shown = "".join("".join(shown for _, shown in found["pieces"]).split())
        assert "Someboldandplainwords" in shown and "returnx**2" in shown
    html = found["html"]
    for piece in (
        "<h4>A <em>title</em> 🦊</h4>",
        "<strong>bold <em>and</em> plain</strong>",
        "<code>code 🏰</code>",
        '<a href="https://example.org"',
        "&amp; * both",
        "&lt;b&gt;no HTML&lt;/b&gt;",
        "[reference]",
        "[a trap](javascript:hacked())",
        '<ol start="1"><li><p>one <code>x</code></p><ul><li><p>inner <em>item</em></p>'
        "<p>its second paragraph</p></li></ul></li><li><p>two</p></li></ol>",
        "<th>name</th><th>value</th>",
        "<td></td><td>2</td>",
        "<pre><code>def f(x):\n    return x ** 2  # *not emphasis*</code></pre>",
        "<del>gone</del>",
    ):
        assert piece in html, (piece, html)
    assert "<img" not in html and "<b>" not in html


def test_numbers_that_the_sources_do_not_have(reader: Reader) -> None:
    script = """async (sentences) => {
      const { strangeNumbers } = await import('/page/sources.js');
      return sentences.map(([said, text]) => strangeNumbers(said,
        [{ start: 0, end: said.length, sources: [{ document: 'd', text }] }], () => true));
    }"""
    text = "It is 41 metres high. It cost 41,300 euros in 1,905."
    said = ["It is 41.3 meters.", "It is 41 meters.", "It cost 41300.", "1. In 1905.", "🦊 7"]
    found = reader.page.evaluate(script, [[one, text] for one in said])
    assert found == [["41.3"], [], [], [], ["7"]]


def test_headings_and_weak_passages_are_not_cited(reader: Reader) -> None:
    script = """async (turn) => {
      const { citations } = await import('/page/sources.js');
      const { passages, sentences } = citations(turn, (id) => id && { name: id });
      return [passages.map(({ text, number, weight }) => [text, number, weight]),
        sentences.map((one) => [one.from, one.to, one.passages.map(({ number }) => number)])];
    }"""

    def source(text: str, weight: float, begin: int, document: str | None = "d") -> dict[str, Any]:
        return {"text": text, "weight": weight, "begin": begin, "document": document}

    pier, storm = source("The pier.\n", 0.5, 40), source("## The storm\n", 0.5, 20)
    faint, said = source("Faint.", 0.04, 60), source("said", 0.9, 0, None)
    turn: dict[str, Any] = {"answer": "🦊 a. b. c.", "sources": [storm, said, pier, faint]}
    assert reader.page.evaluate(script, turn) == [[["The pier.\n", 1, 0.5]], []]
    # Rather than none.
    assert reader.page.evaluate(script, turn | {"sources": [storm]})[0] == [
        ["## The storm\n", 1, 0.5]
    ]
    one, two = source("One.", 0.3, 70), source("Two.", 0.11, 80)
    turn["sentences"] = [
        {"start": 0, "end": 4, "grounded": 0.4, "sources": [two, source("Weak.", 0.09, 90)]},
        {"start": 5, "end": 7, "grounded": 0.39, "sources": [source("Lost.", 0.2, 99)]},
        {"start": 8, "end": 10, "grounded": 0.9, "sources": [one, pier | {"weight": 0.8}, two]},
    ]
    passages, sentences = reader.page.evaluate(script, turn)
    assert passages == [["Two.", 1, 0.11], ["One.", 2, 0.3], ["The pier.\n", 3, 0.8]]
    assert sentences == [[0, 5, [1]], [9, 11, [2, 3, 1]]]


def test_an_answer_that_repeats_itself_is_said_to(reader: Reader) -> None:
    turn = reader.told("Again?", "a a", "repetition")
    expect(turn.locator(".note")).to_contain_text("had begun to repeat itself")
    # No documents were read, so nothing is said of where the words come from.
    expect(turn.locator(".sources")).to_be_hidden()
