"""Random JSON schemas of moderate depth, with bounds by which every text that matches ends.

``python -m tests.schemas [COUNT]`` measures what their masks cost, with the embedded model's
vocabulary and random logits in the place of a model.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import jsonschema
import torch

from razor_dist.engine.logits import LogitsProcessors
from razor_dist.engine.sampler import Adjusted, Draw, sample
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.protocol.structured_outputs import GrammarCompiler, StructuredOutputsParams
from tests.tokenizer import smollm2_tokenizer

Schema = dict[str, Any]
VOCABULARY, EOS = 49152, 2
_NAMES = ("id", "name", "größe", "a b", "$ref", "items", "nested_value", 'say "hi"', "日本")
_PATTERNS = ("^[a-z]{2,5}$", r"^\d{3}-\d{4}$", "^(yes|no|maybe)$", "^[A-Z][a-z]{0,9}[!?]$")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4")


def random_schema(rng: random.Random, depth: int = 4) -> Schema:
    """Return a schema of an object."""
    return _object(rng, depth)


def _any(rng: random.Random, depth: int) -> Schema:
    leaves = [_string, _integer, _number, _choice, _constant]
    kind = rng.choice(leaves if depth <= 0 else [_object, _object, _array, _any_of, *leaves])
    return kind(rng, depth - 1)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_NAMES, rng.randint(1, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
    }
    schema["additionalProperties"] = False
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    if rng.random() < 0.2:
        prefix = [_any(rng, depth - 1) for _ in range(2)]
        return {"type": "array", "prefixItems": prefix, "items": False, "minItems": 2}
    most = least + rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth), "minItems": least, "maxItems": most}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def _string(rng: random.Random, depth: int) -> Schema:
    match rng.randint(0, 3):
        case 0:
            return {"type": "string", "pattern": rng.choice(_PATTERNS)}
        case 1:
            return {"type": "string", "format": rng.choice(_FORMATS)}
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 20)}


def _integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-200, 200)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 10_000)}


def _number(rng: random.Random, depth: int) -> Schema:
    low = round(rng.uniform(-9, 9), 2)
    return {"type": "number", "minimum": low, "exclusiveMaximum": low + 2.5}


def _choice(rng: random.Random, depth: int) -> Schema:
    values: list[Any] = ["red", "grün", 7, -1.5, None, True, 'quo"te', "new\nline"]
    return {"enum": rng.sample(values, rng.randint(1, 4))}


def _constant(rng: random.Random, depth: int) -> Schema:
    return rng.choice([{"const": "fixed"}, {"const": 0}, {"type": "null"}, {"type": "boolean"}])


def validate(schema: Schema, text: str) -> None:
    jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


def compiler() -> GrammarCompiler:
    return GrammarCompiler(smollm2_tokenizer, VOCABULARY, [EOS])


def answers(
    schemas: Sequence[Schema], seed: int = 0, most: int = 2000
) -> tuple[list[str], list[float]]:
    """Return a random text for each schema, and the seconds of each step's masks per sequence."""
    generator = torch.Generator().manual_seed(seed)
    grammars = compiler()
    params = SamplingParams(seed=seed, temperature=1.0)
    processors = LogitsProcessors(VOCABULARY, torch.device("cpu"))
    for key, schema in enumerate(schemas):
        grammar = grammars.compile(StructuredOutputsParams(json=schema)).result()
        processors.add(key, params, [], grammar)
    tokens: list[list[int]] = [[] for _ in schemas]
    seconds: list[float] = []
    open_ = list(range(len(schemas)))
    while open_:
        logits = 4 * torch.randn(len(open_), VOCABULARY, generator=generator)
        begin = time.perf_counter()
        adjusted = Adjusted(range(len(open_)), processors.apply(open_, logits.clone()))
        seconds.append((time.perf_counter() - begin) / len(open_))
        own = [Draw(seed + key, len(tokens[key])) for key in open_]
        found = sample(logits, [params] * len(open_), own, adjusted)
        for key, one in zip(open_, found, strict=True):
            assert one is not None
            tokens[key].append(one.token)
        processors.accept({key: tokens[key][-1] for key in open_})
        for key in open_:
            grammar = processors.grammar(key)
            assert grammar is not None and grammar.error is None, schemas[key]
            assert len(tokens[key]) < most, schemas[key]
        open_ = [key for key in open_ if tokens[key][-1] != EOS]
    texts = [smollm2_tokenizer().decode(ids, skip_special_tokens=True) for ids in tokens]
    return texts, seconds


def main() -> None:
    torch.set_num_threads(1)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    rng = random.Random(0)
    schemas = [random_schema(rng) for _ in range(count)]
    slow: list[float] = []
    compiled = compiler()
    compiled.compile(StructuredOutputsParams(json_object=True)).result()  # loads the vocabulary
    for schema in schemas:
        begin = time.perf_counter()
        compiled.compile(StructuredOutputsParams(json=schema)).result()
        slow.append(time.perf_counter() - begin)
    seconds: list[float] = []
    valid = 0
    for at in range(0, count, 16):
        some = schemas[at : at + 16]
        texts, taken = answers(some, at)
        seconds += taken
        for schema, text in zip(some, texts, strict=True):
            validate(schema, text)
            valid += 1
    for name, values in (("compile a schema", slow), ("mask a token", seconds)):
        ordered = torch.tensor(sorted(values)) * 1e6
        median, tail, most = (ordered[int(q * (len(ordered) - 1))] for q in (0.5, 0.99, 1.0))
        print(f"{name}: median {median:.0f} us, 99 % {tail:.0f} us, most {most:.0f} us")
    print(f"{valid} of {count} answers valid")


if __name__ == "__main__":
    main()
