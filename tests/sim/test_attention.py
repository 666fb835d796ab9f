"""The hpu implementation of attention with the card's fused kernel, and inside of a captured graph."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.batch import Batch, Request, Shape, build
from tests.ops.oracle import assert_matches, attend, budget, oracle
from vllm_gaudi_ucm.batch.row_tiles import cut_rows
from vllm_gaudi_ucm.graphs.shapes import prompt_tiles
from vllm_gaudi_ucm.ops.unified_attention.api import choose_implementation, prepare, unified_attention
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu import kernels as hpu_kernels
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts, CausalTiles

PT_HPU_LAZY_MODE = "1"

MIXED = [
    Request(9, 1, prefix=2),
    Request(12, 1, prefix=3),
    Request(0, 1),
    Request(8, 7, prefix=2, chosen=frozenset({0})),
    Request(0, 11),
    Request(14, 4),
]
PROMPTS = [Request(0, 9), Request(0, 4), Request(0, 17)]


@pytest.fixture
def fused_kernel(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that has it."""
    if card is None:
        return
    monkeypatch.setattr(hpu_kernels, "FUSED_SDPA", hpu_kernels.find_sdpa())
    assert hpu_kernels.FUSED_SDPA is not None


def count_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    kernel, calls = getattr(hpu_kernels, name), [0]

    def counted(*args: Any, **named: Any) -> Any:
        calls[0] += 1
        return kernel(*args, **named)

    monkeypatch.setattr(hpu_kernels, name, counted)
    return calls


@pytest.mark.parametrize("loose", [False, True])
@pytest.mark.parametrize("poison", [math.nan, 1e4])
def test_prompts_alone_go_through_fused_sdpa(
    loose: bool, poison: float, fused_kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """covers: A2 A9 A11. Nothing to merge, so the kernel's missing log-sum-exp is not needed; else it is not used."""
    calls = count_calls(monkeypatch, "FUSED_SDPA")
    assert_matches(build(PROMPTS, Shape(dtype=torch.bfloat16, loose=loose, poison=poison, pads=5)), "hpu")
    # expanded latents: keys are longer than values, and the kernel knows one size
    assert_matches(build(PROMPTS, Shape(kv_heads=4, value_dim=8, dtype=torch.bfloat16, poison=poison)), "hpu")
    assert calls[0] > 1
    calls[0] = 0
    assert_matches(build(MIXED, Shape(dtype=torch.bfloat16, loose=loose, poison=poison)), "hpu")
    assert_matches(build(PROMPTS, Shape(loose=loose, poison=poison)), "hpu")
    assert calls[0] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("poison", [math.nan, 1e4])
def test_packed_prompts_in_tiles(
    dtype: torch.dtype, poison: float, fused_kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """covers: A2 A9 A11. Tiles that data places, with the fused kernel of a card (bfloat16) and without."""
    monkeypatch.setattr(prompt_tiles, "TILE_ROWS", 4)
    fused = count_calls(monkeypatch, "FUSED_SDPA")
    for requests in ([Request(0, 7)] * 6, [Request(0, 9), *[Request(0, 2)] * 8, Request(0, 4)]):
        batch = build(requests, Shape(dtype=dtype, poison=poison, pads=5))
        assert_matches(replace(batch, parts=in_tiles(batch)), "hpu")
    assert (fused[0] > 0) == (dtype == torch.bfloat16)
    batch = build([Request(9, 1, prefix=2), Request(12, 5, prefix=2), *[Request(0, 6)] * 5], Shape(dtype=dtype, pads=5))
    fused[0] = 0
    assert_matches(replace(batch, parts=in_tiles(batch)), "hpu")
    assert fused[0] == 0


def test_tiles_are_one_graph_of_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: B1. Nothing is read on the host, no shape depends on data."""
    monkeypatch.setattr(prompt_tiles, "TILE_ROWS", 4)
    batch = build([Request(9, 1, prefix=2), *[Request(0, 6)] * 5], Shape(pads=5, poison=1e4))
    parts = prepare(in_tiles(batch), batch.key_cache.shape[1], implementation="hpu")
    compiled = torch.compile(unified_attention, backend="eager", fullgraph=True)
    tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache, parts, batch.spec)
    torch.testing.assert_close(compiled(*tensors), unified_attention(*tensors))


def in_tiles(batch: Batch) -> AttentionParts:
    """The parts of a batch, its causal part in tiles of a bucket that bounds the reach."""
    part = batch.parts.causal
    assert part is not None
    groups = part.groups.tolist()
    starts = [row for row, group in enumerate(groups) if group >= 0 and (row == 0 or groups[row - 1] != group)]
    end = 1 + max(row for row, group in enumerate(groups) if group >= 0)
    tiles = cut_rows([*starts, end])
    assert prompt_tiles.is_bounded(end, tiles.reach)
    tops = prompt_tiles.levels(len(groups), tiles.reach)
    first, last = map(torch.from_numpy, tiles.places(len(groups), tops[0]))
    return batch.parts._replace(causal=part._replace(tiles=CausalTiles(first, last, prompt_tiles.TILE_ROWS, tops)))


@pytest.mark.parametrize("which", ["key", "value", "query"])
def test_a_broken_token_in_fused_sdpa(which: str, fused_kernel: None) -> None:
    """covers: A9. Exactly the rows that see it are not finite."""
    batch = build(PROMPTS, Shape(dtype=torch.bfloat16, poison=1e4, pads=0))
    expected = attend(batch, "hpu")
    getattr(batch, which)[5] = math.nan
    out = attend(batch, "hpu")
    seeing = [5] if which == "query" else [5, 6, 7, 8]
    assert out[seeing].isnan().all()
    others = [row for row in range(len(out)) if row not in seeing]
    torch.testing.assert_close(out[others], expected[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
def test_inside_a_captured_graph(
    dtype: torch.dtype, fused: bool, ht: Any, card: Any, request: pytest.FixtureRequest
) -> None:
    """covers: A10 A16 B1. The card's choice; one graph, no host read, no shape that depends on data, and it replays."""
    if fused:
        request.getfixturevalue("fused_kernel")
    assert choose_implementation("auto", "hpu") == "hpu"
    batch = build(MIXED, Shape(dtype=dtype, poison=1e4))
    exact, reads = oracle(batch), card.host_reads
    parts = on_card(batch.parts)

    def run(*tensors: Tensor) -> Tensor:
        return unified_attention(*tensors, parts, batch.spec, implementation="hpu")  # type: ignore[arg-type]

    tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache)
    inputs = [tensor.to("hpu") for tensor in tensors]
    graph = ht.hpu.wrap_in_hpu_graph(run)
    with torch.inference_mode():
        first = graph(*inputs).clone()
        second = graph(*inputs).clone()
    assert (card.captures, card.replays) == (1, 1)
    assert card.host_reads == reads
    assert torch.equal(first, second)
    assert np.abs(first.cpu().double().numpy() - exact).max() <= budget(batch, exact)


def on_card(value: Any) -> Any:
    """Parts with their tensors on the card."""
    if isinstance(value, Tensor):
        return value.to("hpu")
    if isinstance(value, AttentionParts) or hasattr(value, "_fields"):
        return type(value)(*map(on_card, value))
    return tuple(map(on_card, value)) if isinstance(value, tuple) else value
