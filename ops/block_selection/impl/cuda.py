"""Block selection on CUDA in Triton: three launches score and two choose, where torch needs about twenty.

A method returns None for tensors that its kernels do not cover, and the caller uses the reference. Nothing is read on
the host. Kernels are imported where they are launched, because triton is optional.
"""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.block_selection.features import REST_WEIGHT, TOWARDS_BOUND, SummaryKind
from vllm_gaudi_ucm.ops.block_selection.impl.reference import CHECK, REUSE
from vllm_gaudi_ucm.ops.block_selection.implementation import BlockSelectionImplementation, PreparedSpans
from vllm_gaudi_ucm.ops.registry import why_not_triton

LARGEST_HEAD = 512
LARGEST_GROUP = 32  # query heads per kv head
ELEMENTS = 4096  # of the products that a program holds at once
LINES, NEIGHBOURS, LOOKED_AT = 4, 256, 2048  # of `span_sums`
SHARED_LINES, SHARES = 32, 64  # of `block_shares`
RANKED, COMPARED = 64, 128
LONGEST_RANKING = 4096
NOBODY = -(1 << 31)


class CudaBlockSelection(BlockSelectionImplementation):
    """Triton kernels on a GPU; if asked for by name, also on a CPU under Triton's interpreter."""

    devices = frozenset({"cuda"})
    priority = 20

    def unavailable(self, device: str) -> str | None:
        return why_not_triton(device)

    def scores(
        self,
        query: Tensor,
        summaries: Tensor,
        blocks: Tensor,
        spans: Tensor,
        first_rows: Tensor,
        num_rows: Tensor,
        max_rows: int,
        scale: float,
        kind: SummaryKind,
        prepared: PreparedSpans | None = None,
    ) -> Tensor | None:
        """As `block_scores`; None for `hash`, for strided heads, and for heads or groups that are too large."""
        from vllm_gaudi_ucm.ops.block_selection.impl.triton import selection as kernels

        heads, dim = query.shape[1:]
        vectors, kv_heads = summaries.shape[1:3]
        group = heads // kv_heads
        strided = query.stride(2) != 1 or summaries.stride(3) != 1
        if kind is SummaryKind.HASH or dim > LARGEST_HEAD or group > LARGEST_GROUP or strided:
            return None
        count, lines = blocks.shape[0], max_rows * heads
        found = query.new_empty(count, dtype=torch.float32)
        if not count:
            return found
        estimates = found.new_empty((lines, count))
        block_g, block_d = _power_of_two(group), _power_of_two(dim)
        block_c = max(1, ELEMENTS // (block_g * block_d))
        boxes = 1 if kind is SummaryKind.MINMAX else vectors
        blocks, spans, first_rows, num_rows = (ids.contiguous() for ids in (blocks, spans, first_rows, num_rows))
        kernels.estimate_blocks[(-(-count // block_c), kv_heads)](
            query, summaries, blocks, spans, first_rows, num_rows, estimates, scale, log(REST_WEIGHT),
            log(REST_WEIGHT + boxes - 1), count, max_rows, *query.stride()[:2], *summaries.stride()[:3],
            HEADS=heads, GROUP=group, BLOCK_G=block_g, DIM=dim, BLOCK_D=block_d, VECTORS=boxes,
            MINMAX=kind is SummaryKind.MINMAX, NEAR=(1 - TOWARDS_BOUND) / 2, FAR=(1 + TOWARDS_BOUND) / 2,
            BLOCK_C=block_c,
        )  # fmt: skip
        tops, sums = found.new_empty((2, first_rows.shape[0], lines))
        kernels.span_sums[(-(-lines // LINES), first_rows.shape[0])](
            estimates, spans, tops, sums, count, lines, LOOKED_AT=LOOKED_AT, BLOCK_L=LINES, BLOCK_C=NEIGHBOURS
        )
        kernels.block_shares[(-(-count // SHARES),)](
            estimates, spans, num_rows, tops, sums, found, count, lines,
            HEADS=heads, BLOCK_L=SHARED_LINES, BLOCK_C=SHARES,
        )  # fmt: skip
        return found

    def choose(self, scores: Tensor, places: Tensor, num_spans: int, width: int, most: int) -> Tensor:
        from vllm_gaudi_ucm.ops.block_selection.impl.triton import selection as kernels

        count, end = scores.shape[0], num_spans * width
        ranked = min(most, width)
        ranking = (
            places.new_full((num_spans, most), -1) if ranked < most or not end else places.new_empty((num_spans, most))
        )
        if not end or not ranked:
            return ranking
        keys = places.new_full((end,), NOBODY, dtype=torch.int32)
        if count:
            kernels.place_scores[(-(-count // COMPARED),)](
                scores.contiguous(), places.contiguous(), keys, count, end, BLOCK_C=COMPARED
            )
        kernels.rank_blocks[(num_spans, -(-width // RANKED))](
            keys, ranking, width, most, BLOCK_W=RANKED, COMPARED=COMPARED
        )
        return ranking

    def keep_or_replace(
        self,
        stored: Tensor,
        fresh: Tensor,
        counts: Tensor,
        modes: Tensor,
        thresholds: Tensor,
        width: int,
        prepared: PreparedSpans | None = None,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """As the operation; None if a ranking is too long for one program."""
        from vllm_gaudi_ucm.ops.block_selection.impl.triton import selection as kernels

        spans, most = stored.shape
        if most > LONGEST_RANKING:
            return None
        chosen = torch.empty_like(fresh, memory_format=torch.contiguous_format)
        kept, replaced = counts.new_empty((2, spans), dtype=torch.int32)
        if spans:
            block = max(16, _power_of_two(most)) if most else 16
            kernels.keep_or_replace_spans[(spans,)](
                *(one.contiguous() for one in (stored, fresh, counts, modes, thresholds)), chosen, kept, replaced,
                most, width, REUSE=REUSE, CHECK=CHECK, BLOCK=block, COMPARED=32,
            )  # fmt: skip
        return chosen, kept.bool(), replaced.bool()


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
