"""Descriptors of keys and values for the copy engine of a Hopper and later GPUs, where the tensors allow them."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_layer import LARGEST_HEAD, has_copy_engine, power_of_two

ALIGNMENT = 16  # bytes, of the first element and of every stride


def describe_tokens(tokens: Tensor, block_n: int) -> TensorDescriptor | None:
    """Tiles [block_n, dim] of [rows, kv_heads * dim]; tokens: [rows, kv_heads, dim]. None where it cannot be used."""
    rows, heads, dim = tokens.shape
    if not _fits(tokens) or tokens.stride(1) != dim:
        return None
    return TensorDescriptor(tokens, [rows, heads * dim], [tokens.stride(0), 1], [block_n, dim])


def describe_cache(cache: Tensor, block_n: int) -> TensorDescriptor | None:
    """Tiles [1, 1, block_n, dim] of [blocks, kv_heads, block_size, dim]; cache: [blocks, block_size, kv_heads, dim].

    None where it cannot be used, or a tile would be of more than one block.
    """
    if not _fits(cache) or cache.shape[1] % block_n:
        return None
    by_head = cache.transpose(1, 2)
    return TensorDescriptor(cache, list(by_head.shape), list(by_head.stride()), [1, 1, block_n, cache.shape[3]])


def _fits(tensor: Tensor) -> bool:
    dim, size = tensor.shape[-1], tensor.element_size()
    return (
        has_copy_engine(tensor.device)
        and dim == power_of_two(dim)
        and dim <= LARGEST_HEAD
        and tensor.data_ptr() % ALIGNMENT == 0
        and all(stride * size % ALIGNMENT == 0 for stride in tensor.stride()[:-1])
    )
