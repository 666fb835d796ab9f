"""Windows, chunks, soft caps, sinks and slopes in every implementation: a float64 oracle, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.batch import Batch, Request, Shape, build, requests_strategy
from tests.ops.local import LONG, Features, features, with_features
from tests.ops.oracle import IMPLEMENTATIONS, assert_matches, attend, examples
from tests.ops.unified_attention import COMMON, MIXED, shapes
from vllm_gaudi_ucm.ops.unified_attention.api import choose_implementation, unified_attention
from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec, PerHead


def of_layer(requests: list[Request], shape: Shape, wanted: Features, size: float = 1.0) -> Batch:
    """size: of the queries, so that scores reach a soft cap."""
    batch = build(requests, shape)
    batch.query *= size
    return with_features(batch, wanted, shape.block_size)


def computed(batch: Batch, implementation: str) -> bool:
    return ATTENTION.make(implementation).supports(batch.spec)


@given(shape=shapes(), wanted=features(slopes=True), data=st.data())
@settings(COMMON, max_examples=examples(100))
def test_any_layer_equals_its_definition(shape: Shape, wanted: Features, data: st.DataObject) -> None:
    """Everything outside of the windows is NaN. covers: A1, A2, A9, A19"""
    batch = of_layer(data.draw(requests_strategy(shape.block_size)), shape, wanted, 4.0)
    assert_matches(batch, *(name for name in IMPLEMENTATIONS if computed(batch, name)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "wanted",
    [
        Features(20, sinks=True),
        Features(16),
        Features(16, chunked=True),
        Features(1),
        Features(24, cap=2.0),
        Features(slopes=True, sinks=True),
    ],
    ids=str,
)
def test_longer_than_the_window(implementation: str, dtype: torch.dtype, wanted: Features) -> None:
    """Chunks behind their window, windows that begin within blocks, and rows that see new tokens alone."""
    shape = Shape(heads=4, kv_heads=2, dim=32, value_dim=32, block_size=16, dtype=dtype)
    long = [replace(request, cached=request.cached + request.prefix * 16) for request in LONG]
    batch = of_layer(long, shape, wanted, 4.0 if wanted.cap else 1.0)
    if computed(batch, implementation):
        assert_matches(batch, implementation, prepared=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_many_rows_of_a_chunk(implementation: str) -> None:
    """More rows than a tile of any implementation has, of a window that is shorter, behind a context."""
    requests = [Request(70, 150), Request(200, 1)] if implementation == "cuda" else [Request(300, 400), Request(900, 1)]
    shape = Shape(heads=2, kv_heads=1, dim=32, value_dim=32, block_size=16, pads=0)
    assert_matches(of_layer(requests, shape, Features(70, sinks=True)), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 256, 512])
def test_head_sizes(implementation: str, dim: int) -> None:
    requests = [Request(9, 1, prefix=2), Request(8, 3, prefix=2), Request(0, 5)]
    assert_matches(build(requests, Shape(heads=2, kv_heads=1, dim=dim, value_dim=dim)), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_sink_is_all_that_a_row_sees(implementation: str) -> None:
    """Pads, and a step of nothing else."""
    batch = of_layer([], Shape(pads=3), Features(sinks=True))
    assert not attend(batch, implementation).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("logit", [-200.0, 0.0, 200.0])
def test_sinks_of_extreme_size(implementation: str, logit: float) -> None:
    """Far below the scores a sink is nothing, far above them it leaves nothing."""
    batch = of_layer(MIXED, Shape(), Features(sinks=True))
    batch.per_head = PerHead(torch.full((4,), logit))
    assert_matches(batch, implementation)
    plain = attend(build(MIXED, Shape()), implementation)
    if logit < 0:
        torch.testing.assert_close(attend(batch, implementation), plain)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_soft_cap_and_sinks_reach_selected_blocks(implementation: str) -> None:
    batch = build([Request(14, 1, chosen=frozenset({0, 2})), Request(9, 3, chosen=frozenset({1}))], Shape())
    batch.query *= 8
    batch = with_features(batch, Features(cap=1.5, sinks=True), 4)
    if computed(batch, implementation):
        assert_matches(batch, implementation)


def test_what_an_implementation_does_not_compute_the_next_one_does(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one line in the log, and not for layers that it computes."""
    slopes, cap = AttentionSpec(0.25, has_slopes=True), AttentionSpec(0.25, logits_soft_cap=2.0)
    for name in ("cpu", "native", "hpu", "cuda"):
        assert ATTENTION.make(name).supports(slopes)
        assert ATTENTION.make(name).supports(AttentionSpec(0.25, is_local=True, has_sinks=True))
    assert not ATTENTION.make("cpu").supports(cap)
    assert choose_implementation("auto", "hpu", [AttentionSpec(0.25), cap]) == "hpu"
    assert not caplog.records
    assert choose_implementation("auto", "hpu", [AttentionSpec(0.25), slopes]) == "hpu"
    monkeypatch.setattr(type(ATTENTION.make("hpu")), "supports", lambda _, spec: spec.is_plain)
    assert choose_implementation("auto", "hpu", [AttentionSpec(0.25), slopes, slopes]) == "reference"
    (record,) = caplog.records
    assert "does not compute all layers of this model, so 'reference' computes them" in record.message
    with pytest.raises(ValueError, match=r"'cpu' cannot be used here \(it does not compute logits_soft_cap=2.0"):
        choose_implementation("cpu", "cpu", [cap])


def call(batch: Batch, **change: Any) -> None:
    tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache)
    per_head = change.pop("per_head", batch.per_head)
    unified_attention(*tensors, batch.parts, replace(batch.spec, **change), per_head=per_head)


def test_parts_and_tensors_that_are_not_those_of_the_layer() -> None:
    chosen = build([Request(14, 1, chosen=frozenset({0}))], Shape())
    with pytest.raises(ValueError, match="a selected part with is_local=True, expected none"):
        call(chosen, is_local=True)
    local = of_layer(MIXED, Shape(), Features(5, sinks=True))
    with pytest.raises(ValueError, match=r"found the parts of a window, expected spec\.is_local"):
        call(local, is_local=False)
    with pytest.raises(ValueError, match=r"per_head\.sinks is None, but spec\.has_sinks is True"):
        call(local, per_head=PerHead())
    with pytest.raises(ValueError, match=r"per_head.sinks has shape \(3,\), expected \(4,\)"):
        call(local, per_head=PerHead(torch.zeros(3)))
    with pytest.raises(ValueError, match=r"parts\.positions is None, expected positions for"):
        call(local, is_local=False, has_slopes=True)


@pytest.mark.parametrize("cap", [0.0, -1.0, float("inf")])
def test_a_cap_that_makes_no_sense_is_refused(cap: float) -> None:
    with pytest.raises(ValueError, match=f"logits_soft_cap is {cap}, expected a positive number"):
        AttentionSpec(0.25, logits_soft_cap=cap)
    assert AttentionSpec(0.25).is_plain


def test_slopes_beside_a_window_are_refused() -> None:
    with pytest.raises(ValueError, match="found slopes and a window"):
        AttentionSpec(0.25, is_local=True, has_slopes=True)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("small", [False, True])
def test_slopes_by_the_flash_kernel(small: bool, sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to the reference: several heads of a KV head, rows of one context, and of two. small: pieces of
    few rows, as heads and contexts of real models make them. covers: A1, A2, A13"""
    from vllm_gaudi_ucm.ops.unified_attention.impl import reference
    from vllm_gaudi_ucm.ops.unified_attention.impl.cpu import plan as cpu_plan
    from vllm_gaudi_ucm.ops.unified_attention.impl.cpu import slopes as cpu_slopes

    if small:
        for module in (cpu_plan, cpu_slopes):
            monkeypatch.setattr(module, "MASK_ELEMENTS", 512)
        monkeypatch.setattr(cpu_plan, "TILE_TOKENS", 32)
    shape = Shape(heads=8, kv_heads=2, dim=32, value_dim=32, block_size=16, poison=1e4)
    long = [*LONG, Request(40, 1, prefix=2), Request(40, 20, prefix=2), Request(300, 1), Request(21, 17, prefix=3)]
    requests = [replace(request, cached=request.cached + request.prefix * 16) for request in long]
    batch = of_layer(requests, shape, Features(slopes=True, sinks=sinks))
    monkeypatch.setattr(reference.ReferenceAttention, "attend", lambda *_: pytest.fail("the reference was asked"))
    assert_matches(batch, "cpu", prepared=True)
    found = replace(batch, parts=batch.parts._replace(causal=None))
    log_sums = torch.empty(batch.query.shape[:2])
    tensors = (found.query, found.key, found.value, found.key_cache, found.value_cache, found.parts)
    if not sinks:
        unified_attention(*tensors, batch.spec, implementation="cpu", per_head=batch.per_head, log_sums=log_sums)
        exact = torch.empty_like(log_sums)
        monkeypatch.undo()
        unified_attention(*tensors, batch.spec, implementation="reference", per_head=batch.per_head, log_sums=exact)
        torch.testing.assert_close(log_sums, exact)


def test_positions_of_a_prefix_that_requests_have_elsewhere() -> None:
    """Blocks at one place of one request's table and at another of another's have two distances."""
    batch = of_layer([Request(24, 1, prefix=2), Request(24, 5, prefix=2)], Shape(poison=1e4), Features(slopes=True))
    shared = batch.parts.shared
    assert shared is not None
    lo = shared.lo.clone()
    lo[1] -= 40
    parts = batch.parts._replace(shared=shared._replace(lo=lo))
    found = [attend(replace(batch, parts=parts), name) for name in ("reference", "cpu", "native", "hpu")]
    for one in found[1:]:
        torch.testing.assert_close(one, found[0])
    assert not torch.equal(found[0], attend(batch, "reference"))
