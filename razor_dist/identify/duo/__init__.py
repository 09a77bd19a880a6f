"""DuoAttention's trained gates, which find retrieval heads."""
