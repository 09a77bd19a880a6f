"""The choice of query heads whose attention weights give an answer's sources."""

from __future__ import annotations

from transformers import PretrainedConfig

from razor_dist.config.errors import HeadMapError
from razor_dist.config.schema import EngineConfig
from razor_dist.heads.head_map import HeadMap, head_map_of
from razor_dist.models.loader import model_fingerprint
from razor_dist.models.shape import ModelShape


def source_heads(
    config: EngineConfig, head_map: HeadMap, model: PretrainedConfig
) -> list[tuple[int, int]]:
    """The (layer, query head) pairs that give an engine's sources; empty if there is no head map.

    They are the ``config.source_heads`` strongest retrieval heads (`strongest_heads`). With full
    attention, the head map is the one that ``attention: razor`` would have.
    """
    if config.attention == "full":
        razor = config.model_copy(update={"attention": "razor"})
        try:
            head_map = head_map_of(razor, ModelShape.from_config(model), model_fingerprint(model))
        except HeadMapError:
            return []
    return strongest_heads(head_map, config.source_heads)


def strongest_heads(head_map: HeadMap, count: int) -> list[tuple[int, int]]:
    """The ``count`` query heads of retrieval heads with the largest scores, largest first.

    The score is induction if the map has it, else its first kind; a KV head's score counts for all
    query heads of its group. A map without scores gives all query heads that it selected for
    induction, or else all of its retrieval heads. Ties break by index.
    """
    group = head_map.group
    heads = [
        (layer, head)
        for layer, row in enumerate(head_map.retrieval)
        for head in range(head_map.query_heads)
        if row[head // group]
    ]
    by_query, by_kv = head_map.scores, head_map.kv_scores
    if by_query:
        table = by_query.get("induction") or next(iter(by_query.values()))
        return sorted(heads, key=lambda at: -table[at[0]][at[1]])[:count]
    if by_kv:
        table = next(iter(by_kv.values()))
        return sorted(heads, key=lambda at: -table[at[0]][at[1] // group])[:count]
    named = head_map.selected.get("induction", ())
    return [at for at in heads if at in named] or heads
