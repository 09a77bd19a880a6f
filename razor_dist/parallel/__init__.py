"""Ranks: communicators, shards of a sequence, ring, halo, sharded weights."""
