"""Attention of a step: transformers' bridge calls it for each layer."""
