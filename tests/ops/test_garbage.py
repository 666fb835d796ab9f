"""NaN and Inf: what a row does not use never reaches it, what it does use stays visible in it."""

from __future__ import annotations

import math

import pytest
import torch

from tests.ops.batch import Batch, Request, Shape, build
from tests.ops.garbage import check_key_element, check_value_element
from tests.ops.oracle import IMPLEMENTATIONS, assert_matches, attend, on_gpu
from vllm_gaudi_ucm.ops.unified_attention.api import prepare
from vllm_gaudi_ucm.ops.unified_attention.impl.cpu import plan as cpu_plan
from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts, SharedGroup, SharedPart, UniquePart
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec

pytestmark = pytest.mark.slow  # many batches through every implementation

REQUESTS = [Request(0, 1), Request(9, 1, prefix=1), Request(5, 1, prefix=1), Request(6, 5, prefix=1), Request(0, 6)]


def _rows(batch: Batch, request: int) -> range:
    first = batch.first_row[request]
    return range(first, first + batch.requests[request].new)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("request_index", range(len(REQUESTS)))
def test_a_bad_token_breaks_exactly_the_rows_that_see_it(
    implementation: str, bad: float, which: str, request_index: int
) -> None:
    """covers: A9. The last new token of one request is broken: its last row is not finite, all others are exact."""
    batch = build(REQUESTS, Shape(poison=1e4))
    last = _rows(batch, request_index)[-1]
    expected = attend(batch, "reference")
    slot = divmod(int(batch.slots[last]), batch.key_cache.shape[1])
    tensors = (batch.key, batch.key_cache) if which == "key" else (batch.value, batch.value_cache)
    for tensor, place in zip(tensors, (last, slot), strict=True):
        tensor[place] = bad
    out = attend(batch, implementation)
    assert not torch.isfinite(out[last]).all(-1).any(), "a broken token must stay detectable"
    others = [row for row in range(out.shape[0]) if row != last]
    torch.testing.assert_close(out[others], expected[others])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_bad_element_of_a_value_is_nan_in_the_heads_that_read_it(implementation: str) -> None:
    """covers: A9, D8."""
    check_value_element(implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_bad_element_of_a_key_is_nan_or_has_no_weight(implementation: str) -> None:
    """covers: A9, D8."""
    check_key_element(implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_bad_shared_token_breaks_all_its_users(implementation: str) -> None:
    batch = build(REQUESTS, Shape(poison=1e4))
    block = batch.tables[1][0]
    users = [row for index in (1, 2, 3) for row in _rows(batch, index)]
    assert all(batch.tables[index][0] == block for index in (2, 3))
    expected = attend(batch, "reference")
    batch.value_cache[block, 2] = math.nan
    out = attend(batch, implementation)
    assert out[users].isnan().all()
    others = [row for row in range(out.shape[0]) if row not in users]
    torch.testing.assert_close(out[others], expected[others])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bad_row", range(14))
def test_a_bad_query_breaks_its_own_row_only(implementation: str, bad_row: int) -> None:
    batch = build(REQUESTS, Shape(poison=1e4, pads=0))
    expected = attend(batch, "reference")
    batch.query[bad_row] = math.nan
    out = attend(batch, implementation)
    assert out[bad_row].isnan().all()
    others = [row for row in range(out.shape[0]) if row != bad_row]
    torch.testing.assert_close(out[others], expected[others])


@pytest.mark.parametrize("poison", [1e4, 0.0])
@pytest.mark.parametrize("loose", [False, True])
def test_cpu_needs_no_reference_for_finite_garbage(poison: float, loose: bool) -> None:
    """Else the tests of `cpu` would be tests of the reference, and so would its speed."""
    batch = build(REQUESTS, Shape(poison=poison, loose=loose))
    cpu = ATTENTION.make("cpu")
    plan = cpu.plan(batch.parts, batch.key_cache.shape[1])
    out = torch.full_like(batch.query, math.nan)
    assert cpu.attend(batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache, plan, batch.spec, out)
    torch.testing.assert_close(out, attend(batch, "reference"))
    assert_matches(batch, "cpu", prepared=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["key", "value"])
def test_torchs_cpu_kernel_never_turns_garbage_into_a_finite_wrong_number(which: str, bad: float) -> None:
    """What `impl/cpu/attention.py` rests on; a torch release that breaks it must fail here."""
    generator = torch.Generator().manual_seed(0)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    for tokens in (2, 3, 7, 16, 17, 33, 128, 513):
        for rows in (1, 3, 33):
            query, key, value = (torch.randn(1, 2, n, 64, generator=generator) for n in (rows, tokens, tokens))
            masked = int(torch.randint(tokens, (), generator=generator))
            bias = torch.zeros(1, 1, 1, tokens)
            bias[..., masked] = -math.inf
            exact, _ = kernel(query, key, value, attn_mask=bias)
            (key if which == "key" else value)[:, :, masked] = bad
            out, _ = kernel(query, key, value, attn_mask=bias)
            finite = out.isfinite()
            torch.testing.assert_close(out[finite], exact[finite])
            if bad != -math.inf:
                seen, _ = kernel(query, key, value, attn_mask=torch.zeros(1, 1, 1, tokens))
                assert not seen.isfinite().all(-1).any()


def test_torchs_cpu_kernel_shows_rows_whose_scores_are_all_nan() -> None:
    """With a bias always, without one from `SHORT` tokens on: below, torch 2.13 returns zeros."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    for tokens in (*range(1, 70), 511, 512, 513, 527, 529, 1025):
        query, key = torch.full((1, 1, tokens, 16), math.nan), torch.randn(1, 1, tokens, 16)
        biased, _ = kernel(query, key, key, attn_mask=torch.zeros(1, 1, 1, tokens))
        assert biased.isnan().all()
        if tokens >= cpu_plan.SHORT:
            assert kernel(query, key, key)[0].isnan().all()
            assert kernel(query, key, key, is_causal=True)[0].isnan().all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("contiguous", [False, True])
def test_arbitrary_ranges_of_every_pair(implementation: str, contiguous: bool) -> None:
    """covers: A5, A14. Any [lo, hi) per (span, block), rows of a group in any order, rows that see nothing."""
    random = torch.Generator().manual_seed(1)
    rows, heads, dim, block_size, num_blocks = 6, 2, 16, 4, 9
    query = torch.randn(rows, heads, dim, generator=random)
    key_cache, value_cache = torch.randn(2, num_blocks, block_size, 1, dim, generator=random)
    new = torch.full((rows, 1, dim), math.nan)
    spans = torch.tensor([0, 1, 1, 2, 3, 3])
    shared = torch.tensor([7, 3, 5])
    lo = torch.randint(-1, block_size, (4, 3), generator=random, dtype=torch.int32)
    hi = torch.randint(0, block_size + 2, (4, 3), generator=random, dtype=torch.int32)
    lo[0], hi[0], hi[3] = 3, 2, 0
    order = torch.tensor([4, 1, 0, 2, 5, 3])
    groups = (SharedGroup(order, 0, 2), SharedGroup(order[1:], 2, 3), SharedGroup(order[:1], 2, 3))
    owners = torch.tensor([0, 2, 2, 0, 1, 1, 2, 1, 0])
    own_lo = torch.tensor([0, 2, 0, 3, 0, 1, 0, 0, 2], dtype=torch.int32)
    own_hi = torch.tensor([4, 4, 4, 3, 0, 3, 1, 0, 3], dtype=torch.int32)
    ids = None if contiguous else torch.randperm(num_blocks, generator=random)
    unique = UniquePart(ids, owners, own_lo, own_hi, 3)
    parts = AttentionParts(None, SharedPart(shared, spans, lo, hi, groups), unique)
    visible = torch.zeros(rows, num_blocks, block_size, dtype=torch.int64)
    for row in range(rows):
        for column, block in enumerate(shared.tolist()):
            span = int(spans[row])
            visible[row, block, max(0, int(lo[span, column])) : max(0, int(hi[span, column]))] += 1
    for entry, row in enumerate(owners.tolist()):
        block = entry if ids is None else int(ids[entry])
        visible[row, block, int(own_lo[entry]) : int(own_hi[entry])] += 1
    # A pair that is both shared and unique counts twice: it has twice the weight in the softmax.
    scores = torch.einsum("rhd,btd->rhbt", query.double(), key_cache[:, :, 0].double()) * 0.25
    weights = torch.exp(scores) * visible[:, None]
    total = weights.sum((-1, -2))[..., None]
    exact = torch.einsum("rhbt,btd->rhd", weights, value_cache[:, :, 0].double())
    expected = torch.where(total == 0, 0.0, exact / total).float()
    batch = Batch(query, new, new, key_cache, value_cache, spans, parts, AttentionSpec(0.25), [None] * rows)
    assert (total == 0).any(), "some row sees nothing"
    torch.testing.assert_close(attend(batch, implementation), expected)
    there = on_gpu(batch).parts if implementation == "cuda" and torch.cuda.is_available() else parts
    assert prepare(there, block_size, implementation=implementation).implementation.name == implementation
