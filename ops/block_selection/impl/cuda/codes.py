"""Sign codes on CUDA: arguments of the kernels that encode blocks and estimate their scores."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.block_selection.features import BITS_PER_BYTE, STEPS_OF_GAIN, SummaryKind, projection

LARGEST_HEAD = 128  # of keys; a program holds the rotation of one head
PIECE = 32  # elements of a larger head, by which queries are rotated
LARGEST_BLOCK = 128
# A query is a sum of integers of 8 bits, each FINER times less than the one before it. With one the error is 0.6 % of
# the error of the signs; but where no mean is kept, codes carry it, too.
TERMS, TERMS_WIDE, FINER = {SummaryKind.CODES: 1, SummaryKind.HASH: 2}, 3, 254
CODES_AT_ONCE = 64


def are_encoded(key_cache: Tensor, kind: SummaryKind) -> bool:
    """Returns whether `encode` summarises the blocks of this cache."""
    tokens, _, dim = key_cache.shape[1:]
    narrow = key_cache.dtype.itemsize == 1
    return kind is SummaryKind.CODES and dim <= LARGEST_HEAD and tokens <= LARGEST_BLOCK and not narrow


def encode(key_cache: Tensor, blocks: Tensor, summaries: Tensor) -> None:
    """Does `write_summaries` with `codes`, in one launch."""
    from vllm_gaudi_ucm.ops.block_selection.impl.cuda.triton import codes as kernels

    tokens, kv_heads, dim = key_cache.shape[1:]
    count = summaries.shape[3] - 1
    if blocks.shape[0]:
        kernels.encode_blocks[(blocks.shape[0], kv_heads)](
            key_cache, projection(dim, key_cache.device), blocks.contiguous(), summaries, *key_cache.stride()[:3],
            *summaries.stride()[:3], TOKENS=tokens, BLOCK_T=max(16, power_of_two(tokens)), DIM=dim,
            BLOCK_D=max(16, power_of_two(dim)), BYTES=count, BLOCK_B=max(2, power_of_two(count)),
            STEPS=STEPS_OF_GAIN, num_warps=8,
        )  # fmt: skip


def estimate(
    query: Tensor, summaries: Tensor, ids: tuple[Tensor, Tensor, Tensor, Tensor], estimates: Tensor, max_rows: int,
    scale: float, kind: SummaryKind,
) -> None:  # fmt: skip
    """Writes estimates, fp32 [max_rows x heads, candidates]. ids: blocks, spans, first rows and numbers of rows, all
    contiguous.
    """
    from triton import knobs

    from vllm_gaudi_ucm.ops.block_selection.impl.cuda.triton import codes as kernels

    rows, heads, dim = query.shape
    vectors, kv_heads, width = summaries.shape[1:]
    group, boxes, count = heads // kv_heads, kind.boxes(vectors), width - 1
    sizes = {"HEADS": heads, "GROUP": group, "BYTES": count, "BLOCK_B": max(16, power_of_two(count))}
    sizes |= {"TERMS": TERMS[kind] if query.dtype.itemsize == 2 else TERMS_WIDE, "FINER": FINER}
    features = estimates.new_empty((rows, heads, BITS_PER_BYTE * count))
    terms = estimates.new_empty((rows, heads, sizes["TERMS"], BITS_PER_BYTE, sizes["BLOCK_B"]), dtype=torch.int8)
    numbers = estimates.new_empty((rows, heads, 1 + sizes["TERMS"]))
    kernels.divide_queries[(rows, kv_heads)](
        query, projection(dim, query.device), features, terms, numbers, *query.stride()[:2], **sizes, DIM=dim,
        BLOCK_D=max(16, power_of_two(dim)) if dim <= LARGEST_HEAD else PIECE, BLOCK_N=max(16, power_of_two(group)),
    )  # fmt: skip
    kernels.estimate_codes[(ids[0].shape[0] * kv_heads,)](
        features, terms, numbers, summaries, *ids, estimates, scale, log(kind.first_weight),
        log(kind.first_weight + boxes - 1), ids[0].shape[0], max_rows, *summaries.stride()[:3], **sizes, BOXES=boxes,
        BLOCK_V=CODES_AT_ONCE, SLOTS=max(8, power_of_two(group)), MEAN=kind is SummaryKind.CODES,
        STEPS=STEPS_OF_GAIN, PACKED=not knobs.runtime.interpret, num_warps=1, num_stages=1,
    )  # fmt: skip


def power_of_two(size: int) -> int:
    """Returns the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()
