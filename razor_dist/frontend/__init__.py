"""The process beside the ranks: client, launcher, prompts, detokenizer, passages."""
