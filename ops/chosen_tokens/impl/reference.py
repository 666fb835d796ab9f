"""Choosing tokens and attention over them by definition, row after row."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.chosen_tokens.implementation import ChosenTokensImplementation, IndexRows, TokenPlaces


class ReferenceChosenTokens(ChosenTokensImplementation):
    """The reference. It reads the parts on the host."""

    capturable = False
    traceable = False
    priority = -1

    def choose(self, index: IndexRows, keys: Tensor, places: TokenPlaces, count: int) -> Tensor:
        wide = torch.float64 if keys.dtype == torch.float64 else torch.float32
        found = places.slots.new_full((len(places.slots), count), -1)
        for row in range(len(found)):
            seen = seen_slots(places, row)
            products = index.query[row].to(wide) @ keys[seen].to(wide).T
            scores = index.weights[row].to(wide) @ products.relu()
            best = scores.argsort(descending=True, stable=True)[:count].sort().values
            found[row, : len(best)] = seen[best]
        return found

    def attend(self, query: Tensor, cache: Tensor, slots: Tensor, scale: float, value_size: int) -> Tensor:
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        found = query.new_zeros((*query.shape[:2], value_size))
        for row, chosen in enumerate(slots):
            keys = cache[chosen[chosen >= 0].long()].to(wide)
            weights = (query[row].to(wide) @ keys.T * scale).softmax(-1)
            if len(keys):
                found[row] = (weights @ keys[:, :value_size]).to(query.dtype)
        return found


def seen_slots(places: TokenPlaces, row: int) -> Tensor:
    """Returns int64 [tokens], the slots of the tokens that a row sees, in order."""
    parts, size, found = places.parts, places.block_size, []
    if parts.shared is not None:
        span = int(parts.shared.row_spans[row])
        lo = parts.shared.lo_of(places.slots.new_tensor([row]))[0].tolist()
        ranges = zip(parts.shared.blocks.tolist(), lo, parts.shared.hi[span].tolist(), strict=True)
        found += [block * size + token for block, first, end in ranges for token in range(max(first, 0), end)]
    if parts.unique is not None:
        assert parts.unique.places is not None, "validated"
        count = len(parts.unique.rows)
        blocks = range(count) if parts.unique.blocks is None else parts.unique.blocks.tolist()
        lo, hi, at = parts.unique.lo.tolist(), parts.unique.hi.tolist(), parts.unique.places.tolist()
        own = [i for i, owner in enumerate(parts.unique.rows.tolist()) if owner == row and hi[i] > lo[i]]
        for i in sorted(own, key=lambda i: at[i]):
            found += [blocks[i] * size + token for token in range(lo[i], hi[i])]
    if parts.causal is not None:
        groups = parts.causal.groups.tolist()
        if groups[row] >= 0:
            own = [other for other in range(row + 1) if groups[other] == groups[row]]
            found += places.slots[own].tolist()
    return places.slots.new_tensor(found, dtype=torch.int64)
