"""What each model family needs beyond transformers: loading, positions, adapters."""
