"""Messages between the processes: token ids as bytes, and parameters."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from razor_dist.config.errors import RequestError
from razor_dist.protocol.messages import (
    HEADER_SIZE,
    Add,
    Failed,
    Token,
    as_tokens,
    decode_to_engine,
    decode_to_frontend,
    encode,
    pack,
    unpack,
)
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.protocol.structured_outputs import StructuredOutputsParams

VOCABULARY = 151_552


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
    frame = encode(Add("a", unpack(pack([1])), params))
    message = decode_to_engine(frame[HEADER_SIZE:])
    assert isinstance(message, Add)
    found = message.params
    assert found == params and isinstance(found.structured_outputs, StructuredOutputsParams)
    assert json.loads(str(found.structured_outputs.json)) == schema


def test_messages_survive_the_way_between_processes() -> None:
    for message in (
        Token("a/1", 7, -0.5, [(7, -0.5), (9, -1.0)], "stop", [(3, 0.25)]),
        Token("a", 7),
        Failed.of("", RequestError("no room", param="prompt", code="context_length_exceeded")),
    ):
        assert decode_to_frontend(encode(message)[HEADER_SIZE:]) == message
    with pytest.raises(msgspec.ValidationError, match="Invalid value 'add'"):
        decode_to_frontend(encode(Add("a", unpack(b""), SamplingParams()))[HEADER_SIZE:])
