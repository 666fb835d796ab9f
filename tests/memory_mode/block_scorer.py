"""Helpers of `test_block_scorer.py` that other tests use, too."""

from __future__ import annotations

import numpy as np
import torch

from vllm_gaudi_ucm.ops.block_selection.api import block_scores, new_summaries, write_summaries
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
from vllm_gaudi_ucm.sparse.selection.block_scorer import BlockScorer, ScoredLayer, keep_queries
from vllm_gaudi_ucm.sparse.selection.selection_tensors import SelectionTensors

BLOCKS, SIZE, HEADS, KV_HEADS, DIM, SLOTS, ROWS, WIDTH = 12, 8, 4, 2, 16, 3, 5, 10


class Scored:
    """A scorer over two layers, and the keys from which its summaries come."""

    def __init__(self, kind: SummaryKind, narrow: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.kind = kind
        self.keys = [torch.randn(BLOCKS, SIZE, KV_HEADS, DIM, generator=generator) for _ in range(2)]
        self.summaries = [new_summaries(keys, kind, narrow=narrow) for keys in self.keys]
        for keys, summaries in zip(self.keys, self.summaries, strict=True):
            write_summaries(keys, torch.arange(BLOCKS), summaries, kind)
        layers = [ScoredLayer(index, summaries, 0.25) for index, summaries in zip((1, 4), self.summaries, strict=True)]
        self.scorer = BlockScorer(layers, kind, SLOTS, ROWS, WIDTH, (HEADS, DIM), torch.float32)
        self.queries = [2 * torch.randn(6, HEADS, DIM, generator=generator) for _ in range(2)]
        none = torch.zeros(0, dtype=torch.int64)
        rows, slots = torch.tensor([0, 3]), torch.tensor([2, 0])
        tensors = SelectionTensors(none, none, rows, *[none] * 5, slots, *[none] * 6, 1, 1, WIDTH, 3)
        for layer_idx, query in zip((1, 4), self.queries, strict=True):
            keep_queries(self.scorer.queries_of(layer_idx), query, tensors)

    def expected(self, row: int, blocks: list[int]) -> np.ndarray:
        """Of these blocks for one row, averaged over the layers."""
        one = torch.tensor([0]), torch.tensor([1])
        found = [
            block_scores(
                query[row : row + 1],
                summaries,
                torch.tensor(blocks),
                torch.zeros(len(blocks), dtype=torch.int64),
                *one,
                1,
                0.25,
                self.kind,
            )
            for query, summaries in zip(self.queries, self.summaries, strict=True)
        ]
        return torch.stack(found).mean(0).numpy()
