"""Structured outputs that crash or hold up what compiles them harm their own request alone."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from razor_dist.api.strict_json import parse_json
from razor_dist.config.errors import RequestError
from razor_dist.frontend.grammar_process import MOST_WAITING
from razor_dist.models.registry import resolve_model
from razor_dist.protocol import grammar_bounds
from razor_dist.protocol.grammar_bounds import grammar_problem, schema_problem
from tests import hostile_grammars
from tests.frontend.test_grammar_process import slow
from tests.server.process import ServerProcess, fake_server

CHAT: dict[str, Any] = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with fake_server() as server:
        yield server


def status(server: ServerProcess, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    answer = httpx.post(f"{server.url()}{path}", json=CHAT | fields, timeout=60)
    error = answer.json().get("error") or {}
    return answer.status_code, error.get("param"), error.get("message", "")


@pytest.mark.long
@pytest.mark.parametrize(
    ("structured", "words"),
    [
        ({"grammar": hostile_grammars.chained_rules(1990)}, "has 1992 different rules; at most"),
        ({"grammar": hostile_grammars.chained_rules(900)}, "902 rules of which each leads to"),
        ({"grammar": hostile_grammars.chained_terminals(9990)}, "different rules; at most"),
        ({"grammar": hostile_grammars.chained_gbnf(900)}, "902 rules of which each leads to"),
        ({"grammar": hostile_grammars.chained_gbnf(11_000)}, "different rules; at most"),
        ({"json": hostile_grammars.chained_references(2000)}, "different references; at most"),
        ({"json": hostile_grammars.chained_references(900)}, "901 references of which each leads"),
        ({"json": hostile_grammars.nested_schema(250)}, "nested more than 200 levels deep"),
        ({"grammar": 'root ::= "a"\n' * 210_000}, "longer than 262144 characters"),
        ({"grammar": hostile_grammars.doubling_terminals(15)}, "took longer than 3 s"),
        ({"grammar": hostile_grammars.doubling_terminals(150)}, "grammar cannot be used"),
        ({"grammar": hostile_grammars.CRASHES}, "crashed"),
    ],
)
def test_what_explodes_is_refused_and_harms_nobody(
    server: ServerProcess, structured: dict[str, Any], words: str
) -> None:
    for stream in (False, True):  # before a stream has begun
        code, param, message = status(server, structured_outputs=structured, stream=stream)
        assert (code, param) == (400, "structured_outputs"), message
        assert words in message
    assert server.process.poll() is None
    assert status(server, structured_outputs={"regex": "a"})[0] == 200


def test_errors_name_the_field_that_asks(server: ServerProcess) -> None:
    schema = hostile_grammars.chained_references(900)
    crash = {"type": "string", "pattern": "("}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert status(server, response_format=form)[:2] == (400, "response_format")
    late = {"type": "json_schema", "json_schema": {"name": "x", "schema": crash}}
    code, param, message = status(server, response_format=late)
    assert (code, param) == (400, "response_format")
    assert message.startswith("response_format: json cannot be used")
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    body = {"model": "smollm2", "input": "Hi", "text": text}
    answer = httpx.post(f"{server.url()}/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "text.format")
    # A body that the parsing process reads.
    long = CHAT | {"response_format": form, "prompt_cache_key": "x" * 2**18}
    answer = httpx.post(f"{server.url()}/v1/chat/completions", json=long, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")


@pytest.mark.long
def test_random_ones_are_answered_or_refused(server: ServerProcess) -> None:
    rng = random.Random(0)
    for _ in range(40):
        structured = hostile_grammars.random_structured(rng)
        code, param, message = status(server, structured_outputs=structured)
        assert code == 200 or (code, param) == (400, "structured_outputs"), (message, structured)
    assert httpx.get(f"{server.url()}/health").status_code == 200


@pytest.mark.long
def test_addresses_take_turns_where_there_are_no_keys() -> None:
    async def main(url: str) -> None:
        async def ask(local: str, structured: dict[str, Any]) -> httpx.Response:
            transport = httpx.AsyncHTTPTransport(local_address=local)
            async with httpx.AsyncClient(transport=transport, timeout=120) as client:
                body = CHAT | {"structured_outputs": structured}
                return await client.post(f"{url}/v1/chat/completions", json=body)

        most = MOST_WAITING
        grammars = [{"grammar": slow(n).grammar} for n in range(most + 2)]
        flood = [asyncio.create_task(ask("127.0.0.1", grammar)) for grammar in grammars]
        refused: list[httpx.Response] = []
        while not refused:
            await asyncio.sleep(0.01)
            ended = [task.result() for task in flood if task.done()]
            refused = [answer for answer in ended if answer.status_code == 429]
        assert refused[0].headers["Retry-After"] == "1"
        assert (await ask("127.0.0.2", {"regex": "a"})).status_code == 200
        assert sum(not task.done() for task in flood) > most // 2
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)

    with fake_server() as server:
        asyncio.run(main(server.url()))


_OWN_TOKENIZER = """
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import PreTrainedTokenizerFast

class Whole:
    def pre_tokenize(self, text):
        pass

class OwnTokenizer(PreTrainedTokenizerFast):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(Whole())
"""


def test_a_tokenizer_with_parts_in_python_is_refused_structured_outputs_alone(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    shutil.copy(resolve_model("smollm2") / "tokenizer.json", tmp_path)
    (tmp_path / "own.py").write_text(_OWN_TOKENIZER)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "OwnTokenizer",'
        ' "auto_map": {"AutoTokenizer": [null, "own.OwnTokenizer"]}}'
    )
    with fake_server("--model", str(tmp_path), "--trust-remote-code") as server:
        name = httpx.get(f"{server.url()}/v1/models").json()["data"][0]["id"]
        body = {"model": name, "prompt": [5, 6], "max_tokens": 3}
        url = f"{server.url()}/v1/completions"
        assert httpx.post(url, json=body, timeout=60).status_code == 200
        for _ in range(2):
            answer = httpx.post(
                url, json=body | {"structured_outputs": {"choice": ["a"]}}, timeout=60
            )
            assert answer.status_code == 400
            assert "the model's tokenizer cannot be used" in answer.text
            assert "Custom PreTokenizer cannot be serialized" in answer.text


def test_the_frontend_never_loads_llguidance(server: ServerProcess) -> None:
    assert status(server, structured_outputs={"regex": "b"})[0] == 200
    assert status(server, structured_outputs={"regex": "("})[0] == 400
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "llguidance" not in maps and "libc" in maps


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("start: a\n | b\na: b\nb: /x/ // start: c\n", None),
        ('start: "r1: r2"\n' + "\n".join(f"r{i}: /r{i + 1}/" for i in range(900)), None),
        ("\n".join(f"r{i}: start\n | r{i}" for i in range(900)) + "\nstart: r0 r1", None),
        ("start: " + "(" * 201, "nested"),
        ("start: r0\n" + "\n".join(f"r{i}[x=3]: y\n | r{i + 1}" for i in range(300)), "leads"),
        ('root ::= r0\nr0 ::= [(("] # r0\n' * 3, None),
    ],
)
def test_chains_of_rules_are_found(text: str, problem: str | None) -> None:
    found = grammar_problem(text)
    assert found is None if problem is None else problem in str(found)


def test_chains_of_references_are_found() -> None:
    circle = hostile_grammars.chained_references(150)
    circle["$defs"]["d150"] = {"$ref": "#/$defs/d0"}
    assert schema_problem(circle) is None
    assert schema_problem(hostile_grammars.chained_references(199)) is None
    assert "201 references" in str(schema_problem(hostile_grammars.chained_references(200)))
    assert schema_problem({"properties": {"a/b": {"$ref": "#/properties/a~1b"}}}) is None
    assert schema_problem({"$ref": ["#"], "items": [{"$ref": "http://x"}, {"$ref": "#/9"}]}) is None
    many = [{"$ref": f"#/{n}"} for n in range(grammar_bounds.MOST_RULES + 1)]
    assert "1001 different references" in str(schema_problem({"anyOf": many}))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", ['"', "/", "[", "(", "a:", "a[", "?", "\n", "\\", "a\n", "start"])
def test_bounds_are_checked_in_linear_time(piece: str) -> None:
    """Looking at what is left open again and again would take hours."""
    for before in ("", "start: a\n", "root ::= "):
        text = before + piece * (grammar_bounds.LONGEST // len(piece))
        assert (grammar_problem(text) is not None) == (piece == "(")


@pytest.mark.timeout(60)
def test_a_key_given_twice_is_found_in_linear_time() -> None:
    body = "{" + ",".join(f'"{i:x}":0' for i in range(400_000)) + ',"z":0,"z":1,"y":0,"y":0}'
    with pytest.raises(RequestError, match="the key 'z' is given twice"):
        parse_json(body.encode())
