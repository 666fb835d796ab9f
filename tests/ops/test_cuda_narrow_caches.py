"""Caches of 8-bit floats: what is written, and attention over them against float64, for every implementation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.batch import Batch, Request, Shape, build
from tests.ops.oracle import IMPLEMENTATIONS, assert_matches
from vllm_gaudi_ucm.ops.kv_cache.api import E4M3, copy_blocks, narrow, write_kv

MIXED = [
    Request(9, 1, prefix=2),
    Request(12, 1, prefix=3),
    Request(0, 1),
    Request(8, 7, prefix=2),
    Request(5, 3, family=1, prefix=1),
    Request(0, 11),
    Request(14, 4, chosen=frozenset({1})),
]


def over_narrow_cache(batch: Batch) -> Batch:
    """Every key and value is an 8-bit float, so the oracle need not know that the cache holds nothing else."""
    for tensor in (batch.key, batch.value, batch.key_cache, batch.value_cache):
        tensor.copy_(tensor.to(E4M3))
    batch.seen = [None if seen is None else (rounded(seen[0]), rounded(seen[1])) for seen in batch.seen]
    batch.key_cache, batch.value_cache = batch.key_cache.to(E4M3), batch.value_cache.to(E4M3)
    return batch


def rounded(tensor: Tensor) -> Tensor:
    return tensor.to(E4M3).to(tensor.dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("selected", [False, True])
def test_cuda_and_others_read_narrow_caches(implementation: str, dtype: torch.dtype, selected: bool) -> None:
    """NaN in everything that no row sees."""
    requests = MIXED if selected else [request for request in MIXED if not request.chosen]
    batch = over_narrow_cache(build(requests, Shape(dtype=dtype, dim=32, value_dim=32)))
    assert_matches(batch, implementation, prepared=True)


def test_writing() -> None:
    """Rounded once; what is beyond the range is at its end, and NaN stays what it is."""
    key = torch.randn(3, 2, 16) * 100
    key[0, 0, :3] = torch.tensor([1e9, -500.0, torch.nan])
    caches = [torch.zeros(8, 2, 16, dtype=E4M3) for _ in range(2)]
    slots = torch.tensor([5, 2, 7])
    found, _ = write_kv(narrow(key), narrow(key), *caches, slots)
    written = found.float()[slots]
    assert written[0, 0, :2].tolist() == [448, -448]
    assert written[0, 0, 2].isnan()
    inside = key.abs() <= 448
    error = (written - key).abs()[inside]
    assert bool((error <= key.abs()[inside] / 16 + 2.0**-10).all())
    assert not found.float()[[0, 1, 3, 4, 6]].any()


def test_blocks_are_copied_as_bytes() -> None:
    cache = torch.randn(6, 4, 2, 8).to(E4M3)
    before = cache.view(torch.uint8).clone()
    copy_blocks([cache], torch.tensor([4, 1]), torch.tensor([0, 5]))
    assert torch.equal(cache.view(torch.uint8)[[0, 5]], before[[4, 1]])
