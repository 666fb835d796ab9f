"""The exact attention mass of the blocks that a sparse method attends, by layer, recorded while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm_gaudi_ucm.sparse.base import UcmSparseBase
from vllm_gaudi_ucm.sparse.selection.block_selector import SelectionLayer

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan


def block_mass(
    query: torch.Tensor, keys: torch.Tensor, blocks: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """float32 [blocks]: the share of one row's attention that falls on each block, averaged over the query heads.

    Args:
        query: [heads, dim] of the row.
        keys: [physical blocks, block size, kv heads, dim] of the layer.
        blocks: int64 [blocks] physical ids of the whole context.
        seen: int64 [blocks] the row sees tokens [0, seen) of each.
        scale: of the scores.
    """
    found = keys.index_select(0, blocks).float()
    grouped = query.float().unflatten(0, (found.shape[2], -1))
    scores = torch.einsum("kgd,btkd->kgbt", grouped, found).flatten(0, 1) * scale
    hidden = torch.arange(found.shape[1], device=seen.device) >= seen[:, None]
    weights = scores.masked_fill_(hidden, -torch.inf).flatten(1).softmax(1)
    return weights.view_as(scores).sum(2).mean(0)


@dataclass
class LayerRecall:
    """Sums over the sparse steps of one layer.

    attended: attention mass of the attended blocks. best: the same of the best choice of as many blocks, which all
    heads share. tokens, context: tokens attended, and tokens of the context.
    """

    steps: int = 0
    attended: float = 0.0
    best: float = 0.0
    tokens: int = 0
    context: int = 0


class RecallRecorder:
    """Watches the hooks of a method. Its steps hold one request of one row, and are not captured as graphs.

    Args:
        layers: in the model's order.
    """

    def __init__(self, layers: Sequence[SelectionLayer]) -> None:
        self.layers = [LayerRecall() for _ in layers]
        self._caches = layers
        self._plan: UnifiedPlan | None = None

    @contextmanager
    def watching(self, method: UcmSparseBase) -> Iterator[None]:
        """Records while the block runs; method: in the role WORKER. Its hooks work as before."""
        begin, attention = method.execute_begin, method.attention_begin

        def execute_begin(step: Any) -> None:
            self._plan = step
            begin(step)

        def attention_begin(
            layer_idx: int,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            metadata: Any,
            output: torch.Tensor | None = None,
        ) -> Any:
            result = attention(layer_idx, query, key, value, metadata, output)
            if metadata.selection is not None:
                self._record(layer_idx, result[0], metadata.selection.chosen)
            return result

        # on the object: the class serves other engines, too
        method.execute_begin, method.attention_begin = execute_begin, attention_begin  # type: ignore[method-assign]
        try:
            yield
        finally:
            method.execute_begin, method.attention_begin = begin, attention  # type: ignore[method-assign]

    def _record(self, layer_idx: int, query: torch.Tensor, chosen: torch.Tensor | None) -> None:
        """query: [1, heads, dim]. chosen: int64 [selected] physical ids, None if the layer is dense."""
        plan, (keys, scale) = self._plan, self._caches[layer_idx]
        assert plan is not None, "execute_begin comes before every forward"
        assert plan.selection is not None, "there is a choice of blocks"
        if query.shape[0] != 1 or plan.shared is not None:
            raise ValueError(f"attention mass: found a step of {query.shape[0]} rows, expected one request of one row")
        candidates = torch.from_numpy(plan.selection.candidate_blocks).to(keys.device)
        seen = torch.full_like(candidates, keys.shape[1])
        blocks = candidates
        if plan.unique is not None:
            blocks = torch.cat((candidates, torch.from_numpy(plan.unique.blocks).to(keys.device)))
            seen = torch.cat((seen, torch.from_numpy(plan.unique.hi).to(seen)))
        mass = block_mass(query[0], keys, blocks, seen, scale)
        is_attended = torch.ones_like(blocks, dtype=torch.bool)
        best = mass
        if chosen is not None:
            is_attended[: len(candidates)] = torch.isin(candidates, chosen)
            count = int(is_attended[: len(candidates)].sum())
            best = torch.cat((mass[: len(candidates)].topk(count).values, mass[len(candidates) :]))
        layer = self.layers[layer_idx]
        layer.steps += 1
        layer.attended += float(mass[is_attended].sum())
        layer.best += float(best.sum())
        layer.tokens += int(seen[is_attended].sum())
        layer.context += int(seen.sum())
