"""Caches of 8-bit floats: what is written, and attention over them against float64, for every implementation."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from tests.ops.batch import Request, Shape, build
from tests.ops.cuda_narrow_caches import over_narrow_cache, rounded
from tests.ops.oracle import CUDA_RUNS, IMPLEMENTATIONS, assert_matches
from tests.ops.selection import Candidates, Case, expected_scores, may_round_differently
from tests.ops.selection import build as build_candidates
from vllm_gaudi_ucm.ops.block_selection.api import block_scores, new_summaries, write_summaries
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind, summarise
from vllm_gaudi_ucm.ops.kv_cache.api import copy_blocks, write_kv, write_rows
from vllm_gaudi_ucm.ops.narrow_floats import E4M3, narrow

MIXED = [
    Request(9, 1, prefix=2),
    Request(12, 1, prefix=3),
    Request(0, 1),
    Request(8, 7, prefix=2),
    Request(5, 3, family=1, prefix=1),
    Request(0, 11),
    Request(14, 4, chosen=frozenset({1})),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("selected", [False, True])
def test_cuda_and_others_read_narrow_caches(implementation: str, dtype: torch.dtype, selected: bool) -> None:
    """NaN in everything that no row sees."""
    requests = MIXED if selected else [request for request in MIXED if not request.chosen]
    batch = over_narrow_cache(build(requests, Shape(dtype=dtype, dim=32, value_dim=32)))
    assert_matches(batch, implementation, prepared=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("selected", [False, True])
def test_cuda_and_others_read_narrow_latents(implementation: str, dtype: torch.dtype, selected: bool) -> None:
    """Values are a part of the keys, one KV head has them all."""
    requests = MIXED if selected else [request for request in MIXED if not request.chosen]
    shape = Shape(heads=20, kv_heads=1, dim=72, value_dim=64, dtype=dtype, memory="in keys")
    assert_matches(over_narrow_cache(build(requests, shape)), implementation, prepared=True)


def test_writing() -> None:
    """Rounded once; what is beyond the range is at its end, and NaN stays what it is."""
    key = torch.randn(3, 2, 16) * 100
    key[0, 0, :3] = torch.tensor([1e9, -500.0, torch.nan])
    caches = [torch.zeros(8, 2, 16, dtype=E4M3) for _ in range(2)]
    slots = torch.tensor([5, 2, 7])
    found, _ = write_kv(narrow(key), narrow(key), *caches, slots)
    latents = torch.zeros(8, 2, 16, dtype=E4M3)
    assert write_rows(narrow(key), latents, slots) is latents
    assert torch.equal(latents.view(torch.uint8), found.view(torch.uint8))
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


SELECTIONS = ("reference", "auto", "hpu", *(("cuda",) if CUDA_RUNS else ()))
EXACT = (SummaryKind.MINMAX, SummaryKind.HASH, SummaryKind.CODES)
"""Kinds whose summaries hold nothing that 8-bit floats round: extremes of what is in the cache, and codes."""


def on_gpu(candidates: Candidates) -> Candidates:
    if not torch.cuda.is_available():
        return candidates
    found = {one.name: getattr(candidates, one.name) for one in fields(candidates)}
    return replace(candidates, **{name: one.cuda() for name, one in found.items() if isinstance(one, Tensor)})


def narrow_summaries(cache: Tensor, blocks: Tensor, kind: SummaryKind, implementation: str) -> Tensor:
    """Everything but the summaries that were asked for is NaN."""
    summaries = new_summaries(cache, kind)
    summaries.view(torch.uint8).fill_(255 if kind.is_coded else 0x7F)
    write_summaries(cache, blocks, summaries, kind, implementation=implementation)
    return summaries


@pytest.mark.parametrize("kind", list(SummaryKind))
@pytest.mark.parametrize("implementation", SELECTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_and_others_score_narrow_summaries(implementation: str, kind: SummaryKind, dtype: torch.dtype) -> None:
    """Of summaries that 8-bit floats hold exactly scores are those by definition; means are rounded once, by 1/16."""
    candidates = build_candidates(Case(block_size=64, dim=32, dtype=dtype, seed=7))
    assert not kind.is_coded or not may_round_differently(candidates, kind)
    candidates.key_cache = rounded(candidates.key_cache.float())
    expected = torch.from_numpy(expected_scores(candidates, kind))
    candidates.key_cache = candidates.key_cache.to(E4M3)
    candidates = on_gpu(candidates) if implementation == "cuda" else candidates
    summaries = narrow_summaries(candidates.key_cache, candidates.blocks, kind, implementation)
    assert summaries.dtype == (torch.uint8 if kind.is_coded else E4M3)
    used = candidates.blocks[candidates.blocks > 0]
    if not kind.is_coded:
        exact = summarise(candidates.key_cache.float().index_select(0, used), kind)
        found = summaries.float()[used]
        assert found.isfinite().all()
        assert bool(((found - exact).abs() <= exact.abs() / 16 + 2.0**-10 + 1e-6).all())
        others = sorted(set(range(1, len(summaries))) - set(used.tolist()))
        assert summaries.float()[others].isnan().all(), "of blocks that nobody asked for"
    scores = candidates.scores(kind, summaries=summaries, implementation=implementation)
    assert scores.isfinite().all()
    near = (2e-3 if dtype == torch.bfloat16 else 2e-5) if kind in EXACT else 0.03
    torch.testing.assert_close(scores.double().cpu(), expected, atol=near, rtol=near)
    reference = candidates.scores(kind, summaries=summaries, implementation="reference")
    torch.testing.assert_close(scores, reference, atol=2e-3 if dtype == torch.bfloat16 else 2e-5, rtol=2e-3)


def test_a_narrow_block_that_is_no_number_comes_first() -> None:
    """Its score is 1, of each implementation; Triton's interpreter takes it for 480 when it reads it."""
    candidates = build_candidates(Case())
    candidates.key_cache = candidates.key_cache.to(E4M3)
    candidates.key_cache.view(torch.uint8)[candidates.blocks[2], 3, 1, 5] = 0x7F
    for name in ("reference", "auto", "hpu"):
        summaries = narrow_summaries(candidates.key_cache, candidates.blocks, SummaryKind.BOX_MEAN, name)
        scores = candidates.scores(SummaryKind.BOX_MEAN, summaries=summaries, implementation=name)
        assert scores.isfinite().all()
        assert scores[2] == 1


def test_native_reads_every_number() -> None:
    """All 256 codes as keys of one element: the score of each block against its definition in float64."""
    codes = torch.arange(256, dtype=torch.uint8).view(256, 1, 1, 1).expand(256, 1, 1, 16).contiguous()
    summaries = codes.view(E4M3)
    query, ids = torch.full((1, 1, 16), 1.0 / 64), torch.arange(256)
    zeros, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    arguments = (query, summaries, ids, torch.zeros(256, dtype=torch.int64), zeros, one, 1, 0.1, SummaryKind.MEAN)
    expected = torch.softmax(summaries[:, 0, 0, 0].double().nan_to_num(-1e30) * 16 / 64 * 0.1, 0)
    expected[[0x7F, 0xFF]] = 1.0
    torch.testing.assert_close(block_scores(*arguments).double(), expected, atol=1e-7, rtol=1e-4)
