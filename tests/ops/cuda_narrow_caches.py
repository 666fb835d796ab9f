"""Helpers of `test_cuda_narrow_caches.py` that other tests use, too."""

from __future__ import annotations

from torch import Tensor

from tests.ops.batch import Batch
from vllm_gaudi_ucm.ops.narrow_floats import E4M3


def over_narrow_cache(batch: Batch) -> Batch:
    """Every key and value is an 8-bit float, so the oracle need not know that the cache holds nothing else."""
    for tensor in (batch.key, batch.value, batch.key_cache, batch.value_cache):
        tensor.copy_(tensor.to(E4M3))
    batch.seen = [None if seen is None else (rounded(seen[0]), rounded(seen[1])) for seen in batch.seen]
    dim, in_keys = batch.value_cache.shape[-1], batch.spec.values_in_keys
    batch.key_cache = batch.key_cache.to(E4M3)
    batch.value_cache = batch.key_cache[..., :dim] if in_keys else batch.value_cache.to(E4M3)
    return batch


def rounded(tensor: Tensor) -> Tensor:
    return tensor.to(E4M3).to(tensor.dtype)
