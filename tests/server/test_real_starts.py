"""The real embedded model started in other ways: by torchrun, and by the offline API."""

from __future__ import annotations

import httpx
import pytest

from razor_dist import LLM, SamplingParams
from tests.preloaded import executed
from tests.server.hosts import TORCHRUN
from tests.server.process import ServerProcess

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.mark.long
def test_torchrun_serves() -> None:
    with executed():
        started = ServerProcess(TORCHRUN, "launch/serve.py", "--world-size", "2")
    with started as server:
        body = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 16}
        url = server.url(timeout=180)
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        assert "Paris" in answer["choices"][0]["message"]["content"]


@pytest.mark.long
def test_the_offline_api_answers_on_two_ranks() -> None:
    with LLM("smollm2", world_size=2, max_model_len=1024) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=1)
        [chat] = llm.chat(QUESTION, params)
        assert "Paris" in chat.outputs[0].text
        assert chat.outputs[0].finish_reason == "stop"
        assert chat.outputs[0].logprobs is not None
        assert len(chat.outputs[0].logprobs) == len(chat.outputs[0].token_ids)
        again = llm.generate({"prompt_token_ids": chat.prompt_token_ids}, params)
        assert again[0].outputs[0].token_ids == chat.outputs[0].token_ids
