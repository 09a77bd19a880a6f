"""The offline API's errors: bad arguments, and engines that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from razor_dist import LLM, SamplingParams
from razor_dist.config.errors import ConfigError, EngineError, ModelError, RequestError
from tests import fake_engine
from tests.fake_llm import FakeLLM
from tests.hostile_grammars import CRASHES


@pytest.mark.parametrize("content", [3, ["hi"], [{"type": "image_url"}], [{"type": "text"}]])
def test_contents_that_are_no_text_are_refused(llm: LLM, content: Any) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\].content must be a string or a list"):
        llm.chat([{"role": "user", "content": content}])
    with pytest.raises(RequestError, match="messages holds a lone surrogate"):
        llm.chat([{"role": "user", "content": "a\ud83d"}])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "the prompt is empty"),
        ([[]], "the prompt is empty"),
        ([[5], [49152]], r"token id 49152 in prompt is not in \[0, 49152\)"),
        ([[5] * 512], "maximum context length is 512 tokens, but 528 were asked for"),
        ({"text": "x"}, "one key, prompt .a text. or prompt_token_ids, not {'text'}"),
        ({"prompt": "a", "prompt_token_ids": [5]}, "has one key"),
        ({"prompt": [5]}, "prompt cannot hold"),
        ({"prompt_token_ids": "a"}, "prompt_token_ids cannot hold 'a'"),
        ({}, "has one key"),
        (["a", 3], "a text or a list of token ids, not 3"),
        (b"a", "a text or a list of token ids, not b'a'"),
        ("a\ud83d", "prompt holds a lone surrogate"),
        ("a" * (1 << 19) + "\ud83d", "prompt holds a lone surrogate"),
        ({"prompt": "a", "cache_salt": "\udcff"}, "cache_salt holds a lone surrogate"),
        (123, "prompts must be a text, a list of token ids, a mapping, .*, not 123"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts)
    assert llm.stats()["running"] == 0


@pytest.mark.parametrize("messages", ["hi", 3, ["hi"], [None], [{"content": "hi"}], [["hi"]]])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    for call in (llm.chat, llm.prefill_chat):
        with pytest.raises(RequestError, match=r"messages must be a list such as .*; got"):
            call(messages)


def test_a_prefix_is_of_one_conversation(llm: LLM) -> None:
    one = [{"role": "user", "content": "hi"}]
    with pytest.raises(RequestError, match="must be one conversation, got 2"):
        llm.prefill_chat([one, one])  # type: ignore[list-item]


@pytest.mark.long
def test_a_far_too_long_text_is_not_tokenised_at_once(llm: LLM) -> None:
    """100 million characters, as a document may have, would take 14 GB."""
    text = " a" * 1_100_000
    message = [{"role": "user", "content": text}]
    for call, prompt in ((llm.generate, text), (llm.chat, message), (llm.prefill_chat, message)):
        with pytest.raises(RequestError, match="at most 1048576 are tokenised at once") as refused:
            call(prompt)
        assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [None], 3])
def test_parameters_of_another_type_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="sampling_params must be SamplingParams"):
        llm.generate("a", params)


def test_parameters_must_be_as_many_as_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 for 1"):
        llm.generate([[5]], [SamplingParams(), SamplingParams()])


def test_an_engine_of_one_sequence_has_no_room_for_a_prefix() -> None:
    with (
        FakeLLM(max_num_seqs=1, prefix_cache=False) as llm,
        pytest.raises(RequestError, match="max_num_seqs of at least 2") as error,
    ):
        llm.prefill([5])
    assert error.value.param == "max_num_seqs"


def test_one_failure_aborts_the_others(llm: LLM) -> None:
    aborted = llm.stats()["bytes_sent"]["aborted"]
    with pytest.raises(RequestError, match="more pages"):
        llm.generate([[fake_engine.HANG], [fake_engine.REFUSE, 1]])
    stats = llm.stats()
    assert (stats["running"], stats["bytes_sent"]["aborted"]) == (0, aborted + 1)


def test_wrong_settings_and_models() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'atention'; did you mean 'attention'"):
        LLM(atention="full")
    with pytest.raises(ConfigError, match="'tensor_parallel_size'; did you mean 'world_size'"):
        LLM(tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="world_size must be at least 1, got 0"):
        LLM(world_size=0)
    with pytest.raises(ModelError, match="no such folder"):
        LLM("/no/such/model")


def test_what_the_ranks_refuse_reaches_the_caller(tmp_path: Path) -> None:
    folder = tmp_path / "bad-head-map"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    with pytest.raises(EngineError, match="the head map belongs to another model"):
        FakeLLM(str(folder))


def test_a_constraint_that_crashes_what_compiles_it_is_an_error_of_its_request(llm: LLM) -> None:
    crash = SamplingParams(structured_outputs={"grammar": CRASHES})
    good = SamplingParams(structured_outputs={"choice": ["a"]})
    for _ in range(2):
        with pytest.raises(RequestError, match="crashed; make it simpler") as refused:
            llm.generate([[5, 6, 7], [5, 6]], [good, crash])
        assert refused.value.param == "structured_outputs"
        with pytest.raises(RequestError, match="crashed"):
            list(llm.stream([5, 6, 7], crash))
        assert llm.generate([5, 6, 7], good)[0].finished
