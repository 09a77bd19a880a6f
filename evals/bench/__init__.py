"""Benches: speed, memory and cost, measured side by side."""
