"""Messages between the processes: token ids as bytes, and parameters."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from razor_dist.config.errors import EngineError, RequestError
from razor_dist.protocol.messages import (
    HEADER_SIZE,
    Add,
    Failed,
    Token,
    answer_ids,
    as_tokens,
    decode_to_frontend,
    encode,
    pack,
    read_for_engine,
    unpack,
)
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.protocol.structured_outputs import StructuredOutputsParams

VOCABULARY = 151_552
ONE = unpack(pack([1]))


def sent(message: object) -> bytes:
    return encode(message)[HEADER_SIZE:]


@given(st.lists(st.integers(0, VOCABULARY - 1)))
def test_ids_survive_the_way_between_processes(ids: list[int]) -> None:
    tokens = as_tokens(ids, VOCABULARY)
    assert tokens.dtype == np.int32
    data = pack(tokens)
    assert data == pack(ids)
    assert len(data) == 4 * len(ids)
    assert unpack(data).tolist() == ids


@given(st.lists(st.integers(-(2**70), 2**70), min_size=1))
def test_the_first_id_outside_the_vocabulary_is_named(ids: list[int]) -> None:
    wrong = next((i for i in ids if not 0 <= i < VOCABULARY), None)
    if wrong is None:
        assert as_tokens(ids, VOCABULARY).tolist() == ids
        return
    with pytest.raises(RequestError) as error:
        as_tokens(ids, VOCABULARY, "stop_token_ids")
    assert str(error.value) == f"token id {wrong} in stop_token_ids is not in [0, {VOCABULARY})"
    assert error.value.param == "stop_token_ids"


def test_a_schema_reaches_the_ranks_whatever_numbers_it_holds() -> None:
    schema = {"type": "integer", "maximum": 10**30, "default": 2**64, "minimum": -0.5}
    params = SamplingParams(structured_outputs={"json": schema}, seed=3, logit_bias={7: 1.0})
    [message] = read_for_engine(sent(Add("a", vars(params), ONE)))
    assert isinstance(message, Add)
    found = message.checked_params()
    assert found == params and isinstance(found.structured_outputs, StructuredOutputsParams)
    assert json.loads(str(found.structured_outputs.json)) == schema


def test_messages_survive_the_way_between_processes() -> None:
    for message in (
        Token("a/1", 7, -0.5, [(7, -0.5), (9, -1.0)], "stop", [(3, 0.25)]),
        Token("a", 7),
        Failed.of("", RequestError("no room", param="prompt", code="context_length_exceeded")),
    ):
        assert decode_to_frontend(sent(message)) == message
    with pytest.raises(msgspec.ValidationError, match="Invalid value 'add'"):
        decode_to_frontend(sent(Add("a", {}, ONE)))


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"top_q": 0.5}, "top_q"),
        ({"temperature": "warm"}, "temperature"),
        ({"max_tokens": 3, "min_tokens": 4}, "max_tokens"),
        ({"repetition_detection": {"most": 3}}, "repetition_detection"),
        ({"repetition_detection": {"min_count": 1}}, "repetition_detection.min_count"),
        ({"structured_outputs": {"yaml": "a"}}, "structured_outputs"),
    ],
)
def test_rank_0_names_a_parameter_that_it_does_not_take(params: dict[str, Any], named: str) -> None:
    [add] = read_for_engine(sent(Add("a", params, ONE)))
    assert isinstance(add, Add)
    with pytest.raises(RequestError, match=named) as error:
        add.checked_params()
    assert error.value.param == named.partition(".")[0]


@pytest.mark.parametrize("n", [1, 3, "three"])
def test_a_malformed_request_is_refused_and_ends_no_rank(n: Any) -> None:
    add = msgspec.msgpack.decode(sent(Add("a", {"n": n}, ONE)))
    for wrong, named in ({"budget": 5}, "`budget`"), ({"prompt": b"abc"}, "prompt"):
        refused = [one for one in read_for_engine(sent(add | wrong)) if isinstance(one, Failed)]
        assert [one.id for one in refused] == answer_ids("a", n if n == 3 else 1)
        assert all(named in one.message for one in refused)
        assert isinstance(refused[0].exception, EngineError)


@pytest.mark.parametrize("message", [{"t": "pause"}, {"t": "add", "id": "a"}, {"t": "abort"}, 5])
def test_what_rank_0_cannot_refuse_ends_it_with_the_reason(message: object) -> None:
    with pytest.raises(EngineError, match=r"cannot read a message of the frontend, .*: \w+"):
        read_for_engine(sent(message))
