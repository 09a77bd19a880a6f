"""The offline API on ranks that compute nothing."""

from __future__ import annotations

import asyncio
import itertools
import logging
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import razor_dist
from razor_dist import LLM, AsyncLLM, SamplingParams
from razor_dist.config.errors import RequestError
from razor_dist.frontend.client import EngineClient
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.llm.progress import ReadingLog
from razor_dist.protocol.repetition import LOOPS
from tests import fake_engine
from tests.fake_llm import FakeAsyncLLM, FakeLLM
from tests.tokenizer import smollm2_tokenizer

EOS = fake_engine.EOS


@pytest.mark.parametrize("prompt", [" one two three", {"prompt": " one two three"}])
def test_a_text_prompt(llm: LLM, prompt: Any) -> None:
    [output] = llm.generate(prompt, SamplingParams(max_tokens=50))
    assert output.prompt == " one two three"
    assert output.prompt_token_ids == smollm2_tokenizer()(" one two three")["input_ids"]
    [answer] = output.outputs
    assert answer.text == " three two one"
    assert answer.token_ids == [*reversed(output.prompt_token_ids), EOS]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert answer.logprobs is None and answer.cumulative_logprob is None
    assert output.finished
    metrics = output.metrics
    assert metrics.time_to_first_token is not None and metrics.total_seconds is not None
    assert 0 < metrics.time_to_first_token <= metrics.total_seconds


def test_sampling_defaults_are_the_models(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.repetition_detection) == (0.0, LOOPS)
    with FakeLLM(world_size=1, generation_config="none", repetition_detection="off") as plain:
        assert plain.get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize(
    "prompts",
    [[5, 6], {"prompt_token_ids": [5, 6]}, [[5, 6]], [{"prompt_token_ids": [5, 6]}]],
)
def test_token_ids_in_all_their_shapes(llm: LLM, prompts: Any) -> None:
    [output] = llm.generate(prompts)
    assert output.prompt is None
    assert output.outputs[0].token_ids == [6, 5, EOS]


def test_many_prompts_keep_their_order_and_their_parameters(llm: LLM) -> None:
    prompts = [[10 + n] * 3 for n in range(40)]
    params = [SamplingParams(max_tokens=1 + n % 3) for n in range(40)]
    outputs = llm.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in outputs] == [[10 + n] * (1 + n % 3) for n in range(40)]
    assert len({o.request_id for o in outputs}) == 40
    assert llm.generate([]) == []


def test_an_output_is_streamed_as_it_grows(llm: LLM) -> None:
    params = SamplingParams(max_tokens=50, n=2, logprobs=0)
    lengths, texts = [], []
    for output in llm.stream(" one two three", params):
        lengths.append([len(answer.token_ids) for answer in output.outputs])
        texts.append(output.outputs[0].text)
        assert output.finished == all(answer.finish_reason for answer in output.outputs)
    assert [sum(counts) for counts in lengths] == list(range(1, 9))
    assert texts[-1] == " three two one" and all(texts[-1].startswith(text) for text in texts)
    assert [answer.text for answer in output.outputs] == [texts[-1]] * 2
    assert output.outputs[1].cumulative_logprob == -2.0
    before = llm.stats()["bytes_sent"]["aborted"]
    assert next(llm.stream([fake_engine.ENDLESS, 20], SamplingParams(max_tokens=400)))
    assert llm.stats()["bytes_sent"]["aborted"] == before + 1 and llm.stats()["running"] == 0
    with pytest.raises(RequestError, match="the prompt is empty"):
        next(llm.stream([]))


def test_an_asynchronous_engine_answers_many_tasks_at_once() -> None:
    async def main(engine: AsyncLLM) -> None:
        async def answer(prompt: list[int]) -> list[int]:
            outputs = engine.generate(prompt, SamplingParams(max_tokens=9))
            last = [output async for output in outputs][-1]
            assert last.finished
            return last.outputs[0].token_ids

        found = await asyncio.gather(*(answer([5 + n, 6]) for n in range(20)))
        assert found == [[6, 5 + n, EOS] for n in range(20)]
        hanging = asyncio.create_task(answer([fake_engine.HANG]))
        while (await engine.stats())["running"] == 0:
            await asyncio.sleep(0.01)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        stats = await engine.stats()
        assert (stats["running"], stats["bytes_sent"]["aborted"]) == (0, 1)
        with pytest.raises(RequestError, match="token id 49152"):
            await answer([49152])
        hello = [{"role": "user", "content": "Hello"}]
        for generation in (True, False):
            outputs = engine.chat(hello, SamplingParams(max_tokens=9), generation)
            last = [output async for output in outputs][-1]
            ask = partial(engine.llm.chat, hello, add_generation_prompt=generation)
            [whole] = await asyncio.to_thread(ask, SamplingParams(max_tokens=9))
            assert last.outputs == whole.outputs
            assert last.prompt_token_ids == whole.prompt_token_ids

    with FakeAsyncLLM() as engine:
        asyncio.run(main(engine))


def test_how_an_answer_ends(llm: LLM) -> None:
    def end(**params: Any) -> tuple[str, str | None, str | int | None]:
        [output] = llm.generate(" four three two one", SamplingParams(max_tokens=9, **params))
        answer = output.outputs[0]
        return answer.text, answer.finish_reason, answer.stop_reason

    three = smollm2_tokenizer()(" three")["input_ids"][0]
    assert end() == (" one two three four", "stop", None)
    assert end(stop="two thr") == (" one ", "stop", "two thr")
    early = end(stop=[" one", " two", "three"], min_tokens=2)
    assert early == (" one two ", "stop", "three")
    assert end(stop_token_ids=[three]) == (" one two", "stop", three)
    [cut] = llm.generate(" two one", SamplingParams(max_tokens=1))
    assert (cut.outputs[0].text, cut.outputs[0].finish_reason) == (" one", "length")


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=1)
    [output] = llm.generate([5, 6, 7], params)
    answer = output.outputs[0]
    assert answer.logprobs is not None and output.prompt_logprobs is not None
    assert [list(entry) for entry in answer.logprobs] == [[7, 6], [6, 7], [5, 4], [2, 3]]
    assert answer.logprobs[0][7].rank == 1
    assert answer.cumulative_logprob == -2.0
    first, *rest = output.prompt_logprobs
    assert first is None
    assert [entry[token].logprob for entry, token in zip(rest, [6, 7], strict=True) if entry] == [
        -1.0,
        -1.0,
    ]
    [chosen] = llm.generate([5], SamplingParams(max_tokens=1, logprobs=0))
    assert chosen.outputs[0].logprobs is not None
    assert chosen.outputs[0].logprobs[0][5].rank is None
    assert not hasattr(chosen.outputs[0].logprobs[0][5], "__dict__")  # there are 21 a token


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Hello"}]
    ids = PromptEncoder(smollm2_tokenizer()).chat(conversation)
    [one] = llm.chat(conversation)
    assert one.prompt_token_ids == ids
    assert len(llm.chat([conversation, conversation])) == 2
    [open_end] = llm.chat(conversation, add_generation_prompt=False)
    assert ids[: len(open_end.prompt_token_ids)] == open_end.prompt_token_ids
    assert len(open_end.prompt_token_ids) < len(ids)
    system, developer = ([{"role": r, "content": "Be brief"}] for r in ("system", "developer"))
    [one], [other] = llm.chat(system + conversation), llm.chat(developer + conversation)
    assert one.prompt_token_ids == other.prompt_token_ids
    ends = {"add_generation_prompt": True}  # where it ends is not for the caller to say
    with llm.prefill_chat(conversation, chat_template_kwargs=ends) as prefix:
        assert 0 < prefix.num_tokens < len(open_end.prompt_token_ids)
    with patch.object(llm.get_tokenizer(), "apply_chat_template", return_value="a b") as render:
        assert llm.chat(conversation)[0].prompt_token_ids == smollm2_tokenizer()("a b")["input_ids"]
    render.assert_called_once()
    with pytest.raises(RequestError, match="at least one message"):
        llm.chat([])
    with pytest.raises(RequestError, match="chat template refuses"):
        llm.chat([{"role": "user"}])


def test_messages_in_openais_forms_are_read_as_the_server_reads_them(llm: LLM) -> None:
    texts = [{"type": "text", "text": text} for text in ("What is ", "2+2?")]
    call = {"id": "a", "function": {"name": "add", "arguments": '{"a": 2}'}}
    parsed = {"id": "a", "function": {"name": "add", "arguments": {"a": 2}}}
    forms, plain = (
        [
            {"role": "user", "content": content},
            {"role": "assistant", "content": empty, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "a", "content": "4"},
        ]
        for content, empty, called in ((texts, None, call), ("What is 2+2?", "", parsed))
    )
    template = {"chat_template": "{{ messages | tojson }}"}
    want = PromptEncoder(smollm2_tokenizer()).chat(plain, **template)
    [answer] = llm.chat(forms, chat_template_kwargs=template)
    assert answer.prompt_token_ids == want

    async def streamed() -> list[int]:
        engine = FakeAsyncLLM.__new__(FakeAsyncLLM)
        engine.llm = llm
        outputs = engine.chat(forms, chat_template_kwargs=template)
        return [output async for output in outputs][-1].prompt_token_ids

    assert asyncio.run(streamed()) == want
    one, other = (llm.prefill_chat(messages[:1]) for messages in (forms, plain))
    assert one.num_tokens == other.num_tokens
    one.release(), other.release()


def test_a_chat_cut_behind_its_document_has_the_tokens_of_the_whole() -> None:
    encoder = PromptEncoder(smollm2_tokenizer())

    def text(content: str, **how: Any) -> str:
        return encoder.chat_text([{"role": "user", "content": content}], **how)

    document = "One sentence. Another, of 1234 words."
    head = text(document, add_generation_prompt=False, continue_final_message=True)
    whole = text(f"{document}\n\nWhat?")
    assert head.endswith(document)
    before, after = (
        encoder.text(part, special_tokens=False) for part in (head, whole.removeprefix(head))
    )
    assert before + after == encoder.chat([{"role": "user", "content": f"{document}\n\nWhat?"}])


class Bar:
    """A bar as tqdm and Ray's tqdm have it, which keeps what it is told."""

    def __init__(self, total: int, desc: str, unit: str) -> None:
        self.total, self.descriptions, self.unit = total, [desc], unit
        self.updates: list[int] = []
        self.closed = False

    def update(self, n: int) -> None:
        self.updates.append(n)

    def set_description(self, desc: str) -> None:
        self.descriptions.append(desc)

    def close(self) -> None:
        self.closed = True


def test_a_bar_moves_with_every_chunk(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    bars: list[Bar] = []

    def make(**arguments: Any) -> Bar:
        bars.append(Bar(**arguments))
        return bars[-1]

    long = [fake_engine.SLOW_PREFILL, *range(20, 27)]
    llm.generate([long, [5, 6, 7]], SamplingParams(max_tokens=1), use_tqdm=make)
    llm.prefill(long, use_tqdm=make).release()
    several, one = bars
    assert (several.total, several.unit) == (11, "tok")
    assert sorted(several.updates) == [0, 0, 2, 2, 2, 2, 3]
    assert several.descriptions == [f"{n}/2 prompts answered" for n in range(3)]
    assert (one.total, one.updates) == (8, [0, 2, 2, 2, 2])
    assert several.closed and one.closed
    assert capsys.readouterr().err == ""
    llm.generate([5, 6], SamplingParams(max_tokens=1), use_tqdm=True)
    assert "1/1 prompts answered: 100%" in capsys.readouterr().err


def test_a_log_is_told_of_long_prompts_only(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """And one for all calls that name none, as a job's engine has it."""
    caplog.set_level(logging.INFO)
    ticks = itertools.count()  # a second passes with each look at the clock
    llm.use_tqdm = ReadingLog("book.txt", every=3, clock=lambda: float(next(ticks)))
    long = [fake_engine.SLOW_PREFILL, *range(20, 27)]
    try:
        llm.generate(long, SamplingParams(max_tokens=1))
        llm.prefill([5, 6, 7]).release()
        llm.prefill(long, use_tqdm=False).release()
    finally:
        llm.use_tqdm = False
    told = [record.getMessage() for record in caplog.records if "book.txt" in record.getMessage()]
    assert told == ["book.txt: read 4 of 8 tokens in 3 s"]


def test_a_prefix_has_the_salt_of_its_prompt(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    salts = []

    def submit(self: EngineClient, *args: Any, **kwargs: Any) -> Any:
        salts.append(kwargs["scope"].salt)
        return original(self, *args, **kwargs)

    original = EngineClient.submit
    monkeypatch.setattr(EngineClient, "submit", submit)
    llm.prefill([5]).release()
    with llm.prefill({"prompt_token_ids": [5], "cache_salt": "mine"}) as prefix:
        with pytest.raises(RequestError, match="cache_salt differs from the prefix's"):
            llm.generate({"prompt_token_ids": [6], "cache_salt": "another"}, prefix=prefix)
        for same in ("mine", None):
            prefix.check_salt(same)
    assert salts == [None, "mine"]


def test_a_model_without_a_tokenizer_takes_token_ids_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    with FakeLLM(str(tmp_path)) as llm:
        assert llm.get_tokenizer() is None
        [output] = llm.generate([[5, 6]])
        assert (output.outputs[0].token_ids, output.outputs[0].text) == ([6, 5, EOS], "")
        with pytest.raises(RequestError, match="no tokenizer, so it takes no text prompts"):
            llm.generate("Hello")
        with pytest.raises(RequestError, match="stop needs a tokenizer"):
            llm.generate([[5]], SamplingParams(stop="x"))


def test_the_package_is_lazy() -> None:
    code = "import sys, razor_dist; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert all(hasattr(razor_dist, name) for name in razor_dist.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = razor_dist.nonsense
