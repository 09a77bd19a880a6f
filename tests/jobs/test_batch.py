"""``razor-dist batch``, on ranks that repeat prompts backwards."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from razor_dist import cli
from razor_dist.config.errors import ConfigError, DocumentError, RequestError
from razor_dist.config.schema import EngineConfig
from razor_dist.jobs.batch import BatchTask, read_batch
from razor_dist.jobs.task import ItemSize, Updates
from tests.fake_engine import ENDLESS
from tests.fake_llm import FakeHostLLM, FakeLLM
from tests.hostile_grammars import chained_references
from tests.tokenizer import smollm2_tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def request(id: str, url: str = TEXT, **body: Any) -> dict[str, Any]:
    return {"custom_id": id, "method": "POST", "url": url, "body": {"model": "smollm2", **body}}


HELLO = [{"role": "user", "content": "hello"}]
LINES: list[Any] = [
    request("text", prompt=" one two three", max_tokens=50),
    request("several", prompt=[" a b", " c d e"], max_tokens=9, logprobs=1),
    request("chat", CHAT, messages=HELLO, max_tokens=400),
    "no JSON",
    request("cut", prompt=" one two three", max_tokens=2),
    {**request("get", prompt="x"), "method": "GET"},
    request("", prompt="no id"),
    request("field", CHAT, messages=HELLO, tempreature=1),
    request("long", prompt="a " * 600),
    request("stream", prompt="a", stream=True),
    {**request("other", prompt="a"), "body": {"model": "gpt-5", "prompt": "a"}},
    request("timeout", prompt="a", timeout=60),
    request("context", CHAT, messages=HELLO, context="ctx_1"),
]


def write(path: Path, lines: list[Any]) -> None:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")


class Batch:
    """The file ``in.jsonl`` of a folder, answered on ranks that repeat prompts backwards."""

    def __init__(self, folder: Path) -> None:
        self.file, self.out = folder / "in.jsonl", folder / "out.jsonl"

    def run(self, *flags: str, attention: str = "full") -> int:
        command = ["batch", str(self.file), "--out", str(self.out), "--no-ray"]
        return cli.main([*command, "--attention", attention, *flags])

    def answers(self, lines: list[Any], *flags: str, code: int = 0) -> list[dict[str, Any]]:
        write(self.file, lines)
        assert self.run(*flags) == code
        return [json.loads(line) for line in self.out.read_text().splitlines()]

    def bodies(self, lines: list[Any], *flags: str) -> list[dict[str, Any]]:
        return [answer["response"]["body"] for answer in self.answers(lines, *flags)]


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Batch:
    monkeypatch.setattr("razor_dist.jobs.host_engine.HostLLM", FakeHostLLM)
    return Batch(tmp_path)


def test_a_batch(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    answers, out = batch.answers(LINES, code=3), batch.out
    told = capfd.readouterr()
    assert "4 of 13 requests answered" in told.out
    assert [a["custom_id"] for a in answers] == [
        (line["custom_id"] or None) if isinstance(line, dict) else None for line in LINES
    ]
    assert len({a["id"] for a in answers}) == len(answers)
    assert all(set(a) == {"id", "custom_id", "response", "error"} for a in answers)

    text, several, cut = (
        Completion.model_validate(answers[i]["response"]["body"], strict=True) for i in (0, 1, 4)
    )
    assert text.choices[0].text == " three two one" and text.choices[0].finish_reason == "stop"
    assert text.usage is not None
    assert (text.usage.prompt_tokens, text.usage.completion_tokens) == (3, 4)
    assert several.choices[0].text == " b a"
    assert several.choices[1].logprobs is not None
    assert len(several.choices[1].logprobs.token_logprobs or []) == 4
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (" three two", "length")
    chat = ChatCompletion.model_validate(answers[2]["response"]["body"])
    assert chat.choices[0].message.role == "assistant" and chat.choices[0].message.content

    problems = {
        3: "line 4: the line is not valid JSON",
        5: "line 6: method must be 'POST', got 'GET'",
        6: "line 7: custom_id must be a string that is not empty",
    }
    for place, problem in problems.items():
        assert answers[place]["response"] is None
        assert answers[place]["error"]["code"] == "invalid_request"
        assert answers[place]["error"]["message"].startswith(problem)
        assert problem in told.err
    refused = {
        7: (400, "tempreature", None),
        8: (400, "prompt", "context_length_exceeded"),
        9: (400, "stream", None),
        10: (404, "model", "model_not_found"),
        11: (400, "timeout", None),
        12: (400, "context", None),
    }
    for place, (status, param, code) in refused.items():
        response = answers[place]["response"]
        error = response["body"]["error"]
        assert (response["status_code"], error["param"], error["code"]) == (status, param, code)
        assert f"line {place + 1}: {error['message']}" in told.err

    # Again: nothing is computed, and nothing changes.
    monkeypatch.setattr("razor_dist.jobs.host_engine.HostLLM", None)
    before = out.read_bytes()
    assert batch.run() == 3
    assert out.read_bytes() == before
    assert batch.run(attention="streaming") == 2
    assert "holds results of other settings" in capfd.readouterr().err


def test_a_new_folder_has_its_own_answers(batch: Batch, capfd: pytest.CaptureFixture[str]) -> None:
    batch.answers([request("x", prompt=" a b")])
    before, second = batch.out.read_bytes(), batch.out.with_name("out-2.jsonl")
    second.write_text("of the user")
    assert batch.run("--new-folder", attention="streaming") == 2
    assert f"{second} is there and no earlier run" in capfd.readouterr().err
    assert second.read_text() == "of the user"
    second.unlink()
    for _ in range(2):
        assert batch.run("--new-folder", attention="streaming") == 0
        assert f"wrote {second}\n" in capfd.readouterr().out
        assert (
            batch.out.read_bytes() == before and json.loads(second.read_text())["custom_id"] == "x"
        )


@pytest.mark.parametrize("out", [".", "folder"])
def test_answers_need_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    write(tmp_path / "in.jsonl", [request("x", prompt=" a b")])
    assert cli.main(["batch", "in.jsonl", "--out", out, "--no-ray"]) == 2
    told = capfd.readouterr().err
    assert told == f"razor-dist: --out must be a file for the answers, and {out} is a folder\n"
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "in.jsonl"}
    assert cli.main(["batch", "in.jsonl", "--out", "x" * 300, "--no-ray"]) == 2
    assert "File name too long" in capfd.readouterr().err


def test_unknown_fields_are_ignored_if_that_is_wanted(
    batch: Batch, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [request(str(n), prompt=" a b", num_ctx=n) for n in range(2)]
    bodies = batch.bodies(lines, "--unknown-fields", "warn")
    assert [body["choices"][0]["text"] for body in bodies] == [" b a"] * 2
    said = "requests have the unsupported field 'num_ctx', which is ignored"
    assert [r.getMessage() for r in caplog.records].count(said) == 1
    # What is refused and what is not are results of two settings.
    assert batch.run("--unknown-fields", "refuse") == batch.run("--unknown-fields", "maybe") == 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[]", "the line must be a JSON object"),
        ({**request("x"), "custom_id": 7}, "custom_id must be a string"),
        ({**request("x"), "url": "/v1/embeddings"}, "url must be /v1/chat/completions or"),
        ({**request("x"), "url": ["x"]}, "url must be /v1/chat/completions or"),
        ({**request("x"), "body": "x"}, "body must be a JSON object"),
        ({**request("x"), "extra": 1}, "unknown field 'extra'"),
    ],
)
def test_malformed_lines(tmp_path: Path, line: Any, problem: str) -> None:
    write(tmp_path / "in.jsonl", ["", line])
    [entry] = read_batch(tmp_path / "in.jsonl")
    assert entry.line.number == 2
    assert entry.problem is not None and entry.problem.startswith(problem)


def test_a_byte_order_mark_is_no_part_of_the_first_request(batch: Batch) -> None:
    [body] = batch.bodies(["\ufeff" + json.dumps(request("first", prompt=" a b"))])
    assert body["choices"][0]["text"] == " b a"


def test_a_custom_id_that_is_not_unique_is_refused_before_anything_runs(
    batch: Batch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(batch.file, [*LINES, request("cut", prompt="another"), "{}"])
    assert batch.run() == 2
    assert "lines 5, 14 have the same custom_id 'cut'" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == [batch.file]


def test_the_fields_of_the_server_are_known(batch: Batch) -> None:
    words = {"prompt": [" one two", " three"], "n": 2, "frequency_penalty": 1}
    lines = [
        request("n", **words, structured_outputs={"choice": ["a"]}),
        request("echo", prompt=" one two", echo=True, logprobs=1, max_tokens=1),
        request("response", "/v1/responses", input="hello", max_output_tokens=3),
    ]
    bodies = batch.bodies(lines)
    several = Completion.model_validate(bodies[0], strict=True)
    assert [c.text for c in several.choices] == [" two one"] * 2 + [" three"] * 2
    assert several.usage is not None and several.usage.prompt_tokens == 3
    [echo] = bodies[1]["choices"]
    assert echo["text"] == " one two two"
    assert echo["logprobs"]["token_logprobs"] == [None, -1.0, -0.5]
    response = Response.model_validate(bodies[2])
    assert response.status == "incomplete" and response.output_text


def test_an_engine_gets_several_requests_at_once(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits until as many others are under way."""
    together = threading.Barrier(3)

    class Together(FakeHostLLM):
        def call(self, *args: Any) -> Any:
            together.wait(60)
            return super().call(*args)

    monkeypatch.setattr("razor_dist.jobs.host_engine.HostLLM", Together)
    words = "abcdef"
    lines = [request(w, prompt=f" {w} x", max_tokens=50) for w in words]
    answers = batch.answers(lines, "--max-num-seqs", "3")
    assert [(a["custom_id"], a["response"]["body"]["choices"][0]["text"]) for a in answers] == [
        (word, f" x {word}") for word in words
    ]


def test_files_that_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*no\.jsonl: No such file"):
        read_batch(tmp_path / "no.jsonl")
    empty = tmp_path / "in.jsonl"
    empty.write_text("\n")
    assert cli.main(["batch", str(empty), "--out", str(tmp_path / "out.jsonl")]) == 2
    assert "holds no line" in capfd.readouterr().err
    assert cli.main(["batch", str(empty), "--out", str(empty)]) == 2
    assert "no earlier run of this command wrote it" in capfd.readouterr().err


def test_a_line_whose_schema_cannot_be_compiled_is_refused_as_by_the_server(batch: Batch) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": chained_references(900)}}
    lines = [
        request("bad", prompt=" one two", response_format=form),
        request("good", prompt=" one two", response_format={"type": "json_object"}),
    ]
    bad, good = (answer["response"] for answer in batch.answers(lines, code=3))
    assert (bad["status_code"], good["status_code"]) == (400, 200)
    assert bad["body"]["error"]["param"] == "response_format"
    assert "901 references of which each leads" in bad["body"]["error"]["message"]


def test_a_refused_request_counts_for_nothing(tmp_path: Path) -> None:
    lines = [request("long", prompt=" one" * 9000), request("good", prompt=" one two")]
    write(tmp_path / "in.jsonl", lines)
    config = EngineConfig(attention="full")
    task = BatchTask({"default": config}, config.model, read_batch(tmp_path / "in.jsonl"))
    with FakeLLM(attention="full") as llm:
        refused, good = (list(task.run(llm, item)) for item in task.items())
    assert refused == [ItemSize(0)]
    assert good == [ItemSize(2)]


def test_answers_end_in_a_batch_as_on_the_server(batch: Batch) -> None:
    short = {"max_pattern_size": 4, "min_count": 3, "min_length": 9}
    loop = {"prompt": [ENDLESS, 900], "n_predict": 40, "repetition_detection": short}
    lines = [
        request("loop", **loop, n=2),
        request("default", CHAT, messages=HELLO, reasoning_effort="low"),
        request("special", prompt=[500, 1, 600], skip_special_tokens=False, max_tokens=3),
        request("last", prompt=[700, 500, 600], truncate_prompt_tokens=2, cache_prompt=False),
        request("string", prompt=" one two three", stop=["wo"]),
    ]
    looped, chat, special, last, string = batch.bodies(lines, "--default-max-tokens", "5")
    assert [c["finish_reason"] for c in looped["choices"]] == ["repetition"] * 2
    assert looped["usage"]["completion_tokens"] == 18
    assert chat["usage"]["completion_tokens"] == 5
    assert chat["choices"][0]["finish_reason"] == "length"
    decode = smollm2_tokenizer().decode
    assert special["choices"][0]["text"] == f"{decode([600])}<|im_start|>{decode([500])}"
    assert last["choices"][0]["text"] == decode([600]) + decode([500])
    assert last["usage"]["prompt_tokens"] == 2
    assert string["choices"][0]["text"] == " three t"
    assert string["choices"][0]["finish_reason"] == "stop"


def test_what_settings_refuse_is_tried_again_by_the_next_run(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Small(FakeHostLLM):
        def call(self) -> Any:
            raise RequestError("start it with a larger kv_tokens", code="kv_capacity_exceeded")

    monkeypatch.setattr("razor_dist.jobs.host_engine.HostLLM", Small)
    line = request("long", prompt=" one two")
    [refused] = batch.answers([line], "--kv-tokens", "512", code=3)
    assert refused["response"].keys() == {"request_id", "status_code", "body"}
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["code"] == "kv_capacity_exceeded"
    monkeypatch.setattr("razor_dist.jobs.host_engine.HostLLM", FakeHostLLM)
    [body] = batch.bodies([line], "--kv-tokens", "1024")
    assert body["choices"][0]["text"] == " two one"


def test_draws_depend_on_the_seed_of_the_command(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [request("x", prompt=" one two")])
    ids = []
    for seed in (None, 1, 2):
        config = EngineConfig(attention="full", seed=seed)
        task = BatchTask({"default": config}, config.model, read_batch(tmp_path / "in.jsonl"))
        with FakeLLM(attention="full", seed=seed) as llm:
            [item] = task.items()
            ids.append(_result(task.run(llm, item))["body"]["id"])
    assert len(set(ids)) == 3


def _result(work: Updates) -> Any:
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_request_is_the_same_whatever_ends_its_line(tmp_path: Path, end: str) -> None:
    file, one, two = tmp_path / "in.jsonl", json.dumps(request("a")), json.dumps(request("b"))
    file.write_text(one)
    [alone] = read_batch(file)
    file.write_bytes(f"{one}{end}{two}".encode())
    first, second = read_batch(file)
    assert first.item_id == alone.item_id
    assert first.line.read() == f"{one}{end}".encode() and second.line.read() == two.encode()
    assert alone.line.read() == one.encode()
    # The name in folders of earlier versions.
    assert alone.line.digest == hashlib.sha256(f"{one}\n".encode()).hexdigest()[:12]


def test_a_batch_file_that_was_moved_may_come_back(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [request("x", prompt=" one two")])
    [entry] = read_batch(tmp_path / "in.jsonl")
    (tmp_path / "in.jsonl").rename(tmp_path / "moved.jsonl")
    with pytest.raises(DocumentError, match=r"line 1 of .*in\.jsonl cannot be read: No") as error:
        entry.line.read()
    assert error.value.retryable
