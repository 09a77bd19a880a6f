"""The ways to find retrieval heads: each scores a model's heads and makes a head map."""
