"""Summaries and scores of blocks against their definitions, for every kind of summary."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given

from tests.ops.block_selection import COMMON, assert_scores, cases
from tests.ops.cold_import import PROBE
from tests.ops.selection import KINDS, Case, build, expected_scores, may_round_differently, true_mass
from vllm_gaudi_ucm.ops.block_selection.api import block_scores, new_summaries, write_summaries
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind, projection
from vllm_gaudi_ucm.ops.block_selection.impl import reference

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("implementation", "few_spans"), [("auto", 32), ("reference", 0), ("reference", 32), ("hpu", 32)]
)
@given(case=cases())
@COMMON
def test_scores_equal_their_definition(kind: SummaryKind, implementation: str, few_spans: int, case: Case) -> None:
    """covers: C13, C14, C15, C16. Rows of mixed batches, spans of several rows, any GQA ratio, poisoned pads."""
    candidates = build(case)
    assume(not kind.is_coded or not may_round_differently(candidates, kind))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "FEW_SPANS", few_spans)
        found = candidates.scores(kind, implementation=implementation)
    assert_scores(found, expected_scores(candidates, kind))
    for _, entries in candidates.meant:
        if entries:
            assert found[entries].sum().item() == pytest.approx(1, abs=1e-5)
    assert not found[found.shape[0] - case.pads :].any(), "a pad has no score"
    prepared = candidates.prepare(implementation)
    assert (prepared is not None) == (implementation in ("hpu", "cuda"))
    assert_scores(candidates.scores(kind, implementation=implementation, prepared=prepared), found.double().numpy())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("few_spans", [0, 32])
def test_more_candidates_than_a_tile(kind: SummaryKind, few_spans: int, monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = build(Case(spans=((1, 30), (2, 41))))
    monkeypatch.setattr(reference, "FEW_SPANS", few_spans)
    monkeypatch.setattr(reference, "TILE", 1000)
    assert_scores(candidates.scores(kind), expected_scores(candidates, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keys_and_queries(kind: SummaryKind, dtype: torch.dtype) -> None:
    """Summaries are rounded to the keys' dtype, scores are fp32."""
    candidates = build(Case(dtype=dtype))
    assert candidates.summaries(kind).dtype == (torch.uint8 if kind.is_coded else dtype)
    np.testing.assert_allclose(candidates.scores(kind).numpy(), expected_scores(candidates, kind), atol=0.02, rtol=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_the_block_that_the_query_asks_for_comes_first(kind: SummaryKind) -> None:
    """covers: C14. Other queries, other scores: a block full of keys along the query is the first, whichever it is."""
    candidates = build(Case(spans=((1, 12),), heads=2, kv_heads=2, dim=32))
    row = candidates.meant[0][0].start
    for wanted in (0, 5, 11):
        direction = candidates.key_cache[candidates.blocks[wanted], 0]
        candidates.key_cache[candidates.blocks[wanted]] = 3 * direction
        candidates.query[row] = direction
        assert int(candidates.scores(kind)[:12].argmax()) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_scores_tell_where_attention_goes(kind: SummaryKind) -> None:
    """Where keys vary between blocks as between tokens, the best third by score is close to the best third there is."""
    candidates = build(Case(spans=((1, 60),), dim=32, block_size=16))
    random = torch.Generator().manual_seed(1)
    candidates.key_cache += torch.randn(candidates.key_cache.shape[0], 1, 2, 32, generator=random)
    order = candidates.scores(kind)[:60].argsort(descending=True).numpy()
    mass = true_mass(candidates)[:60]
    assert mass[order[:20]].sum() > 0.8 * np.sort(mass)[-20:].sum()
    assert mass[order[:20]].sum() > 1.5 * mass[:20].sum()


@pytest.mark.parametrize("kind", KINDS)
def test_writing_changes_the_blocks_that_are_named(kind: SummaryKind) -> None:
    """covers: C11. Pads land in the dummy block, a block that is written again has its new summary."""
    cache = torch.randn(9, 8, 2, 16)
    summaries = new_summaries(cache, kind)
    assert not summaries.any()
    write_summaries(cache, torch.tensor([4, 0, 7, 0, 0]), summaries, kind)
    assert summaries[4].any()
    assert summaries[7].any()
    assert not summaries[[1, 2, 3, 5, 6, 8]].any()
    before = summaries.clone()
    cache[4] = torch.randn(8, 2, 16)
    write_summaries(cache, torch.tensor([4]), summaries, kind)
    assert not torch.equal(summaries[4], before[4])
    others = [block for block in range(9) if block != 4]
    assert torch.equal(summaries[others], before[others])
    write_summaries(cache, torch.zeros(0, dtype=torch.int64), summaries, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
def test_views_of_a_cache_and_their_shapes(kind: SummaryKind, block_size: int) -> None:
    pairs = torch.randn(5, 2, block_size, 3, 20)
    view = pairs[:, 1].transpose(1, 2).contiguous().transpose(1, 2)
    summaries = new_summaries(view, kind)
    assert tuple(summaries.shape) == kind.shape(5, block_size, 3, 20)
    write_summaries(view, torch.arange(5), summaries, kind)
    dense = new_summaries(view, kind)
    write_summaries(view.contiguous(), torch.arange(5), dense, kind)
    torch.testing.assert_close(summaries, dense)


def test_bytes_of_summaries() -> None:
    """At block 128 and dim 64, of the bytes of the keys in bf16: what a cache of summaries costs."""
    cache = torch.zeros(3, 128, 2, 64, dtype=torch.bfloat16)
    vectors = {kind: new_summaries(cache, kind).nbytes * 128 / cache.nbytes for kind in KINDS}
    assert vectors == {"mean": 1, "minmax": 2, "box_mean": 16, "hash": 16 * 9 / 128, "codes": 136 * 9 / 128}


@pytest.mark.parametrize("kind", [SummaryKind.BOX_MEAN, SummaryKind.HASH, SummaryKind.CODES])
def test_one_outstanding_token_is_found(kind: SummaryKind) -> None:
    """A needle: one token of a long block that the query asks for, which the mean of the block hides."""
    candidates = build(Case(spans=((1, 20),), heads=2, kv_heads=2, dim=32, block_size=128))
    row, block = candidates.meant[0][0].start, int(candidates.blocks[7])
    needle = 3 * candidates.key_cache[block, 5]
    candidates.key_cache[block, 5], candidates.query[row] = needle, needle / 4
    assert int(candidates.scores(kind)[:20].argmax()) == 7
    assert true_mass(candidates).argmax() == 7


def test_the_operation_imports_neither_vllm_nor_an_accelerator() -> None:
    modules = "vllm_gaudi_ucm.ops.block_selection.api,vllm_gaudi_ucm.ops.block_selection.impl.reference"
    command = [sys.executable, "-c", PROBE, "vllm,triton,habana_frameworks", modules]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr


def test_hashes_are_the_same_in_every_process() -> None:
    """covers: C23. The projection does not depend on the state of any generator, process or rank."""
    script = (
        "import sys, torch; torch.manual_seed(int(sys.argv[1])); torch.rand(7); "
        "from vllm_gaudi_ucm.ops.block_selection.features import projection; "
        "print(projection(20, torch.device('cpu')).numpy().tobytes().hex())"
    )
    torch.manual_seed(3)
    run = subprocess.run([sys.executable, "-c", script, "11"], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.strip() == projection(20, CPU).numpy().tobytes().hex()
    columns = projection(20, CPU)
    assert tuple(columns.shape) == (24, 20)
    torch.testing.assert_close(columns.T @ columns, torch.eye(20), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", [SummaryKind.MEAN, SummaryKind.MINMAX, SummaryKind.BOX_MEAN])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_a_broken_block_comes_first_and_disturbs_no_other(kind: SummaryKind, bad: float, implementation: str) -> None:
    candidates = build(Case())
    expected = candidates.scores(kind)
    broken = candidates.meant[1][1][2]
    candidates.key_cache[candidates.blocks[broken], 1] = bad
    found = candidates.scores(kind, implementation=implementation)
    assert found[broken] == 1
    others = [entry for entry in range(len(found)) if candidates.spans[entry] != 1]
    torch.testing.assert_close(found[others], expected[others])
    assert found.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_entries_of_a_span_in_any_order(kind: SummaryKind) -> None:
    candidates = build(Case())
    expected = candidates.scores(kind)
    order = torch.randperm(len(expected), generator=torch.Generator().manual_seed(1))
    moved = replace(candidates, blocks=candidates.blocks[order], spans=candidates.spans[order])
    torch.testing.assert_close(moved.scores(kind), expected[order])


@pytest.mark.parametrize("kind", KINDS)
def test_traces_as_one_graph(kind: SummaryKind) -> None:
    candidates = build(Case())
    expected = candidates.scores(kind)
    summaries = new_summaries(candidates.key_cache, kind)

    def step(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        write_summaries(cache, blocks, summaries, kind)
        return candidates.scores(kind, summaries=summaries)

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(candidates.key_cache, candidates.blocks), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(3, 32)}, r"query is torch.float32 \(3, 32\) on cpu, expected .* \(any, any, any\)"),
        ({"query": torch.zeros(3, 3, 16)}, "query has 3 rows of 3 heads, .* a multiple of the 2 kv heads"),
        ({"query": torch.zeros(0, 4, 16)}, "query has 0 rows"),
        ({"query": torch.zeros(3, 4, 8)}, r"summaries is .* expected .* \(any, any, any, 8\)"),
        ({"summaries": torch.zeros(9, 2, 16)}, "summaries is"),
        ({"summaries": torch.zeros(9, 1, 2, 16, dtype=torch.uint8)}, "summaries is torch.uint8"),
        ({"blocks": torch.zeros(4, dtype=torch.int32)}, "blocks is torch.int32"),
        ({"spans": torch.zeros(3, dtype=torch.int64)}, r"spans is .*\(3,\) on cpu, expected torch.int64 \(4\)"),
        ({"num_rows": torch.zeros(1, dtype=torch.int64)}, r"num_rows is .* expected torch.int64 \(2\)"),
        ({"blocks": torch.zeros(4, dtype=torch.int64, device="meta")}, "blocks is .* on meta, expected .* on cpu"),
        ({"max_rows": 0}, "max_rows is 0"),
        ({"implementation": "fast"}, "implementation 'fast' is unknown, choose one of auto, reference, cuda"),
        ({"kind": SummaryKind.MINMAX}, "summaries have 1 vectors, expected 2 for minmax"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, object], message: str) -> None:
    """covers: C15. One row is no reason to broadcast."""
    zeros = torch.zeros(4, dtype=torch.int64)
    arguments: dict[str, object] = {
        "query": torch.zeros(3, 4, 16),
        "summaries": torch.zeros(9, 1, 2, 16),
        "blocks": zeros,
        "spans": zeros,
        "first_rows": zeros[:2],
        "num_rows": zeros[:2],
        "max_rows": 1,
        "scale": 0.25,
        "kind": SummaryKind.MEAN,
    }
    with pytest.raises(ValueError, match=message):
        block_scores(**{**arguments, **change})  # type: ignore[arg-type]


def test_summaries_of_another_cache_are_named() -> None:
    cache = torch.zeros(9, 8, 2, 16)
    blocks = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"summaries is .* expected .* \(9, 4, 2, 16\)"):
        write_summaries(cache, blocks, new_summaries(cache, SummaryKind.MEAN), SummaryKind.BOX_MEAN)
    with pytest.raises(ValueError, match=r"blocks is torch\.int32"):
        write_summaries(cache, blocks.int(), new_summaries(cache, SummaryKind.MEAN), SummaryKind.MEAN)
