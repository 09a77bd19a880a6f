"""The offline API's prefixes, on real ranks: one prefilled document answers many questions."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from razor_dist import LLM, RequestOutput, SamplingParams
from razor_dist.config.errors import EngineError, RequestError
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.frontend.ranks import RankGroup
from razor_dist.llm.prefix import Prefix
from tests.tiny_models import make_tiny, save_head_map
from tests.tokenizer import sentencepiece_tokenizer, smollm2_tokenizer

BOS, MAX_LEN = 1, 400
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
WORDS = [f"w{n}" for n in range(192)]
# Begins with a token of its own and trims contents, as Llama 3's does.
TEMPLATE = (
    "w1 {% for message in messages %}w2 {{ message.content | trim }} w3 {% endfor %}"
    "{% if add_generation_prompt %}w4{% endif %}"
)


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 190, (count,), generator=generator).tolist()


DOCUMENT = tokens(150, 1)
QUESTIONS = [tokens(11 + n, 10 + n) for n in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a head map, and a tokenizer that begins every text with a token."""
    folder = make_tiny("llama", tmp_path_factory.mktemp("prefix"))
    words = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="w1 $A", special_tokens=[("w1", BOS)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w1")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    retrieval = ((True, False), (False, False), (False, True), (True, True))
    save_head_map(folder, retrieval, folder / "heads.json")
    return folder


@pytest.fixture(scope="module")
def start(model: Path) -> Callable[[int], LLM]:
    def start(world_size: int) -> LLM:
        return LLM(
            str(model),
            world_size=world_size,
            threads=1,
            head_map=str(model / "heads.json"),
            max_model_len=MAX_LEN,
            max_num_seqs=3,
            page_size=8,
            chunked_prefill_size=40,
            window_min=24,
            window_ratio=8,
            block=8,
            prefix_cache=False,  # so that what is read again is seen
        )

    return start


@pytest.fixture(scope="module")
def llm(start: Callable[[int], LLM]) -> Iterator[LLM]:
    with start(2) as llm:
        yield llm


@pytest.fixture(scope="module")
def other(start: Callable[[int], LLM]) -> Iterator[LLM]:
    with start(1) as llm:
        yield llm


def held(llm: LLM) -> int:
    return sum(llm.stats()["kv_bytes_per_rank"])


def chosen(output: RequestOutput) -> list[float]:
    answer = output.outputs[0]
    assert answer.logprobs is not None
    return [e[token].logprob for e, token in zip(answer.logprobs, answer.token_ids, strict=True)]


@pytest.mark.long
def test_a_question_after_a_prefix_is_answered_as_after_the_whole_document(llm: LLM) -> None:
    whole = llm.generate([DOCUMENT + question for question in QUESTIONS], GREEDY)
    assert held(llm) == 0
    with llm.prefill(DOCUMENT) as prefix:
        assert prefix.num_tokens == len(DOCUMENT)
        kept = held(llm)
        for _ in range(2):  # the document is unharmed by its questions
            answers = llm.generate(QUESTIONS, GREEDY, prefix=prefix)
            assert held(llm) == kept > 0
            for answer, want, question in zip(answers, whole, QUESTIONS, strict=True):
                assert answer.prompt_token_ids == question
                assert (answer.num_cached_tokens, want.num_cached_tokens) == (150, 0)
                assert answer.outputs[0].token_ids == want.outputs[0].token_ids
                assert chosen(answer) == pytest.approx(chosen(want), abs=1e-4)
    assert held(llm) == 0


def test_prompt_logprobs_after_a_prefix_are_the_prompts_own(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    [question, *_] = QUESTIONS
    [whole] = llm.generate(DOCUMENT + question, params)
    with llm.prefill(DOCUMENT) as prefix:
        [answer] = llm.generate(question, params, prefix=prefix)
    assert answer.prompt_logprobs is not None and whole.prompt_logprobs is not None
    first, *found = answer.prompt_logprobs
    assert first is None
    for entry, want, token in zip(
        found, whole.prompt_logprobs[len(DOCUMENT) + 1 :], question[1:], strict=True
    ):
        assert entry is not None and want is not None
        assert entry[token].logprob == pytest.approx(want[token].logprob, abs=1e-4)


def test_texts_begin_with_special_tokens_only_where_the_document_begins(llm: LLM) -> None:
    with llm.prefill("w5 w6 w7") as prefix:
        assert prefix.num_tokens == 4
        [answer] = llm.generate("w8 w9", GREEDY, prefix=prefix)
    assert (answer.prompt, answer.prompt_token_ids) == ("w8 w9", [8, 9])
    [whole] = llm.generate("w5 w6 w7 w8 w9", GREEDY)
    assert whole.prompt_token_ids == [BOS, 5, 6, 7, 8, 9]
    assert answer.outputs[0].token_ids == whole.outputs[0].token_ids
    with llm.prefill({"prompt_token_ids": [5, 6]}) as prefix:
        assert prefix.num_tokens == 2


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def test_conversations_continue_a_prefix_in_mid_message(llm: LLM) -> None:
    # Words that do not begin with w1, which the tokenizer finds anywhere, being special.
    document = " ".join(WORDS[20 + n % 80] for n in DOCUMENT)
    conversations = [
        [user(f"{document}\n\nw8 w9")],
        [user(f"{document}\n\nw8 w9"), {"role": "assistant", "content": "w21"}, user("w22")],
        [user(document), {"role": "assistant", "content": "w21"}, user("w22")],
    ]
    whole = llm.chat(conversations, GREEDY)
    with llm.prefill_chat([user(document)]) as prefix:
        assert prefix.num_tokens == 2 + len(DOCUMENT)
        answers = llm.chat(conversations, GREEDY, prefix=prefix)
    assert answers[0].prompt_token_ids == [8, 9, 3, 4]
    for answer, want in zip(answers, whole, strict=True):
        assert want.prompt_token_ids[prefix.num_tokens :] == answer.prompt_token_ids
        assert answer.num_cached_tokens == prefix.num_tokens
        assert answer.outputs[0].token_ids == want.outputs[0].token_ids
    assert held(llm) == 0


def test_a_conversation_that_begins_otherwise_does_not_continue_a_prefix(llm: LLM) -> None:
    with llm.prefill_chat([user("w5 w6")]) as prefix:
        for conversation in ([user("w5 w7")], [user("w5")], [user("w9"), user("w5 w6 w7")]):
            with pytest.raises(RequestError, match="does not begin with the prefix's") as error:
                llm.chat(conversation, GREEDY, prefix=prefix)
            assert error.value.param == "messages"
    with pytest.raises(RequestError, match="the prefix was released"):
        llm.chat([user("w5 w6 w7")], GREEDY, prefix=prefix)
    with llm.prefill("w5 w6") as prefix, pytest.raises(RequestError, match="with prefill_chat"):
        llm.chat([user("w5 w6 w7")], GREEDY, prefix=prefix)
    for nothing, message in (([], "at least one message"), ([{"role": "user"}], "refuses")):
        with pytest.raises(RequestError, match=message):
            llm.prefill_chat(nothing)


@pytest.mark.parametrize(
    "document, question",
    [
        ("the world", " says the time"),
        ("the world says:\n", "the time"),
        ("the time ", "the world"),
        ("世界", "世 a"),
        ("the", "世"),
        ("the world " * 200, "a time"),
    ],
)
@pytest.mark.parametrize("make", [sentencepiece_tokenizer, smollm2_tokenizer])
def test_a_continuation_has_the_tokens_of_the_whole_text(
    document: str, question: str, make: Callable[[], PreTrainedTokenizerBase]
) -> None:
    encoder = PromptEncoder(make())
    before, whole = encoder.text(document), encoder.text(document + question)
    rest = encoder.continuation(before[-64:], question)
    if whole[: len(before)] == before:
        assert before + rest == whole
    assert make().decode(before + rest) == make().decode(whole)


def test_a_token_over_the_border_adds_no_space() -> None:
    encoder = PromptEncoder(sentencepiece_tokenizer())
    before = encoder.text("the ti")
    rest = encoder.continuation(before, "me")
    assert encoder.tokenizer is not None
    assert encoder.tokenizer.decode(before + rest, skip_special_tokens=True) == "the time"


class _BrokenBar:
    """A caller's bar that fails at the first chunk."""

    def __init__(self, **_: object) -> None: ...

    def update(self, tokens: int) -> None:
        raise ZeroDivisionError

    def close(self) -> None: ...


def test_a_prefix_whose_bar_fails_is_released(llm: LLM) -> None:
    with pytest.raises(ZeroDivisionError):
        llm.prefill(DOCUMENT, use_tqdm=_BrokenBar)
    assert held(llm) == 0


def test_the_context_holds_prefix_prompt_and_answer(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"length is 400 tokens, but 401 were") as error:
        llm.prefill([5] * MAX_LEN)
    assert (error.value.param, error.value.code) == ("prompt", "context_length_exceeded")
    with llm.prefill([5] * 380) as prefix:
        with pytest.raises(RequestError, match=r"401 were .* 380 in the prefix, 13 in the prompt"):
            llm.generate([[5] * 13], GREEDY, prefix=prefix)
        [answer] = llm.generate([5] * 12, GREEDY, prefix=prefix)
        assert len(answer.outputs[0].token_ids) == 8
        everything = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        [answer] = llm.generate([5] * 12, everything, prefix=prefix)
        assert len(answer.outputs[0].token_ids) == 8


def test_a_handle_is_good_until_it_is_released(llm: LLM) -> None:
    prefix = llm.prefill(DOCUMENT)
    assert not prefix.released
    prefix.release()
    prefix.release()
    assert prefix.released and held(llm) == 0
    with pytest.raises(RequestError, match="the prefix was released") as error:
        llm.generate([[5]], GREEDY, prefix=prefix)
    assert error.value.param == "prefix"
    llm.prefill(DOCUMENT)  # dropped: nothing is left that could release it
    gc.collect()
    assert held(llm) == 0


def test_a_handle_of_another_llm_is_refused(llm: LLM, other: LLM) -> None:
    with other.prefill([5, 6]) as prefix:
        with pytest.raises(RequestError, match="another LLM") as error:
            llm.generate([[5]], GREEDY, prefix=prefix)
        assert error.value.param == "prefix"


def test_several_answers_continue_a_prefix_and_read_it_once(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True, seed=3, frequency_penalty=0.5)
    several = dataclasses.replace(params, n=2)
    with llm.prefill(DOCUMENT) as prefix:
        [one, other] = (
            llm.generate(QUESTIONS[0], params.for_answer(i), prefix=prefix)[0] for i in (0, 1)
        )
        with pytest.raises(RequestError, match="hold 1 of the engine's 3 sequences"):
            llm.generate(QUESTIONS[0], dataclasses.replace(params, n=3), prefix=prefix)
        before = llm.stats()["prompt_tokens"]
        [both] = llm.generate(QUESTIONS[0], several, prefix=prefix)
        assert llm.stats()["prompt_tokens"] - before == len(QUESTIONS[0])
    found = [answer.token_ids for answer in both.outputs]
    assert found == [one.outputs[0].token_ids, other.outputs[0].token_ids]
    assert found[0] != found[1]
    [whole] = llm.generate(DOCUMENT + QUESTIONS[0], several)
    assert [answer.token_ids for answer in whole.outputs] == found
    assert held(llm) == 0


def test_prefixes_in_every_slot_are_an_error_and_no_hang(llm: LLM) -> None:
    prefixes = [llm.prefill([5, 6, n]) for n in range(3)]
    for prefix in (None, prefixes[0]):
        with pytest.raises(RequestError, match="hold 3 of the engine's 3 sequences") as error:
            llm.generate([[5]], GREEDY, prefix=prefix)
        assert error.value.code == "pinned_prefixes_hold_cache"
    prefixes.pop().release()
    assert len(llm.generate(QUESTIONS, GREEDY, prefix=prefixes[0])) == 4
    for prefix in prefixes:
        prefix.release()
    assert held(llm) == 0


def test_one_sequence_leaves_room_for_as_many_prefixes_as_a_request_marks(model: Path) -> None:
    with LLM(str(model), threads=1, attention="full", max_model_len=MAX_LEN, max_num_seqs=1) as llm:
        prefixes = [llm.prefill(DOCUMENT[: 20 * n]) for n in range(1, 5)]
        for prefix in (*prefixes, None):
            assert llm.generate(QUESTIONS[0], GREEDY, prefix=prefix)
        what = "hold 4 of the 4 prefixes that the engine keeps pinned"
        with pytest.raises(RequestError, match=what):
            llm.prefill(DOCUMENT)


class FailingLLM(LLM):
    """One whose last rank raises in the middle of its first prompt, once."""

    start_ranks = partial(RankGroup.start, module="tests.engine.failing_rank")


@pytest.mark.long
def test_a_rank_that_raises_in_mid_prompt_is_an_error_and_comes_back(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAILED_ONCE", str(tmp_path / "failed"))
    with FailingLLM(
        str(model), world_size=3, threads=1, attention="streaming", max_model_len=MAX_LEN,
        page_size=8, chunked_prefill_size=40, window_min=24,
    ) as llm:  # fmt: skip
        with pytest.raises(EngineError, match="the engine failed"):
            llm.generate(DOCUMENT, GREEDY)
        assert (tmp_path / "failed").exists()
        [answer] = llm.generate(DOCUMENT, GREEDY)
        assert len(answer.outputs[0].token_ids) == 8
        assert held(llm) == 0
    assert "EngineError: a rank fails in the middle of a prompt" in capfd.readouterr().err


@pytest.mark.long
def test_a_prefix_is_lost_with_its_ranks_and_closing_releases_it(
    start: Callable[[int], LLM],
) -> None:
    llm = start(2)
    prefix = llm.prefill(DOCUMENT)
    [before] = llm.generate(QUESTIONS[0], GREEDY, prefix=prefix)
    os.kill(llm._engine.pids[1], signal.SIGKILL)
    with pytest.raises(EngineError):
        llm.generate([[5]] * 50, GREEDY, prefix=prefix)
    with pytest.raises(EngineError, match="lost with its engine; prefill it again"):
        llm.generate([[5]], GREEDY, prefix=prefix)
    prefix.release()
    again = llm.prefill(DOCUMENT)
    assert isinstance(again, Prefix)
    [after] = llm.generate(QUESTIONS[0], GREEDY, prefix=again)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    pids = llm._engine.pids
    llm.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    again.release()
