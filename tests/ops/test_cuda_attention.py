"""What only the CUDA implementation promises. Runs on a GPU, or on a CPU in the process of test_interpreter.py."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from tests.batch.batches import Request as Scheduled
from tests.batch.token_steps import TokenStep, token_steps
from tests.execution.true_shape_tensors import run_step
from tests.ops.batch import Memory, Request, Shape, build, requests_strategy, sparse_requests_strategy
from tests.ops.cuda_attention import MIXED
from tests.ops.garbage import check_key_element, check_value_element
from tests.ops.oracle import CUDA_RUNS, assert_matches, attend, examples
from tests.ops.padding import Pads, pad
from tests.ops.unified_attention import COMMON, shapes

pytestmark = pytest.mark.skipif(not CUDA_RUNS, reason="no GPU, and not under Triton's interpreter")


def _scaled(block_size: int) -> list[Request]:
    return [replace(r, cached=r.cached // 4 * block_size + r.cached % 4) for r in MIXED]


@given(requests=requests_strategy(block_size=4), shape=shapes())
@settings(COMMON, max_examples=examples(60))
def test_any_batch_equals_the_oracle(requests: list[Request], shape: Shape) -> None:
    """covers: A1, A2, A5, A9, A10, A11."""
    assert_matches(build(requests, shape), "cuda")


@given(step=token_steps())
@settings(COMMON, max_examples=examples(100))
def test_the_token_table_of_any_step(step: TokenStep) -> None:
    """Single rows read slots, wherever they lie, and nothing else of their blocks. covers: A5, A9, A11."""
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import plan as cuda_plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_plan, "SCATTERED", 0)
        assert_matches(run_step(step, False, 512), "cuda", prepared=True)


@pytest.mark.parametrize("stride", [1, 2, 40])
def test_scattered_tokens_are_read_by_slot(stride: int) -> None:
    """Contiguous ones fill their blocks; with gaps between them each would be a range of its own."""
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.plan import make_plan

    tables = [list(range(1 + first, 1 + first + 33 * stride, stride)) for first in (0, 16 * 83)]
    step = TokenStep([Scheduled(32, 1), Scheduled(30, 1)], tables, 16, 200)
    batch = run_step(step, False, 512)
    assert (make_plan(batch.parts, 16).tokens is not None) == (stride > 1)
    assert_matches(batch, "cuda", prepared=True)


@given(requests=sparse_requests_strategy(block_size=4), shape=shapes())
@settings(COMMON, max_examples=examples(60))
def test_any_choice_equals_the_oracle(requests: list[Request], shape: Shape) -> None:
    """covers: C15, C16."""
    assert_matches(build(requests, shape), "cuda", prepared=True)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim", "dtype", "block_size", "memory"),
    [
        (4, 2, 64, 64, torch.bfloat16, 16, "pairs by token"),
        (6, 2, 96, 96, torch.float16, 16, "pairs by head"),
        (8, 1, 128, 128, torch.bfloat16, 128, "dense"),
        (2, 2, 256, 256, torch.float32, 16, "pairs by token"),
        (9, 3, 20, 36, torch.float32, 1, "holes"),
    ],
)
def test_heads_blocks_and_memory(
    heads: int, kv_heads: int, dim: int, value_dim: int, dtype: torch.dtype, block_size: int, memory: Memory
) -> None:
    """covers: A12. Any head size up to 256, any ratio of heads, any block size and layout of the cache."""
    shape = Shape(heads, kv_heads, dim, value_dim, block_size, dtype, memory=memory)
    assert_matches(build(_scaled(block_size), shape), "cuda", prepared=True)


@pytest.mark.parametrize("programs", [1, 3, 40])
def test_steps_of_one_block(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    """covers: A13, A22. One loop over all entries of a program, whose spans begin and end anywhere in it."""
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import parts as cuda_parts
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.plan import Tile

    monkeypatch.setattr(cuda_parts, "MANY_SPANS", 1)
    monkeypatch.setattr(cuda_parts, "flat_spans_tile", lambda *_: Tile(16, 16, 2, 4))
    monkeypatch.setattr(cuda_parts, "programs_of", lambda *_: programs)
    assert_matches(build([*_scaled(32), Request(70, 1), Request(40, 1)], Shape(block_size=32)), "cuda", prepared=True)


@pytest.mark.parametrize("tokens", [0, 10**6])
@pytest.mark.parametrize("block_size", [4, 128])
def test_decodes_alone(monkeypatch: pytest.MonkeyPatch, tokens: int, block_size: int) -> None:
    """covers: A5, A11, A13. In one launch and with a merge; with rows that have no block, and one row."""
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import attend as cuda_attend
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import short as cuda_short

    monkeypatch.setattr(cuda_short, "FINAL_TOKENS", tokens)
    merged, merge = [], cuda_attend.merge
    monkeypatch.setattr(cuda_attend, "merge", lambda *args, **named: (merged.append(1), merge(*args, **named)))
    shape, pads = Shape(block_size=block_size), Pads(rows=3, unique=5, singles=9, phase="--u")
    for requests in ([Request(9, 1)], [Request(block_size + 3, 1), Request(0, 1), Request(2 * block_size - 1, 1)]):
        assert_matches(build(requests, shape), "cuda", prepared=True)
        assert_matches(pad(build(requests, replace(shape, pads=0)), pads, math.nan), "cuda", prepared=True)
    assert bool(merged) == (tokens == 0)


def test_rows_that_are_known_to_be_short_need_no_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many of them, or few where rows fill the GPU; beside one that may be longer they do. covers: A5, A11."""
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import attend as cuda_attend
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import short as cuda_short

    merged, merge = [], cuda_attend.merge
    monkeypatch.setattr(cuda_attend, "merge", lambda *args, **named: (merged.append(1), merge(*args, **named)))
    monkeypatch.setattr(cuda_short, "FINAL_TOKENS", 8)
    monkeypatch.setattr(cuda_short, "FINAL_OF_MANY", 12)
    batch = build([Request(9, 1), Request(0, 1), Request(5, 1), Request(11, 1)], Shape())
    assert batch.parts.unique is not None
    for most, filled, merges in ((None, 0, True), (2, 99, False), (3, 99, True), (3, 0, False), (4, 0, True)):
        monkeypatch.setattr(cuda_short, "FILLED", filled)
        merged.clear()
        parts = batch.parts._replace(unique=batch.parts.unique._replace(most_of_row=most))
        assert_matches(replace(batch, parts=parts), "cuda", prepared=True)
        assert bool(merged) == merges, (most, filled)


def test_a_cache_of_another_dtype() -> None:
    """Queries in fp32 over a cache in bf16: the arithmetic is fp32."""
    batch = build(MIXED, Shape(poison=0.0))
    halves = replace(batch, key_cache=batch.key_cache.bfloat16(), value_cache=batch.value_cache.bfloat16())
    torch.testing.assert_close(attend(halves, "cuda"), attend(halves, "reference"))


@pytest.mark.parametrize(("programs", "loose"), [(1, True), (3, False), (11, False), (11, True)])
def test_any_number_of_programs_is_the_same(monkeypatch: pytest.MonkeyPatch, programs: int, loose: bool) -> None:
    """covers: A13, A22. Shares that cut a row's blocks, more programs than entries, programs without a share."""
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import own as cuda_own
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import parts as cuda_parts

    for module in (cuda_parts, cuda_own):
        monkeypatch.setattr(module, "programs_of", lambda *_: programs)
    assert_matches(build([*MIXED, Request(90, 1), Request(61, 3)], Shape(loose=loose)), "cuda", prepared=True)


@pytest.mark.parametrize("phase", ["csu", "--u"])
def test_a_bucket_of_more_phases(phase: str) -> None:
    """covers: B4. Parts that the step does not have, and single rows of the bucket that are rows of a prompt."""
    pads = Pads(rows=3, shared=4, unique=5, spans=1, singles=9, phase=phase)
    for requests in ([], [Request(0, 6)], [Request(4, 1, prefix=1), Request(7, 1, prefix=1)]):
        assert_matches(pad(build(requests, Shape(pads=0)), pads, math.nan), "cuda", prepared=True)


@pytest.mark.parametrize(
    ("request_index", "which", "bad"),
    [
        (1, "key", math.nan),
        (1, "value", math.inf),
        (3, "key", math.inf),
        (3, "value", math.nan),
        (5, "key", math.nan),
        (5, "key", math.inf),
        (5, "value", math.nan),
        (5, "value", math.inf),
    ],
)
def test_a_bad_token_breaks_the_rows_that_see_it(bad: float, which: str, request_index: int) -> None:
    """covers: A9. Also where other rows of the same tile do not see it."""
    batch = build(MIXED, Shape(poison=1e4))
    last = batch.first_row[request_index] + batch.requests[request_index].new - 1
    expected = attend(batch, "reference")
    slot = divmod(int(batch.slots[last]), batch.key_cache.shape[1])
    getattr(batch, which)[last] = bad
    getattr(batch, f"{which}_cache")[slot] = bad
    out = attend(batch, "cuda")
    assert not out[last].isfinite().all(-1).any(), "a broken token must stay detectable"
    others = [row for row in range(out.shape[0]) if row != last]
    torch.testing.assert_close(out[others], expected[others])


def test_a_bad_token_that_rows_of_a_tile_share_in_part() -> None:
    """covers: A9, A14. One request sees two tokens of a shared block, the other only the first: the second is NaN."""
    batch = build([Request(3, 1, prefix=1), Request(5, 1, prefix=1), Request(6, 3, prefix=1)], Shape(poison=1e4))
    assert batch.parts.shared is not None
    batch.parts.shared.hi[0, 0] = 2
    batch.value_cache[batch.tables[1][0], 3] = math.nan
    expected, out = attend(batch, "reference"), attend(batch, "cuda")
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
    torch.testing.assert_close(out, expected, equal_nan=True)


def test_repeats_are_equal_to_the_last_bit() -> None:
    batch = build(MIXED, Shape(dtype=torch.float16))
    assert torch.equal(attend(batch, "cuda"), attend(batch, "cuda"))


def test_a_layer_gives_its_own_blocks() -> None:
    batch = build(MIXED, Shape())
    part = batch.parts.selected
    assert part is not None
    expected, own = attend(batch, "cuda"), part.blocks.clone()
    batch.parts = batch.parts._replace(selected=part._replace(blocks=torch.zeros_like(own)))
    assert torch.equal(attend(batch, "cuda", prepared=True, selected_blocks=own), expected)


@pytest.mark.parametrize(("shape", "reason"), [(Shape(dim=528), "heads of 528"), (Shape(heads=130), "65 query heads")])
def test_what_is_not_covered_is_said_once_and_computed_by_the_reference(
    caplog: pytest.LogCaptureFixture, shape: Shape, reason: str
) -> None:
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import attend as cuda_attend

    cuda_attend._told.clear()
    batch = build([Request(5, 1), Request(0, 3)], shape)
    with caplog.at_level(logging.WARNING):
        found = [attend(batch, "cuda") for _ in range(2)]
    assert torch.equal(found[0], attend(batch, "reference").to(found[0].dtype)) or torch.cuda.is_available()
    assert [reason in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(("rows", "heads", "kv_heads"), [(20, 8, 2), (200, 8, 2), (70, 4, 4)])
def test_spans_of_many_rows(caplog: pytest.LogCaptureFixture, rows: int, heads: int, kv_heads: int) -> None:
    """Rows of a prompt choose together, next to a decode that chooses and requests that do not; also in a bucket."""
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import attend as cuda_attend

    cuda_attend._told.clear()
    requests = [
        Request(9, 1, chosen=frozenset({0})),
        Request(21, rows, chosen=frozenset({0, 2}), dropped=frozenset({1})),
        Request(40, rows - 7, chosen=frozenset({1, 3, 4, 8})),
        Request(30, 12),
    ]
    batch = build(requests, Shape(heads=heads, kv_heads=kv_heads, dim=16))
    with caplog.at_level(logging.WARNING):
        assert_matches(batch, "cuda", prepared=True)
        assert_matches(pad(batch, Pads(rows=5, shared=2, spans=3), math.nan), "cuda", prepared=True)
    assert not caplog.messages, "the reference has computed it"


def test_a_broken_element_is_nan_in_all_of_a_row() -> None:
    """covers: A9, D8. The properties of all implementations, where the interpreter runs them, too."""
    check_value_element("cuda")
    check_key_element("cuda")


def test_garbage_beside_many_heads_is_left_out_each_time() -> None:
    """covers: A9, D8. One program computes the tiles of all heads again: its warps must agree on which these are."""
    batch = build(_scaled(16), Shape(8, 1, 64, 64, 16, torch.bfloat16))
    first = attend(batch, "cuda")
    assert first.isfinite().all()
    for _ in range(examples(60)):
        assert torch.equal(attend(batch, "cuda"), first)


def test_tiles_without_new_tokens() -> None:
    """A loop that has nothing to do must not start near the largest integer: its next step is negative, and is read
    ahead. Keys of 192 elements are read by pointers, which reach anywhere."""
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.parts import bounds_of

    device = "cuda" if torch.cuda.is_available() else "cpu"
    starts = torch.tensor([*[2147483647] * 6, 6, 6, 8, *[2147483647] * 7], dtype=torch.int32, device=device)
    assert bounds_of(starts, 4).tolist() == [[0, 0, 0], [6, 6, 8], [8, 8, 9], [0, 0, 0]]
    heads = 4 if torch.cuda.is_available() else 1  # each is as the others
    shape = Shape(heads, heads, 192, 128, 16, torch.bfloat16, memory="pairs by token")
    assert_matches(build([Request(0, 3), *[Request(5, 1)] * 66], shape), "cuda")


@pytest.mark.parametrize("programs", [1, 3, 7, 40])
@pytest.mark.parametrize("requests", [[Request(128 * 3 + 50, 1), Request(128 * 2, 1)], [Request(128 * 4 + 9, 3)]])
def test_programs_share_halves_of_blocks(
    monkeypatch: pytest.MonkeyPatch, requests: list[Request], programs: int
) -> None:
    """covers: A13. Of programs with few blocks; a share may begin and end in the middle of one, the last one, too."""
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import parts as cuda_parts

    tokens = []
    halve = cuda_parts.of_few_blocks

    def noted(*arguments: Any) -> Any:
        tile = halve(*arguments)
        tokens.append(tile.block_n)
        return tile

    monkeypatch.setattr(cuda_parts, "of_few_blocks", noted)
    monkeypatch.setattr(cuda_parts, "programs_of", lambda *_: programs)
    chosen = [replace(one, chosen=frozenset({0, 1})) for one in requests]
    assert_matches(build(chosen, Shape(4, 2, 64, 64, 128, torch.bfloat16, memory="pairs by token")), "cuda")
    assert tokens == [64]
