"""``/docs``: the description in ``openapi.json`` as a page, without scripts."""

from __future__ import annotations

import json
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0 }
td, th { border-bottom: 1px solid #8884 }
code { font-size: .9em; overflow-wrap: anywhere }
"""


def docs_page(document: dict[str, Any]) -> str:
    """Return the HTML of an OpenAPI document."""
    info = document["info"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width'>",
        f"<title>{escape(info['title'])}</title><style>{_STYLE}</style>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        f"<p>{escape(info['description'])} <a href=openapi.json>openapi.json</a></p>",
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts += [
                f"<h2><code>{method.upper()} {escape(path)}</code></h2>",
                f"<p>{escape(operation['summary'])}</p>",
            ]
            body = operation.get("requestBody")
            if body is not None:
                parts.append(f"<p>Body: {_content(body)}</p>")
            rows = [
                f"<tr><th>{code}<td>{escape(response['description'])}<td>{_content(response)}"
                for code, response in operation["responses"].items()
            ]
            parts.append(f"<table>{''.join(rows)}</table>")
    parts.append("<h1>Objects</h1>")
    for name, schema in document["components"]["schemas"].items():
        parts += [f"<h2 id={escape(name)}>{escape(name)}</h2>", _fields(schema)]
    return "\n".join(parts)


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
        description = escape(field.get("description", ""))
        mark = " (required)" if name in required else ""
        rows.append(
            f"<tr><th><code>{escape(name)}</code>{mark}"
            f"<td><code>{escape(json.dumps(rest))}</code> {description}"
        )
    return f"<table>{''.join(rows)}</table>"
