"""Attention over tokens that each row chooses by itself: validates, and calls the implementation.

Source: DeepSeek-V3.2, 2.1 (lightning indexer and token selection).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.chosen_tokens.implementation import CHOSEN_TOKENS, IndexRows, TokenPlaces
from vllm_gaudi_ucm.ops.registry import AUTO
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts


def most_seen(parts: AttentionParts, block_size: int) -> int:
    """Returns a bound, known on the host, of the tokens that a row sees."""
    found = 0
    if parts.causal is not None:
        found += max((one.query_hi - one.key_lo for one in parts.causal.slices), default=0)
    if parts.shared is not None:
        most = parts.shared.most_of_span
        found += (len(parts.shared.blocks) if most is None else most) * block_size
    if parts.unique is not None and parts.unique.most_of_row is not None:
        found += parts.unique.most_of_row * block_size
    return found


def choose_tokens(
    index: IndexRows, keys: Tensor, places: TokenPlaces, count: int, *, implementation: str = AUTO
) -> Tensor:
    """Chooses for each row the `count` seen tokens of the highest scores, `sum_h weight_h * relu(query_h . key)`. If a
    row sees fewer tokens, it chooses all of them. Of equal scores the token that comes first is chosen.

    index: rows of the step. keys: [slots, dim], the cache, which has the new keys already; dtype as the query.
    places: what the rows see. Tokens come in the order of shared blocks, unique blocks, new tokens, which is the order
        of positions.

    Returns int64 [rows, min(count, most_seen)], slots in the order of tokens; the rest is -1. Scores are float32,
    or float64 for float64.
    Raises ValueError if shapes do not match (not while compiling).
    """
    if not torch.compiler.is_compiling():
        _validate(index, keys, places, count)
    chosen = CHOSEN_TOKENS.choose(implementation, keys.device.type)
    return chosen.choose(index, keys, places, min(count, most_seen(places.parts, places.block_size)))


def attend_tokens(
    query: Tensor, cache: Tensor, slots: Tensor, scale: float, value_size: int, *, implementation: str = AUTO
) -> Tensor:
    """Returns [rows, heads, value_size]: softmax of `scale * query . key` over the chosen tokens, times their values. A
    row without tokens is zeros.

    query: [rows, heads, dim]. cache: [slots, dim]; the first `value_size` elements of a key are its value.
    slots: [rows, chosen], -1 for none.
    Raises ValueError if shapes do not match (not while compiling).
    """
    if not torch.compiler.is_compiling() and (query.shape[0], query.shape[2]) != (slots.shape[0], cache.shape[1]):
        raise ValueError(
            f"attend_tokens: query {tuple(query.shape)}, cache {tuple(cache.shape)}, slots {tuple(slots.shape)}; "
            "expected [rows, heads, dim], [slots, dim], [rows, chosen]"
        )
    chosen = CHOSEN_TOKENS.choose(implementation, cache.device.type)
    return chosen.attend(query, cache, slots, scale, value_size)


def _validate(index: IndexRows, keys: Tensor, places: TokenPlaces, count: int) -> None:
    rows, heads, dim = index.query.shape
    wanted = {
        "key": (index.key, (rows, dim)),
        "weights": (index.weights, (rows, heads)),
        "slots": (places.slots, (rows,)),
        "keys": (keys, (len(keys), dim)),
    }
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"choose_tokens: {name} is {tuple(tensor.shape)}, expected {shape}")
    if count < 1:
        raise ValueError(f"choose_tokens: count is {count}, expected at least 1")
    unique = places.parts.unique
    if unique is not None and (unique.places is None or unique.most_of_row is None):
        raise ValueError("choose_tokens: found a unique part without places, expected places and most_of_row")
