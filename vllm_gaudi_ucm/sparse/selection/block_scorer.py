"""Scores all blocks of a request for its last query, including offloaded blocks, whose summaries are kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.ops.block_selection.api import block_scores
from vllm_gaudi_ucm.ops.narrow_floats import put

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
    from vllm_gaudi_ucm.sparse.selection.selection_tensors import SelectionTensors


OverRanks = Callable[[torch.Tensor], torch.Tensor]
"""Scores by the heads of this rank, float32 [candidates] -> the mean over the ranks. It may run inside a graph."""


class ScoredLayer(NamedTuple):
    """A layer that chooses. layer_idx: its index in the model. summaries: [blocks, vectors, kv heads, width]."""

    layer_idx: int
    summaries: torch.Tensor
    scale: float


class BlockScorer:
    """Keeps the queries of a step, inside its graph, and summaries of offloaded blocks.

    Scoring runs outside graphs; its shapes do not depend on the request.

    Args:
        num_slots: number of slots for choices, including the pads' slot.
        num_rows: number of blocks that can have a copy.
        width: logical blocks of the longest request.
        query_shape: (heads, dim) of a query. query_dtype: its dtype.
        over_ranks: turns this rank's scores into those of all heads, if other ranks have other heads of the layers.
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
        over_ranks: OverRanks | None = None,
    ) -> None:
        self._over_ranks = over_ranks
        self.layers = list(layers)
        self._kind = kind
        self._places = {layer.layer_idx: place for place, layer in enumerate(layers)}
        device = layers[0].summaries.device
        # a tensor for each layer, because graphs write it
        self._queries = [torch.zeros((num_slots, *query_shape), dtype=query_dtype, device=device) for _ in layers]
        # one more row, which is never read, for pads
        self.offloaded = [layer.summaries.new_zeros((num_rows + 1, *layer.summaries.shape[1:])) for layer in layers]
        """Summaries of offloaded blocks for each layer, by row."""
        self._numbers = torch.arange(width, device=device)
        self._first_rows = torch.zeros(2, dtype=torch.int64, device=device)
        self._num_rows = torch.tensor([1, 0], device=device)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._queries, *self.offloaded))

    def refill(self) -> None:
        """Resets all tensors to zero."""
        for tensor in (*self._queries, *self.offloaded, self._first_rows):
            tensor.zero_()

    def queries_of(self, layer_idx: int) -> torch.Tensor:
        """Returns [slots, heads, dim], in which `keep_queries` keeps the queries of a layer that chooses."""
        return self._queries[self._places[layer_idx]]

    def keep_summary(self, block: int, row: int) -> None:
        """Copies the summaries of a block that gets a copy off the device."""
        source, target = torch.tensor([[block], [row]], device=self._numbers.device)
        for layer, offloaded in zip(self.layers, self.offloaded, strict=True):
            put(offloaded, 0, target, layer.summaries.index_select(0, source))

    def restore_summary(self, row: int, block: int) -> None:
        """Copies the summaries of a block that is back on the device to their place for the cache's blocks."""
        source, target = torch.tensor([[row], [block]], device=self._numbers.device)
        for layer, offloaded in zip(self.layers, self.offloaded, strict=True):
            put(layer.summaries, 0, target, offloaded.index_select(0, source))

    def scores(self, slot: int, blocks: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns float64 [full blocks]: shares of attention, averaged over layers and heads; below 0 without a
        summary.

        Waits for the device, and for the other ranks, which score the same blocks.

        Args:
            slot: the slot of the request whose queries score.
            blocks: [full blocks] physical block, below 0 if it has no summary.
            rows: [full blocks] row of the summary that is kept of an offloaded block, else below 0.
        """
        known = (blocks >= 0) | (rows >= 0)
        padded = np.zeros((5, len(self._numbers)), np.int64)
        end = len(blocks)
        padded[0, :end], padded[1, :end] = blocks.clip(0), rows.clip(0)
        padded[2, :end], padded[3, :end], padded[4] = rows >= 0, known, slot
        near, far, is_offloaded, is_known, slots = torch.from_numpy(padded).to(self._numbers.device).unbind()
        # an index instead of `where`, which Gaudi's compiler gets wrong for integers (hashes)
        places = self._numbers + is_offloaded * len(self._numbers)
        numbers, spans = self._numbers * is_known, 1 - is_known
        total = torch.zeros(len(self._numbers), device=self._numbers.device)
        for layer, queries, far_summaries in zip(self.layers, self._queries, self.offloaded, strict=True):
            both = layer.summaries.index_select(0, near), far_summaries.index_select(0, far)
            summaries = torch.cat(both).index_select(0, places)
            total += block_scores(
                queries.index_select(0, slots[:1]),
                summaries,
                numbers,
                spans,
                first_rows=self._first_rows,
                num_rows=self._num_rows,
                max_rows=1,
                scale=layer.scale,
                kind=self._kind,
            )
        if self._over_ranks is not None:
            total = self._over_ranks(total)
        found = (total / len(self.layers)).cpu().numpy().astype(np.float64)[:end]
        found[~known] = -1
        return found


def keep_queries(queries: torch.Tensor, query: torch.Tensor, t: SelectionTensors) -> None:
    """Writes one row of each request that chooses in this step to a layer's `queries`. query: [rows, heads, dim].

    It is the last certain row: the first of a decode or a verification, and for a prompt remainder the row that yields
    a token. Drafts may turn out wrong; other rows of a remainder affect the token only through their KV.
    """
    queries.index_copy_(0, t.choice_slots, query.index_select(0, t.scored_rows))


class SummaryQueue:
    """Tracks summaries. Only full blocks have one, and it becomes invalid when its block is written again.

    Blocks wait because a graph has room for a fixed number of summaries; a block without one is always attended, so
    waiting costs work but never changes a token.

    changes: how often a block was written, moved or copied in, or has become full.
    """

    def __init__(self, num_blocks: int) -> None:
        self.ready = np.zeros(num_blocks, np.bool_)
        self._waiting = np.zeros(num_blocks, np.bool_)
        self._queue: deque[int] = deque()
        self.changes = 0

    @property
    def waits(self) -> bool:
        return bool(self._queue)

    def __len__(self) -> int:
        return int(self._waiting.sum())

    def written(self, blocks: NDArray[np.integer]) -> None:
        """Called when these blocks get new tokens in this step."""
        self.changes += 1
        self.ready[blocks] = False
        self._waiting[blocks] = False

    def moved(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Renames block `sources[i]` to `targets[i]`, with its summary. int64 [n] each; no block is in both."""
        self.changes += 1
        for of_blocks in (self.ready, self._waiting):
            of_blocks[targets] = of_blocks[sources]
            of_blocks[sources] = False
        self._queue.extend(targets[self._waiting[targets]].tolist())

    def brought(self, blocks: NDArray[np.integer]) -> None:
        """Called when the summaries of these full blocks were copied from elsewhere."""
        self.changes += 1
        self.ready[blocks] = True
        self._waiting[blocks] = False

    def is_ready(self, blocks: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Returns which of them have a summary, in the shape of `blocks`, whose entries need not be valid blocks."""
        return self.ready.take(blocks, mode="clip")

    def full(self, blocks: NDArray[np.integer]) -> None:
        """Called for blocks that are full once this step's tokens are written; a block with a summary keeps it."""
        self.changes += 1
        missing = np.unique(blocks[~(self.ready[blocks] | self._waiting[blocks])])
        self._waiting[missing] = True
        self._queue.extend(missing.tolist())

    def take_blocks(self, most: int | None = None) -> NDArray[np.int64]:
        """Returns the blocks to summarise in this step, longest waiting first; they count as summarised from now on."""
        taken: list[int] = []
        while self._queue and (most is None or len(taken) < most):
            block = self._queue.popleft()
            # it was written again meanwhile, or is in the queue twice because of that
            if self._waiting[block]:
                self._waiting[block] = False
                taken.append(block)
        blocks = np.array(taken, np.int64)
        self.ready[blocks] = True
        return blocks

    def check_integrity(self) -> None:
        """Checks that no block is both ready and waiting, and that every waiting block is in the queue."""
        both = np.flatnonzero(self.ready & self._waiting)
        lost = set(np.flatnonzero(self._waiting).tolist()) - set(self._queue)
        if len(both) or lost:
            raise AssertionError(f"summaries: ready and waiting {both.tolist()}, waiting but not queued {sorted(lost)}")
