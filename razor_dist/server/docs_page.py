"""``/docs``: the description in ``openapi.json`` as a page, with examples to send."""

from __future__ import annotations

import json
import re
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0 }
td, th { border-bottom: 1px solid #8884 }
code, pre, textarea { font: .9em/1.4 ui-monospace, monospace; overflow-wrap: anywhere }
pre { white-space: pre-wrap; padding: .5rem .75rem; background: #8882; border-radius: .4rem }
textarea { width: 100%; box-sizing: border-box }
nav { columns: 16rem }
"""
# `docs.js` sends the examples; nothing else runs, and nothing comes from elsewhere.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def docs_page(document: dict[str, Any], url: str) -> str:
    """Return the HTML of the OpenAPI document of a server at ``url``, which ends in a slash."""
    info = document["info"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<script type=module src=page/docs.js></script>",
        "<meta name=viewport content='width=device-width'>",
        f"<title>{escape(info['title'])}</title><style>{_STYLE}</style>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        f"<p>{_prose(info['description'])} As JSON: <a href=openapi.json>openapi.json</a>.",
        "To ask in a browser: <a href=./>the page</a>.</p>",
        f"<nav aria-label=Paths>{_links(document['paths'])}</nav>",
    ]
    for path, operations in document["paths"].items():
        for i, (method, operation) in enumerate(operations.items()):
            name = "" if i else f" id='{escape(path)}'"  # the path's link leads to its first method
            parts += [
                f"<h2{name}><code>{method.upper()} {escape(path)}</code></h2>",
                f"<p>{_prose(operation['summary'])}</p>",
            ]
            body = operation.get("requestBody")
            if body is not None:
                parts.append(f"<p>Body: {_content(body)}</p>")
                parts.append(_example(path, body, url))
            rows = [
                f"<tr><th>{code}<td>{_prose(response['description'])}<td>{_content(response)}"
                for code, response in operation["responses"].items()
            ]
            parts.append(f"<table>{''.join(rows)}</table>")
    parts.append("<h1>Objects</h1>")
    for name, schema in document["components"]["schemas"].items():
        parts += [f"<h2 id={escape(name)}>{escape(name)}</h2>", _fields(schema)]
    return "\n".join(parts)


def _prose(text: str) -> str:
    return re.sub("`+([^`]+)`+", r"<code>\1</code>", escape(text))


def _links(paths: dict[str, Any]) -> str:
    return "<br>".join(f"<a href='#{escape(path)}'>{escape(path)}</a>" for path in paths)


def _example(path: str, body: dict[str, Any], url: str) -> str:
    """A command that sends the example of a body, and a form that does."""
    example = body["content"].get("application/json", {}).get("example")
    if example is None:
        return ""
    text = json.dumps(example, indent=2)
    command = f"curl {url.rstrip('/')}{path} -H 'Content-Type: application/json' -d '{text}'"
    label = f"Example for {escape(path)}"
    return (
        f"<pre tabindex=0>{escape(command)}</pre><details><summary>Try it</summary>"
        f"<form data-path='{escape(path[1:])}'><textarea rows={text.count(chr(10)) + 1} "
        f"aria-label='{label}' spellcheck=false>{escape(text)}</textarea>"
        "<button>Send</button><pre role=status hidden></pre></form></details>"
    )


def _content(response: dict[str, Any]) -> str:
    found = []
    for kind, media in response["content"].items():
        name = media["schema"].get("$ref", "").rpartition("/")[2]
        link = f": <a href='#{escape(name)}'>{escape(name)}</a>" if name else ""
        found.append(f"<code>{escape(kind)}</code>{link}")
    return ", ".join(found)


def _fields(schema: dict[str, Any]) -> str:
    if "properties" not in schema:
        return f"<p><code>{escape(json.dumps(schema))}</code></p>"
    required = schema.get("required", ())
    rows = []
    for name, field in schema["properties"].items():
        rest = {k: v for k, v in field.items() if k not in ("title", "default", "description")}
        description = _prose(field.get("description", ""))
        mark = " (required)" if name in required else ""
        rows.append(
            f"<tr><th><code>{escape(name)}</code>{mark}"
            f"<td><code>{escape(json.dumps(rest))}</code> {description}"
        )
    return f"<table>{''.join(rows)}</table>"
