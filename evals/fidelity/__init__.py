"""Fidelity: the KL from full attention's next-token distribution to a method's, on any text."""
