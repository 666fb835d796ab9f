"""What every tensor of a KV cache is, on every device: a graph on a Gaudi may write nothing else in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from tests.engine.hpu_process import run_on_card
from vllm_gaudi_ucm.device import get_device
from vllm_gaudi_ucm.kv_cache.allocation import DUMMY_BLOCK, allocate_kv_cache, dummy_kv_cache
from vllm_gaudi_ucm.kv_cache.pair import KvPair, LatentRows, in_blocks

BLOCKS, BLOCK_SIZE = 5, 4


def spec(heads: int, size: int, value_size: int | None = None, dtype: torch.dtype = torch.bfloat16) -> KVCacheSpec:
    return FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=heads, head_size=size, head_size_v=value_size, dtype=dtype
    )


SPECS = {"0": spec(2, 8), "1": spec(2, 8), "draft": spec(3, 8, 4, torch.float32)}
SHAPES = {"0": ((20, 2, 8), (20, 2, 8)), "1": ((20, 2, 8), (20, 2, 8)), "draft": ((20, 3, 8), (20, 3, 4))}


def config() -> KVCacheConfig:
    group = KVCacheGroupSpec(list(SPECS), UniformTypeKVCacheSpecs(block_size=BLOCK_SIZE, kv_cache_specs=SPECS))
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[group])


@torch.inference_mode()
def describe(device: str) -> dict[str, list[dict[str, Any]]]:
    """Per layer of keys and values: what the contract is about, in plain numbers."""
    caches = allocate_kv_cache(config(), get_device(device).torch_device())
    tensors = [rows for pair in caches.values() for rows in pair]
    # all of them, before one is looked at: what shares memory has the number of another
    for number, rows in enumerate(tensors):
        assert not rows.any(), "a new cache is zeros"
        rows.fill_(number)
    return {name: [_of(rows) for rows in pair] for name, pair in caches.items()}


def _of(rows: torch.Tensor) -> dict[str, Any]:
    return {
        "shape": list(rows.shape),
        "dtype": str(rows.dtype),
        "offset": rows.storage_offset(),
        "contiguous": rows.is_contiguous(),
        "is a view": rows._is_view(),
        "storage": rows.untyped_storage().nbytes() - rows.nbytes,
        "device": rows.device.type,
        "values": sorted(set(rows.flatten().cpu().tolist())),
    }


def check(found: dict[str, list[dict[str, Any]]], device: str) -> None:
    numbers = iter(range(2 * len(SPECS)))
    for name, pair in found.items():
        for rows, shape in zip(pair, SHAPES[name], strict=True):
            expected: Any = {
                "shape": list(shape),
                "dtype": "torch.float32" if name == "draft" else "torch.bfloat16",
                "offset": 0,
                "contiguous": True,
                "is a view": False,
                "storage": 0,
                "device": device,
                "values": [float(next(numbers))],
            }
            assert rows == expected
    assert list(found) == list(SPECS)


def test_keys_that_hold_their_values_are_one_tensor() -> None:
    """Of multi-head latent attention; the bytes of a page are theirs alone."""
    specs = {"0": MLAAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=36, dtype=torch.bfloat16)}
    (cache,) = dummy_kv_cache(specs, torch.device("cpu")).values()
    assert isinstance(cache, LatentRows)
    assert cache.key.shape == (BLOCK_SIZE, 1, 36)
    assert in_blocks(cache, BLOCK_SIZE).key.shape == (1, BLOCK_SIZE, 1, 36)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]
)
def test_each_tensor_is_rows_and_shares_nothing(device: str) -> None:
    check(describe(device), device)


def test_so_it_is_on_a_simulated_card(tmp_path: Path) -> None:
    check(run_on_card(describe, tmp_path, device="hpu").result, "hpu")


def test_a_cache_takes_the_bytes_that_vllm_counts() -> None:
    """With the dummy block, which is one of vLLM's."""
    caches = allocate_kv_cache(config(), torch.device("cpu"))
    for name, one in SPECS.items():
        assert sum(rows.nbytes for rows in caches[name]) == BLOCKS * one.page_size_bytes
    dummies = dummy_kv_cache(SPECS, torch.device("cpu"))
    for name, pair in dummies.items():
        assert sum(rows.nbytes for rows in pair) == SPECS[name].page_size_bytes
        assert [rows.shape[1:] for rows in pair] == [rows.shape[1:] for rows in caches[name]]


def test_blocks_are_views_of_rows() -> None:
    pair = KvPair(torch.arange(20.0)[:, None, None].repeat(1, 2, 3), torch.zeros(20, 2, 5))
    blocks = in_blocks(pair, BLOCK_SIZE)
    assert blocks.key.shape == (BLOCKS, BLOCK_SIZE, 2, 3)
    assert blocks.value.shape == (BLOCKS, BLOCK_SIZE, 2, 5)
    assert blocks.key[2, 1].unique() == 2 * BLOCK_SIZE + 1
    blocks.value[DUMMY_BLOCK] = 1
    assert pair.value[:BLOCK_SIZE].all()
    assert not pair.value[BLOCK_SIZE:].any()


def test_what_keeps_more_than_keys_and_values_is_refused() -> None:
    """As vLLM's caches of few bits do, with their scales."""
    with_scales = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=2, head_size=8, dtype=torch.int8, state_content_bytes=24
    )
    with pytest.raises(
        ValueError, match=r"layer a: keys and values take 128 bytes, vLLM expects 192; .*kv-cache-dtype"
    ):
        dummy_kv_cache({"a": with_scales}, torch.device("cpu"))
