"""Every press on one text, in one process, for `test_presses`; prints what came of it as JSON.

``python -m tests.evals.baselines.all_presses CONFIGS``, a JSON list of lists: method, settings of
the engine, budget. A process of its own because kvpress changes transformers' attention.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from razor_dist.evals.baselines.model import Budget, PressedModel
from razor_dist.evals.baselines.presses import BaselineConfig
from tests.evals.baselines.text import MORE, NEW_TOKENS, TEXT


def main() -> None:
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    for method, engine, kv_budget in json.loads(sys.argv[1]):
        config = BaselineConfig.of(method, engine, kv_budget)
        model = PressedModel(config)
        model.read(TEXT)
        [nbytes] = model.stats()["kv_bytes_per_rank"]
        layers = [layer.keys.shape[2] for layer in model._cache.layers]
        answers = [model.answer(MORE, NEW_TOKENS) for _ in range(2)]
        budget = Budget(config, "cpu").nbytes(len(TEXT))
        found.append({"bytes": nbytes, "budget": budget, "layers": layers, "answers": answers})
    stock = AutoModelForCausalLM.from_pretrained(engine["model"], attn_implementation="eager")
    prompt = torch.tensor([TEXT + MORE])
    generated = stock.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    print(json.dumps({"presses": found, "stock": generated[0, prompt.shape[1] :].tolist()}))


if __name__ == "__main__":
    main()
