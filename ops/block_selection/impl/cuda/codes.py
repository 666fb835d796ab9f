"""Sign codes on CUDA: arguments of the kernels that encode blocks and estimate their scores."""

from __future__ import annotations

from math import log
from typing import Any

from torch import Tensor

from vllm_gaudi_ucm.ops.block_selection.features import STEPS_OF_GAIN, SummaryKind, projection, query_features
from vllm_gaudi_ucm.ops.cuda.untried import are_used

LARGEST_HEAD = 128  # of keys; a program holds the rotation of one head
LARGEST_BLOCK = 128


def are_encoded(key_cache: Tensor, kind: SummaryKind) -> bool:
    """Returns whether `encode` summarises the blocks of this cache."""
    tokens, _, dim = key_cache.shape[1:]
    narrow = key_cache.dtype.itemsize == 1
    return kind is SummaryKind.CODES and dim <= LARGEST_HEAD and tokens <= LARGEST_BLOCK and not narrow and are_used()


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
    scale: float, kind: SummaryKind, compute: Any,
) -> None:  # fmt: skip
    """Writes estimates, fp32 [max_rows x heads, candidates]. ids: blocks, spans, first rows and numbers of rows, all
    contiguous. compute: Triton's dtype of products.
    """
    from vllm_gaudi_ucm.ops.block_selection.impl.cuda.triton import codes as kernels

    features = query_features(query, kind)
    vectors, kv_heads, width = summaries.shape[1:]
    heads, boxes = query.shape[1], kind.boxes(vectors)
    kernels.estimate_codes[(ids[0].shape[0] * kv_heads,)](
        features, summaries, *ids, estimates, scale, log(kind.first_weight), log(kind.first_weight + boxes - 1),
        ids[0].shape[0], max_rows, *features.stride()[:2], *summaries.stride()[:3],
        HEADS=heads, GROUP=heads // kv_heads, BYTES=width - 1, BLOCK_B=max(16, power_of_two(width - 1)), BOXES=boxes,
        BLOCK_V=max(16, power_of_two(boxes)), BLOCK_N=max(16, power_of_two(heads // kv_heads)),
        MEAN=kind is SummaryKind.CODES, STEPS=STEPS_OF_GAIN, COMPUTE=compute, PRECISION="ieee",
    )  # fmt: skip


def power_of_two(size: int) -> int:
    """Returns the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()
