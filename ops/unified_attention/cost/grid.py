"""The steps that a fit measures: few, but of every kind, so that each feature varies by itself."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_gaudi_ucm.ops.unified_attention.parts import (
    AttentionParts,
    CausalPart,
    CausalSlice,
    SharedGroup,
    SharedPart,
    UniquePart,
)

CAUSAL_SLICE = 512


class Step(NamedTuple):
    """decodes: requests with one row; chunks: requests with `new` rows. own: cached tokens of each that only it sees.

    prefix: cached blocks that all see. sliced: the unique blocks are read as a slice, of which they are half.
    """

    decodes: int
    chunks: int
    new: int
    prefix: int
    own: int
    sliced: bool = False


class Geometry(NamedTuple):
    """Sizes and dtype of a layer and its cache; layers: of a model like that, for what is derived once per step."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    block_size: int
    layers: int


GEOMETRIES = (
    Geometry(9, 3, 64, torch.float32, 16, 30),
    Geometry(16, 4, 128, torch.float32, 128, 32),
    Geometry(16, 8, 64, torch.bfloat16, 64, 24),
)
# What a GPU serves; kernels for fp32 would take the compiler minutes there.
GPU_GEOMETRIES = tuple(geometry._replace(dtype=torch.bfloat16) for geometry in GEOMETRIES)

# (requests, prefix tokens, own tokens) and (requests, new tokens, prefix tokens, own tokens).
_DECODES = tuple(
    (count, prefix, own) for count in (1, 2, 4, 16, 64) for prefix, own in ((0, 300), (128, 40), (1024, 1))
)
_CHUNKS = (
    (1, 512, 0, 0),
    (4, 128, 0, 0),
    (3, 16, 0, 0),
    (8, 32, 0, 0),
    (8, 32, 128, 0),
    (2, 64, 1024, 0),
    (8, 4, 1024, 0),
    (2, 200, 256, 128),
    (1, 48, 0, 1500),
)


def steps_of(geometry: Geometry, *, slices: bool) -> list[Step]:
    """slices: also steps whose unique blocks are read as a slice."""
    size = geometry.block_size
    steps = [Step(count, 0, 0, prefix // size, own) for count, prefix, own in _DECODES]
    steps += [Step(0, count, new, -(-prefix // size), own) for count, new, prefix, own in _CHUNKS]
    steps += [Step(8, 1, 96, 512 // size, 64), Step(2, 0, 0, 4096 // size, 1)]
    steps += [Step(count, 0, 0, 0, own, sliced=True) for count, own in ((2, 300), (16, 300))] if slices else []
    return steps


def blocks_of(step: Step, block_size: int) -> int:
    """Blocks of the cache that a step needs."""
    own = -(-step.own // block_size)
    return 1 + step.prefix + (step.decodes * own) * (2 if step.sliced else 1) + step.chunks * own


def make_parts(step: Step, block_size: int, random: torch.Generator) -> AttentionParts:
    """The parts of a step on CPU; blocks lie scattered, block 0 is nobody's."""
    ids = 1 + torch.randperm(blocks_of(step, block_size) - 1, generator=random)
    rows = step.decodes + step.chunks * step.new
    requests = torch.cat(
        (torch.arange(step.decodes), step.decodes + torch.arange(step.chunks).repeat_interleave(step.new))
    )
    own = -(-step.own // block_size)
    rest = ids[step.prefix :]
    unique = _unique(step, rest, own, block_size) if step.decodes and own else None
    groups = [(torch.arange(rows), ids[: step.prefix])] if step.prefix else []
    for chunk in range(step.chunks if own else 0):
        blocks = rest[(step.decodes + chunk) * own :][:own]
        groups.append((step.decodes + chunk * step.new + torch.arange(step.new), blocks))
    shared = _shared(groups, requests, step, block_size) if groups else None
    return AttentionParts(_causal(step, requests) if step.chunks else None, shared, unique)


def _causal(step: Step, requests: torch.Tensor) -> CausalPart:
    groups = torch.where(requests < step.decodes, -1, requests).int()
    slices = []
    for first in range(step.decodes, len(requests), step.new):
        for lo in range(first, first + step.new, CAUSAL_SLICE):
            hi = min(lo + CAUSAL_SLICE, first + step.new)
            slices.append(CausalSlice(lo, hi, first, hi))
    return CausalPart(groups, tuple(slices))


def _shared(
    groups: list[tuple[torch.Tensor, torch.Tensor]], requests: torch.Tensor, step: Step, block_size: int
) -> SharedPart:
    blocks = torch.cat([blocks for _, blocks in groups])
    hi = torch.zeros((step.decodes + step.chunks, len(blocks)), dtype=torch.int32)
    named, end = [], 0
    for index, (rows, own) in enumerate(groups):
        begin, end = end, end + len(own)
        hi[requests[rows], begin:end] = block_size
        if index >= bool(step.prefix):  # the tokens of a chunk's own context end within a block
            hi[requests[rows], end - 1] = step.own - (len(own) - 1) * block_size
        named.append(SharedGroup(rows, begin, end))
    return SharedPart(blocks, requests, torch.zeros_like(hi), hi, tuple(named))


def _unique(step: Step, ids: torch.Tensor, own: int, block_size: int) -> UniquePart:
    rows = torch.arange(step.decodes).repeat_interleave(own)
    hi = torch.full((step.decodes, own), block_size, dtype=torch.int32)
    hi[:, -1] = step.own - (own - 1) * block_size
    hi = hi.flatten()
    if not step.sliced:
        return UniquePart(ids[: len(rows)], rows, torch.zeros_like(hi), hi, step.decodes)
    size = blocks_of(step, block_size)
    places = ids[: len(rows)]
    by_block = [torch.zeros(size, dtype=array.dtype) for array in (rows, hi)]
    by_block[0][places], by_block[1][places] = rows, hi
    return UniquePart(None, by_block[0], torch.zeros_like(by_block[1]), by_block[1], step.decodes)
