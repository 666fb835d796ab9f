"""Scores of all blocks of a request for its last query, also of blocks that are away: their summaries stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.ops.block_selection.api import block_scores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_gaudi_ucm.ops.block_selection.summary_kind import SummaryKind
    from vllm_gaudi_ucm.sparse.selection.selection_tensors import SelectionTensors


class ScoredLayer(NamedTuple):
    """A layer that chooses. layer_idx: among the model's layers. summaries: [blocks, vectors, kv heads, width]."""

    layer_idx: int
    summaries: torch.Tensor
    scale: float


class BlockScorer:
    """Keeps the queries of a step, inside of its graph, and summaries of blocks that are away.

    Scoring is no part of a graph; its shapes do not depend on the request.

    Args:
        layers: those that choose.
        kind: of the summaries.
        num_slots: of choices, that of pads included.
        num_rows: blocks that can have a copy.
        width: logical blocks of the longest request.
        query_shape: (heads, dim) and dtype of a query.
    """

    def __init__(
        self,
        layers: Sequence[ScoredLayer],
        kind: SummaryKind,
        num_slots: int,
        num_rows: int,
        width: int,
        query_shape: tuple[int, int],
        query_dtype: torch.dtype,
    ) -> None:
        self.layers = list(layers)
        self._kind = kind
        self._places = {layer.layer_idx: place for place, layer in enumerate(layers)}
        device = layers[0].summaries.device
        self._queries = torch.zeros((len(layers), num_slots, *query_shape), dtype=query_dtype, device=device)
        # one row more, where nobody looks: for pads
        self.away = [layer.summaries.new_zeros((num_rows + 1, *layer.summaries.shape[1:])) for layer in layers]
        """Of each layer, by row: summaries of blocks that are away."""
        self._numbers = torch.arange(width, device=device)
        self._first_rows = torch.zeros(2, dtype=torch.int64, device=device)
        self._num_rows = torch.tensor([1, 0], device=device)

    @property
    def bytes(self) -> int:
        return self._queries.nbytes + sum(away.nbytes for away in self.away)

    def keep_queries(self, layer_idx: int, query: torch.Tensor, t: SelectionTensors) -> None:
        """One row of each request that chooses in this step. query: [rows, heads, dim].

        The last certain one: of a decode and a verification the first, and of a prompt's tail the one whose token is
        emitted. Drafts may turn out wrong; the other rows of a tail only reach the token through their KV.
        """
        self._queries[self._places[layer_idx]].index_copy_(0, t.choice_slots, query.index_select(0, t.scored_rows))

    def keep_summary(self, block: int, row: int) -> None:
        """Copies the summaries of a block that gets a copy off the device."""
        source, target = torch.tensor([[block], [row]], device=self._numbers.device)
        for layer, away in zip(self.layers, self.away, strict=True):
            away.index_copy_(0, target, layer.summaries.index_select(0, source))

    def restore_summary(self, row: int, block: int) -> None:
        """Copies the summaries of a block that is back on the device to where those of resident ones are."""
        source, target = torch.tensor([[row], [block]], device=self._numbers.device)
        for layer, away in zip(self.layers, self.away, strict=True):
            layer.summaries.index_copy_(0, target, away.index_select(0, source))

    def scores(self, slot: int, blocks: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """float64 [full blocks]: shares of attention, averaged over layers and heads; below 0 without a summary.

        Waits for the device.

        Args:
            slot: whose queries.
            blocks: [full blocks] physical block, below 0 where there is no summary of one.
            rows: [full blocks] row of the summary that is kept of a block that is away, else below 0.
        """
        known = (blocks >= 0) | (rows >= 0)
        padded = np.zeros((5, len(self._numbers)), np.int64)
        end = len(blocks)
        padded[0, :end], padded[1, :end] = blocks.clip(0), rows.clip(0)
        padded[2, :end], padded[3, :end], padded[4] = rows >= 0, known, slot
        near, far, is_away, is_known, slots = torch.from_numpy(padded).to(self._numbers.device).unbind()
        away = is_away.bool()[:, None, None, None]
        queries = self._queries.index_select(1, slots[:1])
        numbers, spans = self._numbers * is_known, 1 - is_known
        total = torch.zeros(len(self._numbers), device=self._numbers.device)
        for place, layer in enumerate(self.layers):
            summaries = torch.where(away, self.away[place].index_select(0, far), layer.summaries.index_select(0, near))
            total += block_scores(
                queries[place], summaries, numbers, spans, self._first_rows, self._num_rows, 1, layer.scale, self._kind
            )
        found = (total / len(self.layers)).cpu().numpy().astype(np.float64)[:end]
        found[~known] = -1
        return found
