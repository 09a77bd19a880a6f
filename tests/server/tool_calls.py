"""Tools, answers that call them in each format, templates that know them, and clients' bodies."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

from razor_dist.api.request import Limits
from razor_dist.api.tools import ToolParser, ToolUse
from razor_dist.frontend.assembler import TextPiece
from razor_dist.frontend.prompts import PromptEncoder, PromptLimits
from tests.tokenizer import smollm2_tokenizer

NAMES = ["get_weather", "get_time"]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": PARAMETERS}} for n in NAMES]
PARIS, ROME = '{"city": "Paris"}', '{"city": "Rome; {1}"}'
KOELN = '{"city": "K\N{LATIN SMALL LETTER O WITH DIAERESIS}ln"}'
TAGGED = '{"city": "a <tool_call> b"}'

# Format, answer, its text and its calls.
ANSWERS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (
        "hermes",
        f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n'
        f'<tool_call>{{"name": "get_time", "arguments": {ROME}}}</tool_call>',
        "I look.\n",
        [("get_weather", PARIS), ("get_time", ROME)],
    ),
    ("hermes", "1 < 2 and <tool>", "1 < 2 and <tool>", []),
    ("hermes", "<tool_call>\n{broken", "<tool_call>\n{broken", []),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}]',
        "",
        [("get_weather", PARIS)],
    ),
    ("llama", f'{{"name": "get_time", "parameters": {ROME}}}', "", [("get_time", ROME)]),
    (
        "llama",
        f'<|python_tag|>{{"name": "get_time", "parameters": {ROME}}}; '
        f'{{"name": "get_weather", "parameters": {PARIS}}}',
        "",
        [("get_time", ROME), ("get_weather", PARIS)],
    ),
    (
        "hermes",
        f'<tool_call>{{"name": "get_time", "arguments": {PARIS}}}</tool_call> Done.',
        "Done.",
        [("get_time", PARIS)],
    ),
    (
        "hermes",
        f'Use <tool_call>: <tool_call>{{"name": "get_time", "arguments": {TAGGED}}}</tool_call>',
        "Use <tool_call>: ",
        [("get_time", TAGGED)],
    ),
    (
        "mistral",
        f"[TOOL_CALLS]get_time[ARGS]{PARIS}[TOOL_CALLS]get_weather[CALL_ID]a1b2[ARGS]{ROME}",
        "",
        [("get_time", PARIS), ("get_weather", ROME)],
    ),
    ("llama", f'{{ "name": "get_time", "arguments": {PARIS}}}', "", [("get_time", PARIS)]),
    (
        "llama",
        f'{{"type": "function", "function": {{"name": "get_time", "parameters": {PARIS}}}}}',
        "",
        [("get_time", PARIS)],
    ),
    ("llama", '{"name": "get_time"}', '{"name": "get_time"}', []),
    *(
        ("hermes", answer, answer, [])
        for value in ("null", '{"city": NaN}', '{"city": 1e999}', r'{"city": "\ud800"}')
        for answer in [f'<tool_call>{{"name": "get_time", "arguments": {value}}}']
    ),
    ("llama", '{"name": "Ada"}', '{"name": "Ada"}', []),
    ("llama", '{"age": 7}', '{"age": 7}', []),
    ("glm", f"get_weather\n{PARIS}", "", [("get_weather", PARIS)]),
    ("glm", f"\nget_time\n{ROME}", "", [("get_time", ROME)]),
    ("glm", "get well soon\nAda", "get well soon\nAda", []),
    ("glm", "get_weather", "get_weather", []),
    ("glm", "It rains.", "It rains.", []),
    (
        "required",
        f'[{{"name": "get_time", "parameters": {ROME}}}]',
        "",
        [("get_time", ROME)],
    ),
    ("required", '[{"name": "get_t', '[{"name": "get_t', []),
    ("named", PARIS, "", [("get_weather", PARIS)]),
    *(("named", answer, answer, []) for answer in ('{"city": 1e999}', r'{"city": "\ud83d"}')),
    (
        "hermes",
        f'<tool_call>{{"name": "get_time", "arguments": {KOELN}}}</tool_call>',
        "",
        [("get_time", KOELN)],
    ),
]


def letters(answer: str) -> list[TextPiece]:
    """An answer that has come letter by letter."""
    pieces = [TextPiece(5, letter, offset=n) for n, letter in enumerate(answer)]
    return [*pieces[:-1], replace(pieces[-1], finish_reason="stop")]


def parsed(form: str, pieces: list[TextPiece]) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolParser(ToolUse(form, NAMES), None)
    read = [parser.read(piece) for piece in pieces]
    text, calls = "".join(piece.text for piece, _ in read), read[-1][1]
    assert len({call["id"] for call in calls}) == len(calls)
    return text, [(c["function"]["name"], c["function"]["arguments"]) for c in calls]


def encoder(template: str | dict[str, str] | None) -> PromptEncoder:
    tokenizer = copy.deepcopy(smollm2_tokenizer())
    tokenizer.chat_template = template
    return PromptEncoder(tokenizer)


HERMES = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Answer with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>\n{% endif %}'
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function.arguments.city }}"
    "</tool_call>{% endfor %}\n{% endfor %}"
)

# As GLM-4-0414's: calls are messages with metadata, results those of a role of its own.
GLM_0414 = (
    "[gMASK]<sop>{% if tools %}<|system|>\n{% for tool in tools %}{{ tool.function | tojson }}"
    "{% endfor %}{% endif %}{% for message in messages %}{% set meta = message.metadata %}"
    "{% if message.role == 'user' %}<|user|>\n{{ message.content }}"
    "{% elif message.role == 'assistant' %}<|assistant|>{{ meta }}\n{{ message.content }}"
    "{% elif message.role == 'observation' %}<|observation|>\n{{ message.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As Llama 3.1's.
LLAMA = (
    "{% for tool in tools or [] %}{{ tool | tojson }} parameters <|eot_id|>{% endfor %}"
    "{% for message in messages %}{% if message.tool_calls %}"
    "{% if message.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{{ message.tool_calls[0].function.arguments | tojson }}{% else %}{{ message.role }}: "
    "{{ message.content }}{% endif %}\n{% endfor %}"
)

LIMITS = Limits("m", 4, PromptLimits(4096, 49152), {})
# Those of an agent have calls of tools, which only some templates take.
CLIENT_BODIES = json.loads(Path(__file__).with_name("client_bodies.json").read_text())
