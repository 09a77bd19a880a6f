"""Structured outputs are compiled by the model's vocabulary, or refused with the field's name."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLTokenizer
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import PreTrainedTokenizerFast

from razor_dist.config.errors import RequestError
from razor_dist.models.registry import resolve_model
from razor_dist.models.tokenizer import load_tokenizer
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.protocol.structured_outputs import (
    GrammarCompiler,
    GrammarText,
    StructuredOutputsParams,
)
from razor_dist.protocol.vocabulary import load_vocabulary, serialized, vocabulary_of
from tests.engine.cores import make_core, run
from tests.tiny_models import Tiny
from tests.tokenizer import smollm2_tokenizer


def after(given: str, asked: list[dict[str, Any]]) -> list[list[str]]:
    """Return, for each structured output, the texts of the tokens that may follow ``given``."""
    tokenizer = smollm2_tokenizer()
    compiler = GrammarCompiler(lambda: tokenizer, len(tokenizer), [2])
    found = []
    for value in asked:
        params = StructuredOutputsParams(**value)
        params.check()
        grammar = compiler.compile(params).result().fresh()
        for token in tokenizer.encode(given):
            grammar.accept(token)
        mask = torch.zeros(-(-len(tokenizer) // 32), dtype=torch.int32)
        grammar.fill(mask)
        assert grammar.error is None
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
        found.append(tokenizer.batch_decode([[token] for token in bits.nonzero()[0].tolist()]))
    return found


@pytest.mark.long
def test_a_text_that_can_only_go_on_for_ever_holds_nobody_up() -> None:
    repeated = {"a": "a", " ": " ", "0": "0", "(ab)": "ab"}
    grammars = [f"start: /{unit}+/ /{unit}+/" for unit in repeated]
    grammars += ["start: b b\nb: /a{3,}/", 'root ::= "a" b b\nb ::= [a]+']
    forced = '%llguidance {"no_forcing": false}'
    grammars += [f"{forced}\n{grammars[0]}", f"{grammars[0]}\n{forced}"]
    schema = {"type": "object", "properties": {"a": {}}, "required": ["a"]}
    closed: dict[str, Any] = schema | {"additionalProperties": False}
    jsons: list[dict[str, Any]] = [
        {"json": closed, "whitespace_pattern": '"+'},
        {"json": closed | {"x-guidance": {"key_separator": '"+'}}, "disable_any_whitespace": True},
    ]
    # A process that hangs can be ended.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        begun = pool.apply_async(after, ("", [{"grammar": text} for text in grammars]))
        later = pool.apply_async(after, ("b", [{"grammar": "start: /[bc]/ /a+/ /a+/"}]))
        quoted = pool.apply_async(after, ('{"a"', jsons))
        masks = begun.get(120)
        units = [*repeated.values(), "a", "a", "a", "a"]
        for unit, texts in zip(units, masks, strict=True):
            assert unit[0] in texts
            assert all((unit * len(text)).startswith(text) for text in texts)
        assert set(masks[0]) == {"a", "aa", "aaaa"}
        assert set(later.get(120)[0]) == {"a", "aa", "aaaa"}
        for texts in quoted.get(120):
            assert '"' in texts and "a" not in texts


@pytest.mark.long
def test_a_mask_imports_nothing_large() -> None:
    """It is computed between two steps, where the import of torch's compiler took seconds."""
    code = """
import sys, torch
from llguidance import LLMatcher, LLTokenizer
from razor_dist.protocol.structured_outputs import Grammar
matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_regex("a"))
mask, before = torch.zeros(9, dtype=torch.int32), set(sys.modules)
Grammar(matcher, []).fill(mask)
print(mask[97 // 32].item() == 1 << 97 % 32)
print(*{name.partition(".")[0] for name in set(sys.modules) - before})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    allowed, *imported = done.stdout.split()
    assert allowed == "True" and set(imported) <= {"llguidance", "numpy"}


def test_a_model_without_a_tokenizer_has_none(tiny: Tiny) -> None:
    core = make_core(tiny("llama"))
    core.add("a", [5], SamplingParams(structured_outputs={"choice": ["a"]}))
    assert "the model has no tokenizer" in run(core)["a"][-1].message


WIDE = {"type": "object", "properties": {f"p{i}": {} for i in range(900)}}


@cache
def vocabulary() -> LLTokenizer:
    return load_vocabulary(vocabulary_of(serialized(smollm2_tokenizer()), 49152, [2]))


def test_true_is_the_schema_of_any_json() -> None:
    for value in (True, "true"):
        found = StructuredOutputsParams(json=value).llguidance()
        assert found == StructuredOutputsParams(json={}).llguidance()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar must be given, got none"),
        ({"regex": "a", "choice": ["a"]}, "got regex and choice"),
        ({"json_object": False}, "got none"),
        ({"regex": 5}, "regex must be a string"),
        ({"choice": []}, "choice must be a list of strings that is not empty"),
        ({"choice": "ab"}, "choice must be a list of strings"),
        ({"json": [1]}, "json must be a JSON schema"),
        ({"json": False}, "a schema that nothing matches"),
        ({"json": " false"}, "a schema that nothing matches"),
        (
            {"json": {}, "whitespace_pattern": "", "disable_any_whitespace": True},
            "whitespace_pattern excludes disable_any_whitespace",
        ),
        ({"json_object": 1}, "json_object must be true or false"),
        ({"structural_tag": "x"}, "has no field 'structural_tag'; known are: json, json_obj"),
        ("regex", "must be an object, got 'regex'"),
        ({"regex": "(a"}, "regex cannot be used: .*unclosed group"),
        ({"json": {"type": "foo"}}, "json cannot be used: Invalid type: foo"),
        ({"json": "{"}, "json cannot be used"),
        ({"json": {"type": "array", "uniqueItems": True}}, "Unimplemented keys: ..uniqueItems"),
        ({"json": {"$ref": "http://127.0.0.1/x"}}, "retrieving it failed"),
        ({"grammar": "root ::= ((("}, "grammar cannot be used: .*Expected"),
        ({"choice": ["x" * 300_000]}, "choice is longer than 262144 characters"),
        ({"grammar": "start: foo"}, 'unknown name: "foo"'),
        ({"json": WIDE}, "json cannot be used: Parser Error: Current row has .* items"),
        ({"grammar": f"start: {'a? ' * 9999}\na: /x/"}, "grammar cannot be used"),
    ],
)
def test_what_cannot_be_matched_is_refused(value: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        params = SamplingParams(structured_outputs=value)
        assert isinstance(params.structured_outputs, StructuredOutputsParams)
        params.structured_outputs.check()
        params.structured_outputs.compiled(vocabulary())
    assert refused.value.param == "structured_outputs"


def test_a_tokenizer_with_parts_in_python_is_refused() -> None:
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(object())
    with pytest.raises(RequestError, match=r"cannot be used: .*Custom PreTokenizer") as no:
        GrammarCompiler(lambda: tokenizer, 49152, [2]).compile(GrammarText("start: /a/")).result()
    assert no.value.param == "structured_outputs"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="needs the package llguidance on the server"):
        StructuredOutputsParams(choice=["a"]).compiled(vocabulary())


def test_large_schemas_and_choices_are_taken() -> None:
    kinds = ["string", "integer", "number", "boolean"]
    properties = {f"property_{i}": {"type": kinds[i % 4]} for i in range(500)}
    words = [f"{i:x} of many words" for i in range(8000)]
    bounded = {f"p{i}": {"type": "number", "maximum": 99999.125 * i} for i in range(200)}
    for value in (
        {"json": {"type": "object", "properties": properties}},
        {"json": {"type": "object", "properties": properties, "required": list(properties)}},
        {"json": {"type": "object", "properties": {"a": {"enum": words}}}},
        {"json": {"type": "object", "properties": bounded}},
        {"choice": words},
        {"regex": r"(\w+ ){1,300}\w+\."},
    ):
        structured = StructuredOutputsParams(**value)
        structured.check()
        assert structured.compiled(vocabulary()).llguidance()
