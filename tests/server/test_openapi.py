"""``openapi.json`` is true: what it allows is taken, and what it does not allow is refused.

``python -m tests.server.test_openapi [COUNT]`` makes COUNT requests for each operation and kind.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

from tests.server.message_bodies import asking, document, text_source
from tests.server.process import fake_server, server_on

# What a schema cannot say of a field, by its name in the answer: whether a text tokenises to
# something that fits, a token exists, a grammar or schema can be matched, the queue has room.
INEXPRESSIBLE = {
    "prompt",
    "messages",
    "input",
    "structured_outputs",
    "response_format",
    "text.format",
    "n",
    "best_of",  # which may be n alone
    "logit_bias",
    "context",  # which the key may not have
    # What other fields exclude, or contradict.
    *("n_predict", "repeat_penalty", "continue_final_message", "truncate_prompt_tokens"),
    "repetition_detection",  # the shortest pattern is at most the longest
    # At least min_tokens.
    *("max_tokens", "max_completion_tokens", "max_output_tokens"),
    "cache_prompt",  # not false where a block has cache_control
}
CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    schemathesis.checks.not_a_server_error,
]


def _attempts(operation: Any, mode: GenerationMode, count: int) -> list[str]:
    """Make ``count`` requests of a kind; return what each was and how it was answered."""
    names: list[str] = []

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def attempt(case: Any) -> None:
        response = case.call(timeout=30)
        name = f"{case.method} {case.path} {mode.name.lower()} {response.status_code}"
        if mode is GenerationMode.NEGATIVE:
            case.validate_response(response, checks=[*CHECKS, checks.negative_data_rejection])
        else:
            case.validate_response(response, checks=CHECKS)
            if response.status_code in (400, 404):
                error = response.json()["error"]
                field = str(error["param"]).partition("[")[0]
                assert field in INEXPRESSIBLE, (case.body, error)
                name += f" {field}"
        names.append(name)

    attempt()
    return names


def tried(url: str, count: int) -> Counter[str]:
    """Make ``count`` requests for each operation, by its description and against it."""
    document = schemathesis.openapi.from_url(f"{url}/openapi.json")
    counts: Counter[str] = Counter()
    for found in document.get_all_operations():
        operation = found.ok()
        if operation.path == "/documents/text":  # a process for each: tests/server/test_documents
            continue
        for mode in GenerationMode.POSITIVE, GenerationMode.NEGATIVE:
            if mode is GenerationMode.NEGATIVE and operation.method != "post":
                continue

            for name in _attempts(operation, mode, count if operation.method == "post" else 2):
                counts[name] += 1
    return counts


@pytest.mark.long
@pytest.mark.parametrize("count", [8, pytest.param(250, marks=pytest.mark.slow)])
def test_the_description_is_true(count: int) -> None:
    with fake_server("--max-model-len", "1M") as server:
        counts = tried(server.url(), count)
    assert sum(counts.values()) >= 8 * count
    taken = {name.split()[1] for name in counts if " positive 200" in name}
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"} <= taken


def _closed(schema: Any) -> Any:
    """A schema that allows no key that it does not name."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if "properties" in schema else {}
    return {key: _closed(part) for key, part in schema.items()} | closed


def test_every_key_of_an_answer_is_described() -> None:
    text = "The castle says nothing.\n\nWhy?"
    said = [{"role": "user", "content": text}]
    prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    cited = asking(document(text_source("The castle says nothing.")))
    posts: list[tuple[str, str, dict[str, Any]]] = [
        ("ChatCompletion", "v1/chat/completions", {"messages": said, "return_annotations": True}),
        ("ChatCompletion", "v1/chat/completions", {"messages": said, "return_sources": 2}),
        ("Completion", "v1/completions", {"prompt": prompt, "return_sources": 2}),
        ("Completion", "v1/completions", {"prompt": [5, 6], "logprobs": 2}),
        ("Response", "v1/responses", {"input": said, "return_annotations": True}),
        ("Response", "v1/responses", {"input": said, "max_output_tokens": 2}),
        ("Message", "v1/messages", cited),
        ("TokenCount", "v1/messages/count_tokens", {"messages": said}),
        ("Tokenized", "tokenize", {"prompt": "a", "return_token_strs": True}),
        ("Detokenized", "detokenize", {"tokens": [5]}),
        ("Error", "v1/messages", cited | {"max_tokens": 0}),
        ("Error", "v1/completions", {"prompt": ""}),
    ]
    gets = ("ModelList", "v1/models"), ("ContextList", "v1/contexts"), ("Health", "health")
    with server_on("tests.server.page_rank") as server, httpx.Client(base_url=server.url()) as http:
        components = _closed(http.get("openapi.json").json()["components"])
        answers = [
            (name, http.post(path, json={"model": "smollm2", **body}, timeout=60))
            for name, path, body in posts
        ]
        answers += [(name, http.get(path)) for name, path in gets]
    for name, answer in answers:
        schema = {"$ref": f"#/components/schemas/{name}", "components": components}
        jsonschema.validate(answer.json(), schema)
        assert (answer.status_code != 200) == (name == "Error")
    sources = [answer.json()["choices"][0].get("sources") for _, answer in answers[:4]]
    assert [bool(found) for found in sources] == [False, True, True, False]


def test_the_page_shows_every_route_and_field(url: str) -> None:
    document = httpx.get(f"{url}/openapi.json").json()
    page = httpx.get(f"{url}/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert page.text.count("<script") == 1  # the page's own module, which sends the examples
    assert "script-src 'self';" in page.headers["content-security-policy"]
    for path in document["paths"]:
        assert f" {path}</code>" in page.text
    for name in ("structured_outputs", "repetition_penalty", "max_output_tokens"):
        assert f"<code>{name}</code>" in page.text


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 250
    with fake_server("--max-model-len", "1M") as server:
        counts = tried(server.url(), count)
    for name, times in sorted(counts.items()):
        print(f"{times:6d}  {name}")
    print(f"{sum(counts.values())} requests, no failure")


if __name__ == "__main__":
    main()
