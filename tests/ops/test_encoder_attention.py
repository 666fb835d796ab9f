"""Attention of encoders: every implementation against a float64 computation of each request alone."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from vllm_gaudi_ucm.ops.unified_attention.api import choose_implementation, prepare, unified_attention
from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts, CausalPart, CausalSlice
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec

HEADS, KV_HEADS, DIM = 4, 2, 16
SCALE = 1 / math.sqrt(DIM)
LENGTHS = (1, 1, 2, 7, 7, 7, 40)
PADS = 5
ON_CPU = ("reference", "encoder", "hpu_encoder")
REACHES = (None, 1, 4, 64)


def inputs(dtype: torch.dtype, pads: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    rows = sum(LENGTHS) + pads
    heads = (HEADS, KV_HEADS, KV_HEADS)
    query, key, value = (torch.randn(rows, count, DIM).to(dtype) for count in heads)
    return query, key, value


def bounds() -> list[int]:
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    return [0, *ends]


def make_parts(pads: int, step: int) -> AttentionParts:
    """The causal part of a step; with pads as in a bucket, whose slices do not know where requests end."""
    starts = bounds()
    groups = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    groups = torch.cat([groups, torch.full((pads,), -1)]).to(torch.int32)
    rows, more = len(groups), max(LENGTHS) - 1
    if pads:
        slices = [
            CausalSlice(lo, min(lo + step, rows), max(0, lo - more), min(rows, lo + step + more))
            for lo in range(0, rows, step)
        ]
    else:
        slices = [
            CausalSlice(lo, min(lo + step, end), first, end)
            for first, end in pairwise(starts)
            for lo in range(first, end, step)
        ]
    return AttentionParts(CausalPart(groups, tuple(slices), starts=torch.tensor(starts)))


def expected(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, reach: int | None, cap: float | None = None
) -> torch.Tensor:
    """float64, one request and one head at a time; zeros for pads."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    for first, end in pairwise(bounds()):
        place = torch.arange(end - first)
        hidden = (place - place[:, None]).abs() >= (reach or end)
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            q, k, v = query[first:end, head].double(), key[first:end, kv].double(), value[first:end, kv].double()
            scores = q @ k.T * SCALE
            if cap is not None:
                scores = torch.tanh(scores / cap) * cap
            out[first:end, head] = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
    return out


def attend(
    name: str,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    spec: AttentionSpec,
    pads: int,
    step: int = 16,
) -> torch.Tensor:
    query, key, value = tensors
    no_blocks = key.new_empty((0, 16, KV_HEADS, DIM))
    out = torch.full_like(query, math.nan)
    parts = prepare(make_parts(pads, step), 16, implementation=name)
    return unified_attention(query, key, value, no_blocks, value_cache=no_blocks, parts=parts, spec=spec, out=out)


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("pads", [0, PADS], ids=["true shape", "bucket"])
def test_rows_see_their_request_in_both_directions(name: str, dtype: torch.dtype, reach: int | None, pads: int) -> None:
    if name == "encoder" and pads:
        pytest.skip("it reads which rows are a request on the host, which a bucket does not have there")
    tensors = inputs(dtype, pads)
    found = attend(name, tensors, AttentionSpec(SCALE, both_ways=True, reach=reach), pads)
    assert torch.isfinite(found).all()
    error = (found.double() - expected(*tensors, reach)).abs().max().item()
    assert error < (1e-5 if dtype == torch.float32 else 3e-2)
    assert not found[sum(LENGTHS) :].any(), "pads are zeros"


@pytest.mark.parametrize("name", ON_CPU)
def test_a_broken_request_reaches_no_other(name: str) -> None:
    """NaN and Inf in one request: its rows are not finite, and all others are as before."""
    tensors = inputs(torch.float32, 0)
    spec = AttentionSpec(SCALE, both_ways=True)
    before = attend(name, tensors, spec, 0)
    first, end = bounds()[3], bounds()[4]
    tensors[1][first + 1] = math.nan
    tensors[2][first + 2] = math.inf
    after = attend(name, tensors, spec, 0)
    assert not torch.isfinite(after[first:end]).any()
    apart = torch.ones(len(after), dtype=torch.bool)
    apart[first:end] = False
    assert torch.equal(after[apart], before[apart])


def test_a_soft_cap_is_the_references() -> None:
    tensors, spec = inputs(torch.float32, 0), AttentionSpec(SCALE, logits_soft_cap=2.0, both_ways=True)
    assert choose_implementation("auto", "cpu", [spec]) == "reference"
    found = attend("reference", tensors, spec, 0)
    assert (found.double() - expected(*tensors, None, 2.0)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("device", "captured", "name"),
    [
        ("cpu", False, "encoder"),
        ("cpu", True, "reference"),
        ("hpu", True, "hpu_encoder"),
    ],
)
def test_the_choice_by_device(device: str, captured: bool, name: str) -> None:
    assert choose_implementation("auto", device, [AttentionSpec(SCALE, both_ways=True)], captured=captured) == name


@pytest.mark.parametrize("name", ["cpu", "native", "hpu", "cuda"])
def test_implementations_of_decoders_refuse_encoders(name: str) -> None:
    assert not ATTENTION.make(name).supports(AttentionSpec(SCALE, both_ways=True))


@pytest.mark.parametrize("name", ["encoder", "hpu_encoder", "cuda_encoder"])
def test_implementations_of_encoders_refuse_decoders(name: str) -> None:
    implementation = ATTENTION.make(name)
    assert not implementation.supports(AttentionSpec(SCALE))
    assert implementation.supports(AttentionSpec(SCALE, both_ways=True, reach=3))


@pytest.mark.parametrize(
    "wrong", [{"reach": 3}, {"both_ways": True, "reach": 0}, {"both_ways": True, "is_local": True}]
)
def test_a_wrong_specification_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="AttentionSpec: "):
        AttentionSpec(SCALE, **wrong)  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pads", [0, PADS], ids=["true shape", "bucket"])
def test_cuda_kernels(dtype: torch.dtype, reach: int | None, pads: int) -> None:
    tensors = inputs(dtype, pads)
    parts = make_parts(pads, 16)
    assert parts.causal is not None
    assert parts.causal.starts is not None
    # as a bucket has them: the pads are one more request, and further ones have no rows
    rows = sum(LENGTHS) + pads
    starts = torch.cat([parts.causal.starts, torch.full((3,), rows)])
    causal = parts.causal._replace(groups=parts.causal.groups.cuda(), starts=starts.cuda())
    query, key, value = (tensor.cuda() for tensor in tensors)
    no_blocks = key.new_empty((0, 16, KV_HEADS, DIM))
    out = torch.full_like(query, math.nan)
    spec = AttentionSpec(SCALE, both_ways=True, reach=reach)
    prepared = prepare(AttentionParts(causal), 16, implementation="cuda_encoder")
    unified_attention(query, key, value, no_blocks, value_cache=no_blocks, parts=prepared, spec=spec, out=out)
    error = (out.cpu().double() - expected(*tensors, reach)).abs().max().item()
    assert error < (1e-5 if dtype == torch.float32 else 3e-2)
    assert not out[sum(LENGTHS) :].any()
