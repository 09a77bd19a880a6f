"""DuoAttention's way to find retrieval heads: gates that are trained."""
