"""The offline API: `razor_dist.llm.llm.LLM` and its asynchronous form."""
