"""Settings that defeat themselves, a sentence each: for `razor-dist plan`, and as engines start."""

from __future__ import annotations

from razor_dist.cache.policy import StreamingPolicy
from razor_dist.config.schema import EngineConfig
from razor_dist.config.sizes import tokens
from razor_dist.config.sources import build_config
from razor_dist.heads.head_map import HeadMap
from razor_dist.models.shape import ModelShape

# A head map that keeps more than this of the KV heads saves next to nothing.
_NEARLY_ALL = 0.85
# Windows up to this, in tokens, are taken as they are: the shipped settings' for a million tokens.
_LONG_WINDOW = 8192
# Streaming heads are meant to be the small part of a long prompt's attention.
_MUCH_OF_ATTENTION = 0.2
_PARTS = 64  # queries at which windows are looked at, to sum them over a prompt


def about_heads(kv_fraction: float, selected_fraction: float | None) -> list[str]:
    """Warn of a head map that keeps nearly every group; fractions are those of `HeadMap`."""
    if kv_fraction < _NEARLY_ALL:
        return []
    said = f"{kv_fraction:.0%} of the KV heads are retrieval heads: next to nothing is saved"
    if selected_fraction is not None and selected_fraction < kv_fraction:
        said += (
            f"; {selected_fraction:.0%} of the query heads were chosen, and promoted their groups"
        )
    return [said]


def about_window(policy: StreamingPolicy, context: int, world_size: int) -> list[str]:
    """Warn of a window that takes as much of a rank as a shard of the whole context would."""
    window, shard = policy.window(context - 1), -(-context // world_size)
    if world_size == 1 or window < shard:
        return []
    if window == policy.window_max:
        remedy = "lower window_max"
    else:
        remedy = "lower window_min" if window == policy.window_min else "set window_max"
    return [
        f"a streaming head's window of {tokens(window)} tokens, whole on every rank, is at least "
        f"as long as a shard of {tokens(shard)}: {remedy}"
    ]


def about_streaming_work(policy: StreamingPolicy, kv_fraction: float, context: int) -> list[str]:
    """Warn of windows that make a prompt of ``context`` tokens much longer to read."""
    window = policy.window(context - 1)
    if window <= _LONG_WINDOW:
        return []
    seen = [policy.window(context * part // _PARTS) for part in range(_PARTS)]
    streaming = (1 - kv_fraction) * sum(seen) / _PARTS
    share = streaming / (streaming + kv_fraction * context / 2)
    if share <= _MUCH_OF_ATTENTION:
        return []
    return [
        f"streaming heads keep windows of {tokens(window)} tokens, which are {share:.0%} of the "
        f"attention of a prompt of {tokens(context)}: set window_max, for example to {_LONG_WINDOW}"
    ]


def about_given_windows(config: EngineConfig) -> list[str]:
    """Warn of settings of windows that do nothing: the head map has windows of its own."""
    usual = build_config(EngineConfig, model=config.model)  # what the user has not set
    names = "window_min", "window_ratio", "window_max"
    given = [name for name in names if getattr(config, name) != getattr(usual, name)]
    if not given:
        return []
    return [
        f"{', '.join(given)}: without effect, for each streaming head of the head map has a window "
        "of its own; make a map with shorter ones, such as by identify with a smaller --budget"
    ]


def about_settings(
    config: EngineConfig,
    shape: ModelShape,
    head_map: HeadMap,
    max_model_len: int,
    *,
    shared: bool = False,
) -> list[str]:
    """All of the above, for an engine with contexts of up to ``max_model_len`` tokens.

    Before it, a context beyond the positions that an ALiBi model was trained with. With ``shared``,
    its ranks share the streaming heads, so that no window is on every rank.
    """
    said = []
    if max_model_len > shape.max_positions:
        said.append(
            f"the context is {tokens(max_model_len)} tokens, but the model was trained with "
            f"{tokens(shape.max_positions)} positions: its bias by distance goes on beyond, and "
            "what it makes of such texts is not known"
        )
    if config.attention == "full":
        return said
    said += about_heads(
        head_map.kv_fraction, head_map.selected_fraction if head_map.selected else None
    )
    if head_map.windows is not None:
        return said + about_given_windows(config)
    if head_map.kv_fraction < 1:
        policy = StreamingPolicy.of(config)
        of_memory = about_window(policy, max_model_len, 1 if shared else config.world_size)
        said += of_memory or about_streaming_work(policy, head_map.kv_fraction, max_model_len)
    return said
