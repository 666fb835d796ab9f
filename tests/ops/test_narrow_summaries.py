"""Summaries of 8-bit floats beside keys of more bits, against float64, for every implementation."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.oracle import CUDA_RUNS
from tests.ops.selection import Candidates, Case, build, expected_scores
from vllm_gaudi_ucm.ops.block_selection.api import new_summaries, write_summaries
from vllm_gaudi_ucm.ops.block_selection.features import REST_WEIGHT, TOWARDS_BOUND, SummaryKind, summarise
from vllm_gaudi_ucm.ops.narrow_floats import E4M3

FLOATS = (SummaryKind.MEAN, SummaryKind.MINMAX, SummaryKind.BOX_MEAN)
NAMES = ("reference", "auto", "hpu", *(("cuda", "cuda_fused") if CUDA_RUNS else ()))
LARGEST, RELATIVE, ABSOLUTE = 448.0, 2.0**-4, 2.0**-10
"""Of e4m3: 3 bits of a fraction, so half a step is 1/16 of a number at most; below 2^-6 half a step is 2^-10."""


def narrow_summaries(candidates: Candidates, kind: SummaryKind, implementation: str) -> Tensor:
    """NaN in those of blocks that nobody asked for."""
    summaries = new_summaries(candidates.key_cache, kind, narrow=True)
    summaries.view(torch.uint8).fill_(0x7F)
    write_summaries(candidates.key_cache, candidates.blocks, summaries, kind, implementation=implementation)
    return summaries


def on_device(candidates: Candidates, implementation: str) -> Candidates:
    if not implementation.startswith("cuda") or not torch.cuda.is_available():
        return candidates
    found = {one.name: getattr(candidates, one.name) for one in fields(candidates)}
    return replace(candidates, **{name: one.cuda() for name, one in found.items() if isinstance(one, Tensor)})


def scores_of(candidates: Candidates, summaries: Tensor, kind: SummaryKind) -> np.ndarray:
    """float64 [candidates]: the definition, of summaries as they are kept."""
    result = np.zeros(candidates.blocks.shape[0])
    query, kept = candidates.query.double().cpu().numpy(), summaries.float().double().cpu().numpy()
    heads, kv_heads = query.shape[1], kept.shape[2]
    for rows, entries in candidates.meant:
        for row in rows:
            for head in range(heads):
                blocks = candidates.blocks[entries].cpu().numpy()
                boxes, one = kept[blocks, :, head * kv_heads // heads], query[row, head]
                if kind is SummaryKind.MINMAX:
                    middle, reach = boxes.mean(1), (boxes[:, 1] - boxes[:, 0]) / 2
                    found = (middle @ one + TOWARDS_BOUND * (reach @ np.abs(one))) * candidates.scale
                else:
                    found = boxes @ one * candidates.scale
                    found[:, 0] += np.log(REST_WEIGHT)
                    found = np.logaddexp.reduce(found, 1)
                share = np.exp(found - found.max())
                result[entries] += share / share.sum() / (len(rows) * heads)
    return result


def most_apart(candidates: Candidates, kind: SummaryKind) -> float:
    """How far an estimate may be from that of unrounded summaries: what each element may be off, times the query.

    A logarithm of sums of exponents moves no further than the largest of its terms does. Halfway to the bound the query
    multiplies middle and reach of two extremes, each of which is off by no more than the larger of both.
    """
    used = candidates.blocks[candidates.blocks > 0]
    kept = summarise(candidates.key_cache.index_select(0, used), kind).double()
    off = (kept.abs() * RELATIVE + ABSOLUTE).amax((0, 1)).amax(0)
    rows = torch.cat([torch.arange(rows.start, rows.stop) for rows, _ in candidates.meant])
    most = float((candidates.query.double()[rows].abs() @ off).max()) * candidates.scale
    return most * (1 + TOWARDS_BOUND) if kind is SummaryKind.MINMAX else most


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cuda_and_others_keep_and_score_them(implementation: str, kind: SummaryKind, dtype: torch.dtype) -> None:
    """Each element is rounded once; scores are those of what is kept, and as near to the exact ones as that allows."""
    candidates = build(Case(block_size=64, dim=32, dtype=dtype, seed=5))
    used = candidates.blocks[candidates.blocks > 0]
    candidates.key_cache[used] *= torch.exp2(torch.linspace(-6, 1, 32)).to(dtype)
    exact, most = expected_scores(candidates, kind), most_apart(candidates, kind)
    wanted = summarise(candidates.key_cache.index_select(0, used), kind)
    candidates = on_device(candidates, implementation)
    summaries = narrow_summaries(candidates, kind, implementation)
    assert summaries.dtype == E4M3
    found = summaries.cpu().float()[used]
    assert bool(((found - wanted).abs() <= wanted.abs() * RELATIVE + ABSOLUTE + 1e-6).all())
    others = sorted(set(range(1, len(summaries))) - set(used.tolist()))
    assert summaries.cpu().float()[others].isnan().all()
    scores = candidates.scores(kind, summaries=summaries, implementation=implementation)
    near = 2e-5 if dtype == torch.float32 else 2e-3
    kept = torch.from_numpy(scores_of(candidates, summaries, kind))
    torch.testing.assert_close(scores.double().cpu(), kept, atol=near, rtol=near)
    ratio = np.abs(np.log(np.where(exact > 0, kept.numpy() / np.where(exact > 0, exact, 1), 1)))
    assert 0 < ratio.max() <= 2 * most + 1e-6, "numerator and sum of a share both move by what an estimate does"


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("implementation", NAMES)
def test_cuda_and_others_clip_what_is_beyond(implementation: str, kind: SummaryKind) -> None:
    """Never NaN: a block with a key beyond the range still comes first for a query along it."""
    candidates = build(Case(spans=((1, 6),), before=0, block_size=16, dim=32, heads=2, kv_heads=1))
    block = candidates.blocks[2]
    candidates.key_cache[block, :, :, 7] = 1e6 if kind is SummaryKind.MEAN else -3.0
    candidates.key_cache[block, 5, :, 7] = 1e6
    candidates.query[..., 7] = 2.0
    candidates = on_device(candidates, implementation)
    summaries = narrow_summaries(candidates, kind, implementation)
    kept = summaries.cpu().float()[candidates.blocks[candidates.blocks > 0].cpu()]
    assert not kept.isnan().any()
    assert kept.max() == LARGEST
    scores = candidates.scores(kind, summaries=summaries, implementation=implementation)
    assert int(scores.argmax()) == 2


@pytest.mark.parametrize("implementation", ["reference", "auto", "hpu"])
def test_a_block_that_is_no_number_comes_first(implementation: str) -> None:
    """As with summaries of more bits; Triton's interpreter reads NaN of 8-bit floats as 480."""
    candidates = build(Case())
    candidates.key_cache[candidates.blocks[2], 3, 1, 5] = torch.nan
    summaries = narrow_summaries(candidates, SummaryKind.BOX_MEAN, implementation)
    scores = candidates.scores(SummaryKind.BOX_MEAN, summaries=summaries, implementation=implementation)
    assert scores.isfinite().all()
    assert scores[2] == 1


def test_codes_stay_bytes_and_narrow_keys_what_they_are() -> None:
    cache = torch.randn(3, 16, 2, 8)
    assert new_summaries(cache, SummaryKind.HASH, narrow=True).dtype == torch.uint8
    assert new_summaries(cache, SummaryKind.MEAN).dtype == torch.float32
    for keys in (cache, cache.bfloat16()):
        wide, half = (new_summaries(keys, SummaryKind.BOX_MEAN, narrow=narrow) for narrow in (False, True))
        assert half.nbytes * keys.itemsize == wide.nbytes
    assert new_summaries(cache.to(E4M3), SummaryKind.MEAN).dtype == E4M3
