"""``openapi.json``: JSON Schemas of requests and answers, for the model that is served."""

from __future__ import annotations

from importlib import import_module

from razor_dist.api.completions import CompletionBody
from razor_dist.api.errors import MESSAGES
from razor_dist.api.fields import Strict
from razor_dist.api.messages import CountTokensBody, MessagesBody
from razor_dist.api.openapi_answers import ANSWERS, TEXT, Json, examples, or_null, some
from razor_dist.api.openapi_rules import RULES
from razor_dist.api.parsing import BODIES
from razor_dist.api.request import Limits
from razor_dist.api.responses import ResponsesBody
from razor_dist.api.schema import ChatBody
from razor_dist.api.tokenize import DetokenizeBody, TokenizeBody
from razor_dist.protocol.sampling_params import MAX_N, MAX_STOP_IDS

_NO_MODEL = "There is no such model."
_ONE = "ctx_0", "The key has no such context."


def openapi(limits: Limits, *, knows_tools: bool) -> Json:
    """Return the document for a server with these limits."""
    paths = {
        "/v1/chat/completions": _post(ChatBody, "ChatCompletion", "Answer a conversation.", True),
        "/v1/completions": _post(CompletionBody, "Completion", "Continue prompts.", True),
        "/v1/responses": _post(ResponsesBody, "Response", "Answer an input.", True),
        MESSAGES: _post(MessagesBody, "Message", "Answer as Anthropic's API does.", True),
        f"{MESSAGES}/count_tokens": _post(CountTokensBody, "TokenCount", "Count a prompt."),
        "/tokenize": _post(TokenizeBody, "Tokenized", "Return the tokens of a text or a chat."),
        "/detokenize": _post(DetokenizeBody, "Detokenized", "Return the text of tokens."),
        "/documents/text": _document_text(),
        "/v1/models": _get("The models that are served.", "ModelList"),
        "/v1/models/{name}": _get("One model.", "Model", name=limits.model),
        "/v1/contexts": _get("The contexts of the key.", "ContextList"),
        "/v1/contexts/{name}": _context(),
        "/v1/contexts/{name}/messages": _get("What it holds.", "ContextMessages", *_ONE),
        "/health": _get("200 if requests are answered, else 503.", "Health"),
        "/ping": _get("As /health.", "Health"),
        "/version": _get("The version of razor_dist.", "Version"),
        "/stats": _get("Counters of the engine.", "Stats"),
        "/metrics": _metrics(),
    }
    for path, example in examples(limits.model).items():
        paths[path]["post"]["requestBody"]["content"]["application/json"]["example"] = example
    schemas: Json = dict(ANSWERS)
    for cls in BODIES.values():
        schemas |= _body(cls, limits, knows_tools)
    for name, rules in RULES.items():
        schemas[name] |= {"allOf": rules}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "razor_dist",
            "version": import_module("razor_dist").__version__,
            "description": "OpenAI's API, with fields of vLLM and llama.cpp. Unknown fields are "
            "refused by name, unless they are null.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _body(cls: type[Strict], limits: Limits, knows_tools: bool) -> Json:
    """Return a body's schema, and the schemas to which it refers, by name."""
    schema = cls.model_json_schema(ref_template="#/components/schemas/{model}")
    found: Json = schema.pop("$defs", {})
    schema["additionalProperties"] = {"type": "null"}
    properties: Json = schema["properties"]
    properties |= {
        field: {"enum": [None, *values], "description": "Not supported; these ask for nothing."}
        for field, values in cls.neutral.items()
    }
    optional = not cls.model_fields["model"].is_required()
    token: Json = {"type": "integer", "minimum": 0, "maximum": limits.prompt.vocab_size - 1}
    answers = or_null({"type": "integer", "minimum": 1, "maximum": min(MAX_N, limits.max_prompts)})
    # These depend on the model and on the length of the server's queue.
    own: Json = {
        "model": {"enum": [limits.model, *[None] * optional]},
        "tokens": {"type": "array", "items": token},
        "stop_token_ids": or_null({"type": "array", "items": token, "maxItems": MAX_STOP_IDS}),
        "n": answers,
        "best_of": {**answers, "description": "1, or as many as n."},
    }
    if cls is CompletionBody:
        text: Json = {"type": "string", "minLength": 1}
        own["prompt"] = {"anyOf": [text, some(text), some(token), some(some(token))]}
    if issubclass(cls, CountTokensBody) and not knows_tools:
        own |= {"tools": {"enum": [None, []]}, "tool_choice": or_null(_NO_TOOL)}
    elif not knows_tools:
        own |= {"tools": {"enum": [None, []]}, "tool_choice": {"enum": [None, "none", "auto"]}}
    properties |= {field: value for field, value in own.items() if field in properties}
    return {**found, cls.__name__: schema}


_NO_TOOL: Json = {
    "type": "object",
    "properties": {"type": {"enum": ["auto", "none"]}},
    "required": ["type"],
    "additionalProperties": False,
}


def _answer(schema: str, description: str) -> Json:
    ref = {"$ref": f"#/components/schemas/{schema}"}
    return {"description": description, "content": {"application/json": {"schema": ref}}}


def _error(description: str) -> Json:
    return _answer("Error", description)


_REQUEST_ID: Json = {
    "name": "X-Request-Id",
    "in": "header",
    "required": False,
    "schema": TEXT,
    "description": "Up to 128 of A-Z, a-z, 0-9 and ._:=/+- are returned; otherwise one is made.",
}
_PROBLEMS = {
    400: "A field is wrong, by its name in `param`.",
    401: "No known API key.",
    403: "Another host, or a foreign origin.",
    404: _NO_MODEL,
    408: "The request came too slowly, or took longer than it may.",
    413: "The body is too large.",
    415: "The body is not said to be JSON.",
    422: "The file cannot be read; the message says why.",
    429: "The queue is full, contexts hold the room, or a key's limit is reached; see Retry-After.",
    500: "The engine failed.",
    503: "The engine is not ready; see Retry-After.",
}


def _responses(ok: Json, *problems: int) -> Json:
    """Return a route's responses: the answer, its ``problems``, and those of every route."""
    errors = {str(code): _error(_PROBLEMS[code]) for code in (401, 403, 503, *problems)}
    return {"200": ok, **errors}


# With ``stream: true``; ``data`` is a chunk in JSON, or "[DONE]".
_EVENT: Json = {
    "type": "object",
    "properties": {"event": TEXT, "data": TEXT},
    "required": ["data"],
}


def _post(body: type[Strict], answer: str, summary: str, streams: bool = False) -> Json:
    ok = _answer(answer, "The answer.")
    if streams:
        ok["content"]["text/event-stream"] = {"schema": _EVENT}
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
    operation = {
        "summary": summary,
        "parameters": [_REQUEST_ID],
        "requestBody": {"required": True, "content": content},
        "responses": _responses(ok, 400, 404, 408, 413, 415, 429, 500),
    }
    return {"post": operation}


def _get(summary: str, answer: str, name: str | None = None, missing: str = _NO_MODEL) -> Json:
    parameters = [_REQUEST_ID]
    responses = _responses(_answer(answer, "The answer."))
    if name is not None:
        schema = {"type": "string", "enum": [name]}
        parameters.append({"name": "name", "in": "path", "required": True, "schema": schema})
        responses["404"] = _error(missing)
    if answer == "Health":
        responses["503"] = _answer(answer, "Not ready, and why.")
    return {"get": {"summary": summary, "parameters": parameters, "responses": responses}}


def _context() -> Json:
    read = _get("One context.", "Context", *_ONE)["get"]
    ended = read | {"summary": "End a context."}
    ended["responses"] = {**read["responses"], "200": _answer("EndedContext", "It has ended.")}
    return {"get": read, "delete": ended}


def _document_text() -> Json:
    file = {"application/octet-stream": {"schema": TEXT | {"format": "binary"}}}
    text = {"description": "The text.", "content": {"text/plain": {"schema": TEXT}}}
    operation = {
        "summary": "Return the text of a file: text, HTML, PDF, EPUB or docx.",
        "parameters": [_REQUEST_ID, {"name": "name", "in": "query", "schema": TEXT}],
        "requestBody": {"required": True, "content": file},
        "responses": _responses(text, 408, 413, 415, 422, 429),
    }
    return {"post": operation}


def _metrics() -> Json:
    operation = _get("Metrics for Prometheus.", "Stats")["get"]
    operation["responses"]["200"] = {
        "description": "Prometheus' text.",
        "content": {"text/plain": {"schema": TEXT}},
    }
    return {"get": operation}
