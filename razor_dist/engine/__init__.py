"""The ranks: scheduler, prefill policy, model runner, sampler, recorded decode steps."""
