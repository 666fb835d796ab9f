"""Block selection on CUDA in Triton: one launch summarises, three score, two rank and one hands the choice over; torch
needs about thirty.

A method returns None for tensors that its kernels do not cover, and the caller uses the reference. Nothing is read on
the host. Kernels are imported where they are launched, because triton is optional.
"""

from __future__ import annotations

from math import log
from typing import Any

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.block_selection.features import REST_WEIGHT, TOWARDS_BOUND, SummaryKind
from vllm_gaudi_ucm.ops.block_selection.impl.cuda import codes
from vllm_gaudi_ucm.ops.block_selection.impl.cuda.codes import power_of_two
from vllm_gaudi_ucm.ops.block_selection.impl.reference import CHECK, REUSE
from vllm_gaudi_ucm.ops.block_selection.implementation import (
    BlockSelectionImplementation,
    CandidateRanges,
    ChoosingSpans,
    Prepared,
    TicketedRanges,
)
from vllm_gaudi_ucm.ops.narrow_floats import E4M3
from vllm_gaudi_ucm.ops.registry import why_not_triton

LARGEST_HEAD = 512
LARGEST_GROUP = 32  # query heads per kv head
ELEMENTS = 4096  # elements of the products that a program of `minmax` holds at once
# Vectors of summaries that a program multiplies at once: 32 KiB of bf16 at heads of 128 in flight are enough for the
# memory's bandwidth; products of fp32 are unrolled into single multiplications.
PRODUCTS, PRODUCTS_WIDE = 128, 32
LARGEST_BLOCK = 1 << 16  # tokens of a block, or elements of a head, squared, that a summarising program holds
LINES, NEIGHBOURS = 4, 256  # block size of `span_sums`
LOOKED_AT = 2048  # block size of `find_candidates`
SHARED_LINES, SHARES = 32, 64  # block size of `block_shares`
RANKED, COMPARED = 64, 128
LONGEST_RANKING = 4096


class CudaBlockSelection(BlockSelectionImplementation):
    """Block selection by Triton kernels on a GPU; if chosen by name, also on a CPU under Triton's interpreter."""

    devices = frozenset({"cuda"})
    priority = 20
    passes_over = True

    def unavailable(self, device: str) -> str | None:
        return why_not_triton(device)

    def prepare(
        self,
        spans: Tensor,
        first_rows: Tensor,
        num_rows: Tensor,
        max_rows: int,
        counts: Tensor,
        modes: Tensor,
        most: int,
    ) -> Prepared:
        return CandidateRanges(_candidate_ranges(spans, first_rows.shape[0], num_rows))

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
        """Like `block_scores`; None for strided heads, and heads or groups that are too large."""
        from vllm_gaudi_ucm.ops.block_selection.impl.cuda.triton import scores as kernels

        heads, dim = query.shape[1:]
        vectors, kv_heads = summaries.shape[1:3]
        group = heads // kv_heads
        strided = query.stride(2) != 1 or summaries.stride(3) != 1
        if dim > LARGEST_HEAD or group > LARGEST_GROUP or strided:
            return None
        count, lines = blocks.shape[0], max_rows * heads
        found = query.new_empty(count, dtype=torch.float32)
        if not count:
            return found
        estimates = found.new_empty((lines, count))
        boxes = kind.boxes(vectors)
        blocks, spans, first_rows, num_rows = (ids.contiguous() for ids in (blocks, spans, first_rows, num_rows))
        arguments = (
            query, summaries, blocks, spans, first_rows, num_rows, estimates, scale, log(REST_WEIGHT),
            log(REST_WEIGHT + boxes - 1), count, max_rows, *query.stride()[:2], *summaries.stride()[:3],
        )  # fmt: skip
        sizes = {"HEADS": heads, "GROUP": group, "DIM": dim, "VECTORS": boxes}
        if kind.is_coded:
            ids = (blocks, spans, first_rows, num_rows)
            codes.estimate(query, summaries, ids, estimates, max_rows, scale, kind)
        elif kind is SummaryKind.MINMAX:
            block_g, block_d = power_of_two(group), power_of_two(dim)
            block_c = max(1, ELEMENTS // (block_g * block_d))
            kernels.estimate_blocks[(-(-count // block_c), kv_heads)](
                *arguments, **sizes, BLOCK_G=block_g, BLOCK_D=block_d, MINMAX=True,
                NEAR=(1 - TOWARDS_BOUND) / 2, FAR=(1 + TOWARDS_BOUND) / 2, BLOCK_C=block_c,
            )  # fmt: skip
        else:
            compute = _compute_type(query, summaries)
            block_v = power_of_two(boxes)
            block_c = max(1, (PRODUCTS_WIDE if compute.primitive_bitwidth == 32 else PRODUCTS) // block_v)
            kernels.estimate_boxes[(-(-count // block_c) * kv_heads,)](
                *arguments, **sizes, BLOCK_D=max(16, power_of_two(dim)), BLOCK_V=block_v, BLOCK_C=block_c,
                BLOCK_N=max(16, power_of_two(group)), COMPUTE=compute, PRECISION="ieee",
            )  # fmt: skip
        tops, sums = found.new_empty((2, first_rows.shape[0], lines))
        ranges = ranges_of(prepared, spans, first_rows.shape[0], num_rows)
        kernels.span_sums[(-(-lines // LINES), first_rows.shape[0])](
            estimates, spans, ranges, tops, sums, count, lines, BLOCK_L=LINES, BLOCK_C=NEIGHBOURS
        )
        kernels.block_shares[(-(-count // SHARES),)](
            estimates, spans, num_rows, tops, sums, found, count, lines,
            HEADS=heads, BLOCK_L=SHARED_LINES, BLOCK_C=SHARES,
        )  # fmt: skip
        return found

    def choose(
        self,
        scores: Tensor,
        places: Tensor,
        num_spans: int,
        width: int,
        most: int,
        prepared: Prepared | None = None,
    ) -> Tensor:
        from vllm_gaudi_ucm.ops.block_selection.impl.cuda.triton import selection as kernels

        count = scores.shape[0]
        if not (count and width):
            return places.new_full((num_spans, most), -1)
        ranking = places.new_empty((num_spans, most))
        if ranking.numel():
            scores, places = scores.contiguous(), places.contiguous()
            if isinstance(prepared, CandidateRanges | TicketedRanges):
                ranges = prepared.ranges
            else:
                ranges = _candidate_ranges(places // width, num_spans)
            kernels.rank_candidates[(num_spans, -(-min(width, count) // RANKED))](
                scores, places, ranges, ranking, width, most, BLOCK_C=RANKED, COMPARED=COMPARED
            )
        return ranking

    def write(self, key_cache: Tensor, blocks: Tensor, summaries: Tensor, kind: SummaryKind) -> bool:
        from vllm_gaudi_ucm.ops.block_selection.impl.cuda.triton import summaries as kernels

        tokens, kv_heads, dim = key_cache.shape[1:]
        block_t, block_d = power_of_two(tokens), power_of_two(dim)
        strided = key_cache.stride(3) != 1 or summaries.stride(3) != 1
        held = max(block_t, block_d) ** 2
        if not strided and codes.are_encoded(key_cache, kind):
            codes.encode(key_cache, blocks, summaries)
            return True
        if kind.is_coded or strided or held > LARGEST_BLOCK:
            return False
        if summaries.dtype == E4M3:
            summaries = summaries.view(torch.uint8)
        if blocks.shape[0]:
            kernels.summarise_blocks[(blocks.shape[0], kv_heads)](
                key_cache, blocks.contiguous(), summaries, *key_cache.stride()[:3], *summaries.stride()[:3],
                TOKENS=tokens, BLOCK_T=block_t, DIM=dim, BLOCK_D=block_d, VECTORS=summaries.shape[1],
                MINMAX=kind is SummaryKind.MINMAX, num_warps=4 if held <= 4096 else 8 if held <= 16384 else 16,
            )  # fmt: skip
        return True

    def hands_over(self, most: int) -> bool:
        return most <= LONGEST_RANKING

    def take_choice(self, fresh: Tensor, spans: ChoosingSpans) -> tuple[Tensor, Tensor]:
        from vllm_gaudi_ucm.ops.block_selection.impl.cuda.triton import selection as kernels

        stored, slots, counts, modes, thresholds, width, block_table, selected, checks = spans
        count, most = fresh.shape
        chosen, ids = torch.empty_like(fresh), block_table.new_empty(selected)
        kernels.take_choices[(count,)](
            fresh, stored, slots, counts, modes, thresholds, block_table, chosen, ids, checks, most, width, selected,
            REUSE=REUSE, CHECK=CHECK, BLOCK=max(16, power_of_two(most)), COMPARED=32, SPANS=COMPARED,
        )  # fmt: skip
        return chosen, ids

    def keep_or_replace(
        self,
        stored: Tensor,
        fresh: Tensor,
        counts: Tensor,
        modes: Tensor,
        thresholds: Tensor,
        width: int,
        prepared: Prepared | None = None,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Like the operation; None if a ranking is too long for one program."""
        from vllm_gaudi_ucm.ops.block_selection.impl.cuda.triton import selection as kernels

        spans, most = stored.shape
        if most > LONGEST_RANKING:
            return None
        chosen = torch.empty_like(fresh, memory_format=torch.contiguous_format)
        kept, replaced = counts.new_empty((2, spans), dtype=torch.int32)
        if spans:
            block = max(16, power_of_two(most)) if most else 16
            kernels.keep_or_replace_spans[(spans,)](
                *(one.contiguous() for one in (stored, fresh, counts, modes, thresholds)), chosen, kept, replaced,
                most, width, REUSE=REUSE, CHECK=CHECK, BLOCK=block, COMPARED=32,
            )  # fmt: skip
        return chosen, kept.bool(), replaced.bool()


def ranges_of(prepared: Prepared | None, spans: Tensor, num_spans: int, num_rows: Tensor) -> Tensor:
    """Returns the ranges prepared for the step, or computes them."""
    if isinstance(prepared, CandidateRanges | TicketedRanges):
        return prepared.ranges
    return _candidate_ranges(spans, num_spans, num_rows)


def _candidate_ranges(spans: Tensor, num_spans: int, num_rows: Tensor | None = None) -> Tensor:
    """See `find_candidates`."""
    from vllm_gaudi_ucm.ops.block_selection.impl.cuda.triton import scores as kernels

    ranges = spans.new_empty((num_spans, 2), dtype=torch.int32)
    if num_spans:
        kernels.find_candidates[(num_spans,)](
            spans.contiguous(), num_rows, ranges, spans.shape[0], COUNTED=num_rows is not None, BLOCK_C=LOOKED_AT
        )
    return ranges


def _compute_type(query: Tensor, summaries: Tensor) -> Any:
    """Returns the dtype of products: the common dtype of both, if they have one; sums are always float32. Every
    8-bit float is representable in 16 bits.
    """
    import triton.language as tl
    from triton import knobs

    types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    # Triton's interpreter (3.9) has no matrix product of bf16
    interpreted = knobs.runtime.interpret and query.dtype == torch.bfloat16
    same = summaries.dtype in (query.dtype, E4M3) and not interpreted
    return types.get(query.dtype, tl.float32) if same else tl.float32
