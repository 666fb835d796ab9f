"""Rows choose the tokens of the highest scores, and attention over them is exact."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.oracle import CUDA_RUNS
from vllm_gaudi_ucm.batch.batch_plan import BatchInput, plan_batch
from vllm_gaudi_ucm.ops.chosen_tokens.api import attend_tokens, choose_tokens, most_seen
from vllm_gaudi_ucm.ops.chosen_tokens.impl import tiled
from vllm_gaudi_ucm.ops.chosen_tokens.impl.cuda import chosen as cuda
from vllm_gaudi_ucm.ops.chosen_tokens.implementation import IndexRows, TokenPlaces
from vllm_gaudi_ucm.ops.narrow_floats import E4M3
from vllm_gaudi_ucm.ops.unified_attention.parts import (
    AttentionParts,
    CausalPart,
    CausalSlice,
    SharedGroup,
    SharedPart,
    UniquePart,
)

BLOCK, HEADS, DIM, VALUES, BLOCKS = 4, 3, 8, 6, 64
# `cuda` on a GPU, or on a CPU in the process of test_interpreter.py
IMPLEMENTATIONS = ("reference", "tiled", *(("cuda",) if CUDA_RUNS else ()))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Step(NamedTuple):
    """A step whose index keys and latents are all in the caches. seen: slots of the tokens that each row sees."""

    index: IndexRows
    keys: Tensor
    places: TokenPlaces
    query: Tensor
    cache: Tensor
    seen: list[list[int]]


# computed and new tokens: decodes, with a common prefix, drafts, chunks, whole prompts
STEPS = {
    "decodes": [(9, 1), (0, 1), (30, 1), (17, 1)],
    "a chunk": [(21, 13)],
    "whole prompts": [(0, 11), (0, 30), (0, 2)],
    "all": [(9, 1), (40, 4), (0, 20), (33, 1), (8, 8), (16, 3)],
}


def make(name: str, *, sharing: bool, contiguous: bool, dtype: torch.dtype = torch.float64, seed: int = 0) -> Step:
    """Makes a step of the planner. Slots that no row sees hold no number."""
    rng, torch_rng = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    requests = STEPS[name]
    free = rng.permutation(np.arange(1, BLOCKS)).astype(np.int32)
    table = np.zeros((len(requests), 16), np.int32)
    for row, (computed, new) in enumerate(requests):
        count = -(-(computed + new) // BLOCK)
        table[row, :count], free = free[:count], free[count:]
        if sharing and computed >= 2 * BLOCK:
            # of the first request, too
            table[row, :2] = table[0, :2]
    computed, new = (np.array(column, np.int32) for column in zip(*requests, strict=True))
    plan = plan_batch(BatchInput(computed, new, computed + new, (table,)), BLOCK, 7)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch_rng, dtype=torch.float64).to(dtype)

    slots_of = [
        [int(table[request, token // BLOCK]) * BLOCK + token % BLOCK for token in range(position + 1)]
        for request, position in zip(plan.requests[plan.row_requests], plan.positions, strict=True)
    ]
    keys, cache = random(BLOCKS * BLOCK, DIM), random(BLOCKS * BLOCK, DIM)
    unseen = sorted(set(range(len(keys))) - {slot for slots in slots_of for slot in slots})
    keys[unseen], cache[unseen] = torch.nan, torch.nan
    slots = torch.from_numpy(plan.slots)
    # few values, so that many scores are equal
    query, weights = random(len(slots), HEADS, DIM), random(len(slots), HEADS)
    query[:, :, 1:], keys[:, 1:] = 0, torch.where(keys[:, 1:].isnan(), keys[:, 1:], 0)
    keys[:, 0] = keys[:, 0].mul(2).round()
    # sums that are exact in any order
    index = IndexRows(query.mul(4).round(), keys[slots], weights.mul(4).round())
    places = TokenPlaces(_parts(plan, contiguous), slots, BLOCK)
    return Step(index, keys, places, random(len(slots), 2, DIM), cache, slots_of)


def moved(value: Any) -> Any:
    """Returns tensors in tuples of any kind on the GPU, if there is one."""
    if isinstance(value, Tensor):
        return value.to(DEVICE)
    if isinstance(value, tuple):
        items = [moved(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def _parts(plan: object, contiguous: bool) -> AttentionParts:
    causal = shared = unique = None
    if plan.causal is not None:
        slices = tuple(CausalSlice(*bounds) for bounds in plan.causal.slices)
        causal = CausalPart(torch.from_numpy(plan.causal.groups), slices)
    if plan.shared is not None:
        blocks, rows, lo, hi = (
            torch.from_numpy(array) for array in (plan.shared.blocks, plan.row_requests, plan.shared.lo, plan.shared.hi)
        )
        groups = tuple(SharedGroup(torch.from_numpy(rows), lo, hi) for rows, lo, hi in plan.shared.groups)
        most = plan.shared.most_of_request if contiguous else None
        shared = SharedPart(blocks, rows, lo, hi, groups, most_of_span=most)
    if plan.unique is not None:
        own = plan.unique
        count = np.bincount(own.rows)
        columns = [own.rows, own.lo, own.hi, np.arange(len(own.rows)) - (count.cumsum() - count)[own.rows]]
        at = own.blocks if contiguous else np.arange(len(own.rows))
        # entries of a slice of the cache, of which most belong to no row
        columns = [_scattered(column, at) for column in columns] if contiguous else columns
        rows, lo, hi, places = (torch.from_numpy(np.ascontiguousarray(column)) for column in columns)
        blocks = None if contiguous else torch.from_numpy(own.blocks)
        most = int(count.max())
        unique = UniquePart(blocks, rows, lo, hi, plan.num_single, most_of_row=most, places=places)
    return AttentionParts(causal, shared, unique)


def _scattered(column: np.ndarray, at: np.ndarray) -> np.ndarray:
    found = np.zeros(BLOCKS, column.dtype)
    found[at] = column
    return found


# other steps have the parts of these
QUICK = ("decodes", "all")
CASES = [(one, name) for one in IMPLEMENTATIONS for name in (QUICK if one == "cuda" and DEVICE == "cpu" else STEPS)]


@pytest.mark.parametrize(("implementation", "name"), CASES)
@pytest.mark.parametrize(("sharing", "contiguous"), [(False, False), (True, False), (True, True)])
def test_best_tokens(
    implementation: str, name: str, sharing: bool, contiguous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of equal scores the first token; all tokens if there are fewer. Many small tiles give the same."""
    on_cuda = implementation == "cuda"
    for rows, numbers, count in ((64, 1 << 24, 5), (3, 40, 5), (64, 1 << 24, 1000))[on_cuda:]:
        monkeypatch.setattr(tiled, "ROWS", rows)
        monkeypatch.setattr(tiled, "NUMBERS", numbers)
        monkeypatch.setattr(cuda, "NUMBERS", numbers * 10)
        monkeypatch.setattr(cuda, "ATTENDED", rows)
        monkeypatch.setattr(cuda, "PIECE", 4096 if rows == 64 else 32)
        step = make(name, sharing=sharing, contiguous=contiguous, dtype=torch.float32 if on_cuda else torch.float64)
        index, keys, places, query, cache, _ = moved(step) if on_cuda else step
        found = choose_tokens(index, keys, places, count, implementation=implementation)
        assert found.shape == (len(step.seen), min(count, most_seen(step.places.parts, BLOCK)))
        attended = attend_tokens(query, cache, found, 0.7, VALUES, implementation=implementation).cpu()
        for row, seen in enumerate(step.seen):
            products = torch.relu(step.index.query[row] @ step.keys[seen].T)
            scores = (step.index.weights[row] @ products).tolist()
            best = sorted(sorted(range(len(seen)), key=lambda token: (-scores[token], token))[:count])
            expected = [seen[token] for token in best]
            assert found[row].tolist() == expected + [-1] * (found.shape[1] - len(expected))
            weights = torch.softmax(step.query[row] @ step.cache[expected].T * 0.7, -1)
            torch.testing.assert_close(attended[row], weights @ step.cache[expected, :VALUES])


@pytest.mark.skipif(not CUDA_RUNS, reason="no GPU, and not under Triton's interpreter")
@pytest.mark.parametrize("cached", [torch.bfloat16, E4M3])
def test_attention_on_cuda_in_low_precision(cached: torch.dtype) -> None:
    """It equals torch's tiles over latents in bfloat16 and in 8-bit floats, with heads in several groups."""
    random = torch.Generator().manual_seed(0)
    query = torch.randn((5, 80, 40), generator=random).bfloat16()
    cache = torch.randn((60, 40), generator=random).to(cached)
    slots = torch.stack([torch.randperm(60, generator=random)[:33] for _ in range(5)])
    slots[1, 7:], slots[3] = -1, -1
    found = [
        attend_tokens(*moved((query, cache, slots)), 0.2, 32, implementation=name).cpu() for name in ("cuda", "tiled")
    ]
    torch.testing.assert_close(*found, atol=0.02, rtol=0.02)
    assert not found[0][3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_in_low_precision(dtype: torch.dtype) -> None:
    """No further from float64 than twice the reference of the same dtype, but for a few roundings."""
    step = make("all", sharing=True, contiguous=False, dtype=dtype)
    slots = choose_tokens(step.index, step.keys, step.places, 9)
    assert torch.equal(slots, choose_tokens(step.index, step.keys, step.places, 9, implementation="reference"))
    exact = attend_tokens(step.query.double(), step.cache.double(), slots, 0.7, VALUES, implementation="reference")
    errors = [
        (attend_tokens(step.query, step.cache, slots, 0.7, VALUES, implementation=name).double() - exact).abs().max()
        for name in ("tiled", "reference")
    ]
    assert errors[0] <= 2 * errors[1] + 4 * torch.finfo(dtype).eps


def test_rows_that_see_nothing_are_zeros() -> None:
    """Pads choose nothing."""
    causal = CausalPart(torch.tensor([-1, 0, 0, -1], dtype=torch.int32), (CausalSlice(0, 4, 0, 4),))
    slots = torch.tensor([0, 5, 6, 0])
    keys = torch.full((8, DIM), torch.nan)
    keys[[5, 6]] = 1.0
    index = IndexRows(torch.ones(4, HEADS, DIM), keys[slots], torch.ones(4, HEADS))
    for name in ("reference", "tiled"):
        found = choose_tokens(index, keys, TokenPlaces(AttentionParts(causal), slots, BLOCK), 2, implementation=name)
        assert found.tolist() == [[-1, -1], [5, -1], [5, 6], [-1, -1]]
        attended = attend_tokens(torch.ones(4, 2, DIM), keys, found, 1.0, VALUES, implementation=name)
        assert attended[[0, 3]].eq(0).all()
        assert attended[[1, 2]].eq(1).all()


def test_what_does_not_fit_is_refused() -> None:
    step = make("decodes", sharing=False, contiguous=False)
    with pytest.raises(ValueError, match=r"weights is \(4, 1\), expected \(4, 3\)"):
        choose_tokens(step.index._replace(weights=step.index.weights[:, :1]), step.keys, step.places, 2)
    with pytest.raises(ValueError, match=r"count is 0, expected at least 1"):
        choose_tokens(step.index, step.keys, step.places, 0)
    bare = step.places.parts._replace(unique=step.places.parts.unique._replace(places=None))
    with pytest.raises(ValueError, match=r"a unique part without places"):
        choose_tokens(step.index, step.keys, step.places._replace(parts=bare), 2)
    with pytest.raises(ValueError, match=r"attend_tokens: query \(4, 2, 8\), cache \(256, 7\)"):
        attend_tokens(step.query, step.cache[:, :7], torch.zeros(4, 1), 1.0, VALUES)
