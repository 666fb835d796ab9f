"""Block selection on CUDA in fewer launches: two score, and one ranks, stores and writes the list that attention reads.

It replaces the kernels of `cuda`, which remain for tensors that these do not cover, and when chosen by name.
`python -m benchmarks.sparse_parts` times both in one run.
"""

from __future__ import annotations

from functools import lru_cache
from math import log

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.block_selection.features import REST_WEIGHT, SummaryKind
from vllm_gaudi_ucm.ops.block_selection.impl.cuda.codes import power_of_two
from vllm_gaudi_ucm.ops.block_selection.impl.cuda.selection import (
    LARGEST_HEAD,
    SHARED_LINES,
    CudaBlockSelection,
    _candidate_ranges,
    _compute_type,
    ranges_of,
)
from vllm_gaudi_ucm.ops.block_selection.impl.reference import CHECK, REUSE
from vllm_gaudi_ucm.ops.block_selection.implementation import ChoosingSpans, Prepared, TicketedRanges
from vllm_gaudi_ucm.ops.cuda.early_start import follows, starts_early
from vllm_gaudi_ucm.ops.narrow_floats import E4M3
from vllm_gaudi_ucm.ops.selected_list import SelectedList

# Vectors of a tile: 32 KiB of bf16 at heads of 128. Half of the stages are for block ids, which the copies wait for: of
# six, Triton gives three to tiles. So two tiles are on their way while a program multiplies one, and 128 KiB to each
# multiprocessor, whose memory has room for two programs, or four that multiply 8-bit floats, two tiles at a time.
# Products of fp32 are unrolled into single multiplications.
STREAMED, STREAMED_WIDE = 128, 32
STAGES, PROGRAMS = 6, 2
STAGES_NARROW, PROGRAMS_NARROW = 4, 4
LEAST_LINES = 8  # inner length of a product
MOST_LINES = 64  # rows of a span times query heads of a KV head: a decode, or a verification
MOST_SPANS = 1024  # tiles that a program counts
SHARES, PARTS, PARTS_OF_FEW, FEW_SPANS = 32, 16, 64, 2  # block size of `share_blocks`
FEW_LINES = 512  # rows of a span times heads, up to which every tile adds up the sums of all parts
# candidates that a program of `rank_and_take` ranks, and how many it compares them with at a time
RANKED_AT_ONCE, RANKED_BY = 8, 256
RANKING = 3  # programs on a multiprocessor, whose registers have room for no more


class CudaFusedBlockSelection(CudaBlockSelection):
    """Block selection in fused Triton kernels for decodes and verifications. `cuda` computes all other shapes, and
    `minmax`.
    """

    priority = 21
    ranks_and_takes = True

    def prepare(
        self,
        spans: Tensor,
        first_rows: Tensor,
        num_rows: Tensor,
        max_rows: int,
        counts: Tensor,
        modes: Tensor,
        most: int,
    ) -> TicketedRanges:
        ranges = _candidate_ranges(spans, first_rows.shape[0], num_rows)
        return TicketedRanges(ranges, ranges.new_zeros(first_rows.shape[0]))

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
        prepared: Prepared | None = None,
    ) -> Tensor | None:
        """Like `block_scores`; None if `cuda` cannot score them either."""
        from vllm_gaudi_ucm.ops.block_selection.impl.cuda.triton import streamed_scores as kernels

        heads, dim = query.shape[1:]
        boxes, kv_heads = summaries.shape[1:3]
        group, count = heads // kv_heads, blocks.shape[0]
        strided = query.stride(2) != 1 or summaries.stride(3) != 1
        few = max_rows * group <= MOST_LINES and max_rows * heads <= FEW_LINES and first_rows.shape[0] <= MOST_SPANS
        if not (few and count) or strided or dim > LARGEST_HEAD or kind not in (SummaryKind.MEAN, SummaryKind.BOX_MEAN):
            rows = blocks, spans, first_rows, num_rows, max_rows, scale, kind
            return super().scores(query, summaries, *rows, prepared)
        blocks, spans, first_rows, num_rows = (ids.contiguous() for ids in (blocks, spans, first_rows, num_rows))
        ranges, early = ranges_of(prepared, spans, first_rows.shape[0], num_rows), _early(prepared, query.device)
        found = query.new_empty(count, dtype=torch.float32)
        estimates = found.new_empty((max_rows * heads, count))
        compute, block_v = _compute_type(query, summaries), power_of_two(boxes)
        block_c = max(1, (STREAMED_WIDE if compute.primitive_bitwidth == 32 else STREAMED) // block_v)
        block_c = max(block_c, 16 // block_v)
        narrow = summaries.dtype == E4M3
        stages, programs = (STAGES_NARROW, PROGRAMS_NARROW) if narrow else (STAGES, PROGRAMS)
        parts, num_spans = max(1, programs * _multiprocessors(query.device) // kv_heads), first_rows.shape[0]
        tops, sums = found.new_empty((2, parts + num_spans, max_rows * heads))
        block_s = max(16, power_of_two(num_spans))
        kernels.stream_boxes[(parts * kv_heads,)](
            query, summaries, blocks, spans, ranges, first_rows, num_rows, estimates, tops, sums, scale,
            log(REST_WEIGHT), log(REST_WEIGHT + boxes - 1), count, num_spans,
            *query.stride()[:2], *summaries.stride()[:3],
            HEADS=heads, GROUP=group, ROWS=max_rows, DIM=dim, BLOCK_D=max(16, power_of_two(dim)), VECTORS=boxes,
            BLOCK_V=block_v, BLOCK_C=block_c, BLOCK_N=max(LEAST_LINES, power_of_two(max_rows * group)),
            BLOCK_S=block_s, COMPUTE=compute, PRECISION="ieee", STAGES=stages, EARLY=early,
        )  # fmt: skip
        kernels.share_blocks[(-(-count // SHARES),)](
            estimates, tops, sums, spans, ranges, num_rows, found, count, num_spans, parts,
            HEADS=heads, ROWS=max_rows, BLOCK_L=SHARED_LINES, BLOCK_C=SHARES, BLOCK_S=block_s, STREAMED=block_c,
            PARTS=PARTS_OF_FEW if num_spans <= FEW_SPANS else PARTS, EARLY=early, num_warps=8, **follows(early),
        )  # fmt: skip
        return found

    def rank_and_take(
        self,
        scores: Tensor,
        places: Tensor,
        choosing: ChoosingSpans,
        prepared: Prepared | None = None,
        target: SelectedList | None = None,
    ) -> tuple[Tensor, Tensor]:
        from vllm_gaudi_ucm.ops.block_selection.impl.cuda.triton import selection as kernels

        stored, slots, counts, modes, thresholds, width, block_table, selected, checks = choosing
        spans, (count, most) = counts.shape[0], (scores.shape[0], stored.shape[1])
        if not (spans and count and width and most):
            fresh = self.choose(scores, places, spans, width, most, prepared)
            return self.take_choice(fresh, choosing)
        scores, places, early = scores.contiguous(), places.contiguous(), _early(prepared, scores.device)
        if isinstance(prepared, TicketedRanges):
            ranges, tickets = prepared
        else:
            ranges = _candidate_ranges(places // width, spans)
            tickets = ranges.new_zeros(spans)
        fresh, chosen = stored.new_empty((2, spans, most))
        ids = block_table.new_empty(selected)
        programs = min(RANKING * _multiprocessors(scores.device), spans * -(-min(width, count) // RANKED_AT_ONCE))
        kernels.rank_and_take[(programs,)](
            scores, places, ranges, tickets, fresh, stored, slots, counts, modes, thresholds, block_table, chosen, ids,
            None if target is None else target.blocks, None if target is None else target.places, checks,
            spans, most, width, selected, BLOCK_C=RANKED_AT_ONCE, RANKED_BY=RANKED_BY, REUSE=REUSE, CHECK=CHECK,
            BLOCK=max(16, power_of_two(most)), COMPARED=16, BLOCK_S=max(16, power_of_two(spans)),
            LISTED=target is not None, EARLY=early, num_warps=4, **follows(early),
        )  # fmt: skip
        if target is not None:
            target.written(ids)
        return chosen, ids


def _early(prepared: Prepared | None, device: torch.device) -> bool:
    """True if kernels may start early: the data of the step must be in place, as it is once spans were prepared."""
    return isinstance(prepared, TicketedRanges) and starts_early(device)


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a GPU; for a CPU, where kernels are interpreted, a small number that
    still divides the work.
    """
    if device.type != "cuda":
        return 3
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
