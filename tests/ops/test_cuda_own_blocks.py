"""Blocks that the rows of one request alone use, on CUDA. Runs where test_cuda_attention.py runs."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.batch import Memory, Request, Shape, build
from tests.ops.launches import launched
from tests.ops.oracle import CUDA_RUNS, assert_matches, attend, examples, on_gpu
from tests.ops.padding import Pads, pad
from tests.ops.unified_attention import COMMON
from vllm_gaudi_ucm.ops.unified_attention.api import unified_attention
from vllm_gaudi_ucm.ops.unified_attention.parts import SharedPart

pytestmark = pytest.mark.skipif(not CUDA_RUNS, reason="no GPU, and not under Triton's interpreter")

BLOCK = 4
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# A chunk of several tiles, verifications whose contexts end at a block and within one, a shared prefix, a decode.
ROWS = [
    Request(3 * 64 + 5, 40),
    Request(2 * 64, 3),
    Request(70, 5),
    Request(64 + 9, 6, prefix=1),
    Request(64, 4, prefix=1),
    Request(80, 1),
]


class Uses(NamedTuple):
    """Spans of rows, and ranges [lo, hi) of blocks by span."""

    row_spans: Tensor
    lo: Tensor
    hi: Tensor

    def part(self) -> SharedPart:
        blocks = 7 * torch.arange(self.hi.shape[1]) + 3
        return SharedPart(*(tensor.to(DEVICE) for tensor in (blocks, self.row_spans, self.lo, self.hi)), ())


@st.composite
def uses(draw: st.DrawFn) -> Uses:
    """Rows of a span lie anywhere, some spans have none; a block has no user, one, or several."""
    spans, columns = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    rows = draw(st.lists(st.integers(0, spans - 1), min_size=1, max_size=40))
    ends = st.sampled_from([0, 0, 0, 1, BLOCK, BLOCK, BLOCK + 2])
    hi = draw(st.lists(ends, min_size=spans * columns, max_size=spans * columns))
    lo = draw(st.lists(st.sampled_from([-1, 0, 0, 2]), min_size=spans * columns, max_size=spans * columns))
    ranges = (torch.tensor(bounds).view(spans, columns) for bounds in (lo, hi))
    return Uses(torch.tensor(rows), *ranges)


@given(uses=uses(), rows_per_tile=st.sampled_from([1, 3, 16]), step=st.sampled_from([16, 256]))
@settings(COMMON, max_examples=examples(400))
def test_the_work_of_a_span_is_its_rows_times_its_blocks(uses: Uses, rows_per_tile: int, step: int) -> None:
    """Each row of a span with own blocks is in one tile, all of whose rows are the span's; no tile is for nothing."""
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import own as cuda_own

    part, rows = uses.part(), uses.row_spans.tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_own, "STEP", step)
        division = cuda_own.divide(part, BLOCK)
        tiles, spans = cuda_own._tiles(part, division, BLOCK, len(rows), rows_per_tile)
    used = uses.hi.clamp(max=BLOCK) > uses.lo.clamp(min=0)
    own = used & (used.sum(0) == 1)
    assert torch.equal(division.common.hi.cpu(), uses.hi.masked_fill(used.sum(0) <= 1, 0).int())
    order, place, offsets = (tensor.tolist() for tensor in (tiles.order, tiles.place, tiles.offsets))
    work = 0
    for span in range(len(own)):
        mine, columns = [row for row, of in enumerate(rows) if of == span], own[span].nonzero().flatten().tolist()
        count, whole = len(columns), int(tiles.whole_counts[span])
        listed = tiles.columns[span, :count].tolist()
        assert sorted(listed) == columns
        assert tiles.column_blocks[span, :count].tolist() == [7 * column + 3 for column in listed]
        seen = [column for column in columns if uses.lo[span, column] <= 0 and uses.hi[span, column] >= BLOCK]
        assert listed[:whole] == seen
        assert all((place[row] >= 0) == bool(columns) for row in mine)
        if not columns:
            continue
        used_tiles = {place[row] // rows_per_tile for row in mine}
        assert len(used_tiles) == -(-len(mine) // rows_per_tile)
        assert all(order[place[row]] == row for row in mine)
        for tile in used_tiles:
            assert int(spans[tile]) == span
            assert offsets[tile + 1] - offsets[tile] == count
        work += len(used_tiles) * count
    assert offsets[-1] == work
    assert sum(row >= 0 for row in order) == sum(at >= 0 for at in place)


@pytest.mark.parametrize(("programs", "continued"), [(1, 1), (3, 1), (40, 1), (3, 1 << 30)])
def test_shares_that_cut_tiles_anywhere(monkeypatch: pytest.MonkeyPatch, programs: int, continued: int) -> None:
    """covers: A13, A22. Of chunks of several tiles, and of verifications; whole blocks by the copy engine, too. The
    causal part begins with what was found, or a merge adds both."""
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import attend as cuda_attend
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import own as cuda_own
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.plan import Tile

    monkeypatch.setattr(cuda_attend, "CONTINUED", continued)
    monkeypatch.setattr(cuda_own, "programs_of", lambda *_: programs)
    monkeypatch.setattr(cuda_own, "own_tile", lambda layer: Tile(16, 32, 3, 4))
    assert_matches(build(ROWS, Shape(block_size=64)), "cuda", prepared=True)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim", "dtype", "block_size", "memory"),
    [
        (4, 2, 64, 64, torch.bfloat16, 128, "pairs by token"),
        (6, 2, 96, 96, torch.float16, 16, "pairs by head"),
        (16, 1, 16, 16, torch.float16, 16, "dense"),
        (2, 2, 256, 256, torch.float32, 32, "dense"),
        (9, 3, 20, 36, torch.float32, 1, "holes"),
    ],
)
def test_heads_blocks_and_memory(
    heads: int, kv_heads: int, dim: int, value_dim: int, dtype: torch.dtype, block_size: int, memory: Memory
) -> None:
    """covers: A12. Any head size up to 256, any ratio of heads, any block size and layout of the cache."""
    requests = [
        Request(3 * block_size + block_size // 2, 18),
        Request(2 * block_size, 3),
        Request(block_size, 2, prefix=1),
        Request(2 * block_size + 1, 4, prefix=1),
    ]
    shape = Shape(heads, kv_heads, dim, value_dim, block_size, dtype, memory=memory)
    assert_matches(build(requests, shape), "cuda", prepared=True)


@pytest.mark.parametrize("seed", [0, 1])
def test_ranges_within_own_blocks(seed: int) -> None:
    """covers: A5. Any [lo, hi) of a request's own blocks, as a sliding window leaves them."""
    batch = build([Request(23, 5), Request(16, 20), Request(9, 3, prefix=1), Request(4, 2, prefix=1)], Shape())
    part, random = batch.parts.shared, torch.Generator().manual_seed(seed)
    assert part is not None
    own = (part.hi > 0) & ((part.hi > 0).sum(0) == 1)
    assert own.sum() > 8
    part.lo[own] = torch.randint(0, 3, (int(own.sum()),), generator=random, dtype=torch.int32)
    part.hi[own] -= torch.randint(0, 2, (int(own.sum()),), generator=random, dtype=torch.int32)
    torch.testing.assert_close(attend(batch, "cuda"), attend(batch, "reference"))


def test_a_step_of_decodes_derives_nothing_of_own_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its single rows have their own blocks in the unique part."""
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import attend as cuda_attend

    monkeypatch.setattr(cuda_attend, "own", None)
    monkeypatch.setattr(cuda_attend, "divide", None)
    assert_matches(build([Request(9, 1, prefix=2), Request(12, 1, prefix=2)], Shape()), "cuda", prepared=True)


def test_garbage_where_the_causal_part_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: A9, D8. What is broken in an own block breaks its rows, and these alone."""
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import attend as cuda_attend

    monkeypatch.setattr(cuda_attend, "CONTINUED", 1)
    batch = build([Request(9, 5), Request(6, 3), Request(5, 2, prefix=1), Request(4, 6, prefix=1)], Shape(poison=1e4))
    expected = attend(batch, "reference")
    torch.testing.assert_close(attend(batch, "cuda"), expected)
    batch.value_cache[batch.tables[0][1], 2, 0, 3] = float("nan")
    out = attend(batch, "cuda")
    # the first kv head has the first half of the query heads
    assert out[:5, :2].isnan().all()
    expected[:5, :2] = float("nan")
    torch.testing.assert_close(out, expected, equal_nan=True)


def test_a_mixed_bucket_launches_what_the_true_shape_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket counts every row that may be a single one, and so would choose the loop of many."""
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import parts as cuda_parts
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.plan import Tile

    monkeypatch.setattr(cuda_parts, "MANY_SPANS", 4)
    monkeypatch.setattr(cuda_parts, "flat_spans_tile", lambda *_: Tile(16, 16, 2, 4))
    batch = build([Request(40, 1), Request(70, 1), Request(50, 12)], Shape(block_size=16, pads=0))
    bucket = pad(batch, Pads(rows=20, shared=3, unique=4, spans=5, singles=9, phase="csu"), 0.0)
    names = []
    for one in (batch, bucket):
        with launched() as kernels:
            assert_matches(one, "cuda")
        names.append([name for name, _ in kernels])
    assert "attend_spans" in names[0]
    assert names[0] == names[1]


# Verifications with choices: one whose window ends within a block, one behind a shared prefix, one that chose nothing
# but lives on its own blocks; a decode with a choice, a dense verification, and a chunk.
CHOSEN = [
    Request(9, 1, chosen=frozenset({0})),
    Request(21, 4, chosen=frozenset({1, 2}), dropped=frozenset({0, 3})),
    Request(18, 3, prefix=1, chosen=frozenset({1})),
    Request(13, 2, prefix=1),
    Request(30, 12),
]


@pytest.mark.parametrize("of_layer", [False, True], ids=["of the plan", "of a layer"])
@pytest.mark.parametrize("padded", [False, True])
def test_own_blocks_beside_chosen_ones_are_one_list(of_layer: bool, padded: bool) -> None:
    """A launch attends to both; blocks of a request without a choice, and of one request beside others, stay apart."""
    batch = build(CHOSEN, Shape(pads=0 if padded else 3))
    selected = batch.parts.selected
    assert selected is not None
    assert selected.max_rows > 1
    if padded:
        batch = pad(batch, Pads(rows=5, shared=3, unique=4, spans=2, singles=3), 0.0)
        selected = batch.parts.selected
        assert selected is not None
    blocks = None
    if of_layer:
        blocks, selected.blocks[:] = selected.blocks.clone(), 0
    expected = attend(batch, "reference", selected_blocks=blocks)
    with launched() as kernels:
        found = attend(batch, "cuda", prepared=True, selected_blocks=blocks)
    torch.testing.assert_close(found, expected)
    names = [name for name, _ in kernels]
    assert names.count("attend_spans") == 2, "unique blocks, and those of requests with a choice"
    if not of_layer and not padded:
        assert_matches(batch, "cuda", prepared=True)


def test_a_choice_may_write_the_list_with_own_blocks() -> None:
    """What the list holds is not copied there."""
    from vllm_gaudi_ucm.ops.unified_attention.api import prepare

    batch = build(CHOSEN, Shape())
    if torch.cuda.is_available():
        batch = on_gpu(batch)
    selected = batch.parts.selected
    assert selected is not None
    ready = prepare(batch.parts, batch.key_cache.shape[1], implementation="cuda")
    target = ready.selected_list(batch.query.shape[0])
    assert target is not None
    assert torch.equal(target.blocks[target.places], selected.blocks)
    expected = attend(batch, "reference")
    target.blocks[target.places] = 0
    blocks = selected.blocks.clone()
    target.written(blocks)
    tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache)
    out = torch.empty(*batch.query.shape[:2], batch.value.shape[-1], dtype=batch.query.dtype, device=batch.query.device)
    for rewritten in (False, True):
        if rewritten:
            target.blocks[target.places] = blocks
        unified_attention(*tensors, ready, batch.spec, out, implementation="cuda", selected_blocks=blocks)
        assert torch.allclose(out.cpu(), expected, atol=1e-5) == rewritten


def test_own_blocks_are_those_of_the_choice_of_their_rows() -> None:
    """Requests with a choice need not be the first ones, nor all of those that have rows."""
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import own as cuda_own
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.plan import make_plan

    batch = build([Request(13, 2), Request(21, 4, chosen=frozenset({1})), Request(9, 3)], Shape(pads=0))
    if torch.cuda.is_available():
        batch = on_gpu(batch)
    shared, selected = batch.parts.shared, batch.parts.selected
    assert shared is not None
    assert selected is not None
    plan = make_plan(batch.parts, BLOCK)
    assert plan.joined_own
    assert plan.selected is None
    both = cuda_own.own_and_chosen(plan)
    users = (shared.hi > 0).sum(0)
    mine = shared.hi[int(shared.row_spans[int(selected.first_rows[0])])] > 0
    assert users[mine].eq(1).all()
    assert both.division.users[mine].eq(0).all()
    assert torch.equal(both.division.users[~mine], users[~mine].int())
    lists, chosen = both.joined.lists, selected.blocks[selected.hi > 0]
    count = int(mine.sum()) + len(chosen)
    assert lists.offsets[:2].tolist() == [0, count]
    assert sorted(lists.blocks[:count].tolist()) == sorted([*shared.blocks[mine].tolist(), *chosen.tolist()])
