"""The parts of model families beyond transformers: loading, positions, adapters."""
