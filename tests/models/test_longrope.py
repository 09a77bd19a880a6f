"""LongRoPE: one set of frequencies for all of a sequence, and the one that stock would use.

The tiny model's short frequencies hold for 96 tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from razor_dist.cache.policy import StreamingPolicy
from razor_dist.kernels.query import Query
from razor_dist.models.bridge import run_body
from razor_dist.models.longrope import LONG, position_mark
from razor_dist.parallel.comm import Communicator
from razor_dist.protocol.messages import Token
from razor_dist.protocol.sampling_params import SamplingParams
from tests.cases import Case, all_full, model_and_shape
from tests.engine.cores import make_core, prompt, run, tokens
from tests.engine.recorded import Both, case_of
from tests.logits import assert_any_cut, stock_logits, tokens_of
from tests.ranks import Ranks
from tests.tiny_models import Tiny

LIMIT = 96


@pytest.fixture(scope="module")
def phi3(tiny: Tiny) -> Path:
    return tiny("phi3")


def full(path: Path, ids: tuple[int, ...], n: int) -> Case:
    return Case(str(path), all_full(path), StreamingPolicy(), ids[:n], ids[n:], 40)


@pytest.mark.parametrize("n", [LIMIT - 1, LIMIT, LIMIT + 1, LIMIT + 40])
def test_a_prompt_on_either_side_of_the_limit(n: int, ranks: Ranks, phi3: Path) -> None:
    ids = tokens_of(n, seed=3)
    assert_any_cut(ranks, full(phi3, ids, n), stock_logits(phi3, ids)[-1:], (1, 4))


def test_the_two_sets_differ(phi3: Path) -> None:
    # The same 96 tokens, alone and at the beginning of 97.
    ids = tokens_of(LIMIT + 1, seed=3)
    short = stock_logits(phi3, ids[:-1])[-1]
    long = stock_logits(phi3, ids)[-2]
    assert (short - long).abs().max() / short.abs().max() > 0.05


def test_an_answer_that_crosses_the_limit_is_long_from_its_first_token(
    ranks: Ranks, phi3: Path
) -> None:
    n, k = LIMIT - 6, 12
    ids = tokens_of(n + k, seed=4)
    want = stock_logits(phi3, ids)[n - 1 :]
    for world, cut in ((1, 8192), (2, 17), (4, 40)):
        assert_any_cut(ranks, full(phi3, ids, n), want, (world,), (cut,))


@pytest.mark.parametrize("n", [LIMIT - 30, LIMIT + 30])
def test_requests_generate_what_transformers_generates(n: int, phi3: Path) -> None:
    core, ids = make_core(phi3, attention="full"), prompt(n, seed=n)
    core.add("r", ids, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    stock = AutoModelForCausalLM.from_pretrained(phi3, attn_implementation="sdpa")
    stock.generation_config.eos_token_id = None  # so that it generates as long as it is told
    greedy = {"max_new_tokens": 16, "do_sample": False, "use_cache": True}
    assert tokens(run(core)["r"]) == stock.generate(torch.tensor([ids]), **greedy)[0, n:].tolist()


def test_max_tokens_decides_where_the_prompt_does_not(phi3: Path) -> None:
    # 60 tokens and an answer of 37: its last token is sampled, not read, so 96 are read at most.
    ids = prompt(60)
    for max_tokens, marked in ((37, 0), (38, LONG), (None, LONG)):
        core = make_core(phi3, attention="full")
        core.add("r", ids, SamplingParams(temperature=0.0, max_tokens=max_tokens))
        message = core.step()[-1]
        while not isinstance(message, Token):
            message = core.step()[-1]
        [sequence] = core.runner.sequences.values()
        assert sequence.position_mark == marked
        # What stock says of these tokens alone, or at the beginning of a long text.
        rest = prompt(40, seed=9) if marked else []
        assert message.token == stock_logits(phi3, ids + rest)[len(ids) - 1].argmax()


def test_short_and_long_requests_share_decode_steps(phi3: Path) -> None:
    answers = {"short": (50, 8), "long": (130, 8), "crossing": (92, 8)}
    alone = {}
    for name, (n, m) in answers.items():
        core = make_core(phi3, attention="full")
        core.add(name, prompt(n, n), SamplingParams(temperature=0.0, max_tokens=m, ignore_eos=True))
        alone[name] = tokens(run(core)[name])
    core = make_core(phi3, attention="full", max_num_seqs=3)
    for name, (n, m) in answers.items():
        core.add(name, prompt(n, n), SamplingParams(temperature=0.0, max_tokens=m, ignore_eos=True))
    together = run(core)
    assert {name: tokens(together[name]) for name in answers} == alone


def test_a_kept_prompt_is_read_for_what_may_continue_it(phi3: Path) -> None:
    document, question = prompt(50, 1), prompt(7, 2)
    core = make_core(phi3, attention="full", max_num_seqs=2)
    core.add("document", document, SamplingParams(), pin=True)
    run(core)
    core.add("q", question, SamplingParams(temperature=0.0, max_tokens=1), prefix_id="document")
    beyond = prompt(60, 5)
    want = stock_logits(phi3, document + question + beyond)[len(document + question) - 1].argmax()
    assert tokens(run(core)["q"]) == [want]


def test_a_recorded_step_takes_the_mark_from_its_inputs(phi3: Path) -> None:
    # With a recording made for short frequencies, also where long ones are wanted.
    both = Both(Communicator(None), case_of(phi3, retrieval=((True, False),) * 3))
    both.open(0, 20)
    for _ in range(4):
        both.decode(0)
    for runner in (both.eager, both.graphs):
        assert runner.sequences[0].position_mark == 0
        runner.sequences[0].position_mark = LONG
    for _ in range(4):
        both.decode(0)
    assert max(both.errors) <= 1e-5
    assert both.tape.recorded == 1 and both.tape.replayed == 7


class Keys:
    """An attention context that notes the first layer's keys."""

    def attend(self, layer: int, query: Query, k: Tensor, v: Tensor) -> Tensor:
        if layer == 0:
            self.first = k
        return torch.zeros_like(query.q).flatten(0, 1).transpose(0, 1)


def test_the_probe_chooses_by_the_prompts_length(phi3: Path) -> None:
    model, _ = model_and_shape(str(phi3))
    ids = torch.tensor(prompt(LIMIT + 1))
    seen = []
    for n in (LIMIT, LIMIT + 1):
        context = Keys()
        run_body(model, ids[:n], context)
        seen.append(context.first[:, 1:LIMIT])
    assert (seen[0] - seen[1]).abs().max() > 0.1
    body = model.base_model
    assert position_mark(body, LIMIT) == 0 and position_mark(body, LIMIT + 1) == LONG


def test_models_without_it_are_left_alone(tiny: Tiny) -> None:
    model, _ = model_and_shape(str(tiny("llama3")))
    assert position_mark(model.base_model, 10**9) == 0
