"""Head maps: which heads keep the whole context, and how a model's layers are split by it."""
