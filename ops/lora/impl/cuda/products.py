"""Adapters on CUDA in Triton: two launches for a layer, whatever the number of its slices and of adapters in a step.

A row multiplies the matrices of its own adapter: programs of adapters that none of their rows has end at once. The
first product is divided along its depth, because it has few columns, and the second one adds up the pieces.
The kernels are imported where they are launched, because triton is optional.
"""

from __future__ import annotations

from itertools import accumulate
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.cuda.early_start import follows, starts_early
from vllm_gaudi_ucm.ops.lora.impl.stacked import StackedLora
from vllm_gaudi_ucm.ops.lora.implementation import LoraImplementation
from vllm_gaudi_ucm.ops.lora.weights import AdapterWeights
from vllm_gaudi_ucm.ops.registry import why_not_triton

MOST_SLICES = 4
# Programs of the first product that keep all multiprocessors busy, and the least depth that a program takes.
PROGRAMS, LEAST_SPAN = 256, 256


class Tiles(NamedTuple):
    """Sizes of a program: rows; columns and depth of the first product; outputs and depth of the second."""

    rows: int
    columns: int
    depth: int
    outputs: int
    second_depth: int


def choose_tiles(rows: int, columns: int, itemsize: int) -> Tiles:
    """Chooses tile sizes. Few rows are bound by reading the matrices, many by arithmetic."""
    height = min(64, max(16, 1 << (rows - 1).bit_length()))
    width = min(64, max(16, 1 << (columns - 1).bit_length()))
    return Tiles(height, width, 256 // itemsize, 128, width)


class CudaLora(LoraImplementation):
    """Adapters by Triton kernels; if chosen by name, also on a CPU under Triton's interpreter."""

    devices: ClassVar[frozenset[str] | None] = frozenset({"cuda"})
    priority: ClassVar[int] = 20
    traceable: ClassVar[bool] = False

    def unavailable(self, device: str) -> str | None:
        return why_not_triton(device)

    def route(self, rows: Tensor, slots: int, rank: int) -> Tensor:
        return rows

    def add(self, y: Tensor, x: Tensor, routes: Tensor, weights: AdapterWeights) -> Tensor:
        from vllm_gaudi_ucm.ops.lora.impl.cuda.triton import products

        x = x if x.stride(-1) == 1 else x.contiguous()
        (rows, depth), (slices, columns) = x.shape, (len(weights.outputs), weights.up.shape[1])
        if not rows:
            return y
        if slices > MOST_SLICES:
            return _STACKED.add(y, x, _STACKED.route(routes, weights.slots, weights.rank), weights)
        tiles = choose_tiles(rows, columns, weights.down.dtype.itemsize)
        across = -(-columns // tiles.columns), -(-rows // tiles.rows) * slices
        pieces = min(max(1, PROGRAMS // (across[0] * across[1])), max(1, depth // LEAST_SPAN))
        span = -(-depth // (pieces * tiles.depth)) * tiles.depth
        pieces = -(-depth // span)
        narrow = torch.empty(pieces, rows, slices * weights.rank, dtype=torch.float32, device=x.device)
        early = starts_early(x.device)
        products.narrow_rows[(*across, pieces)](
            *(x, weights.down, routes, narrow, rows, depth, columns, x.stride(0)),
            SPAN=span,
            RANK=weights.rank,
            ROWS=tiles.rows,
            COLUMNS=tiles.columns,
            DEPTH=tiles.depth,
            COMPUTE=_multiplied(weights.down.dtype),
            EARLY=early,
            num_warps=4,
            **follows(early),
        )
        return _widen(y, narrow, routes, weights, tiles, early)

    def add_up(self, y: Tensor, narrow: Tensor, routes: Tensor, weights: AdapterWeights) -> Tensor:
        if not len(y):
            return y
        tiles = choose_tiles(len(y), weights.up.shape[1], weights.up.dtype.itemsize)
        return _widen(y, narrow.contiguous().unsqueeze(0), routes, weights, tiles, early=False)


def _widen(y: Tensor, narrow: Tensor, routes: Tensor, weights: AdapterWeights, tiles: Tiles, early: bool) -> Tensor:
    """Adds the second products to y, [rows, outputs] in place if a row has no gaps. narrow: [pieces, rows, slices *
    rank].
    """
    from vllm_gaudi_ucm.ops.lora.impl.cuda.triton import products

    y = y if y.stride(-1) == 1 else y.contiguous()
    pieces, rows, _ = narrow.shape
    slices = len(weights.outputs)
    starts = [*accumulate(weights.outputs)]
    starts += [starts[-1]] * (MOST_SLICES - slices)
    grid = (-(-max(weights.outputs) // tiles.outputs), slices, -(-rows // tiles.rows))
    products.widen_rows[grid](
        *(y, narrow, weights.up, routes, rows, weights.up.shape[1], y.stride(0), *starts),
        PIECES=pieces,
        SLICES=slices,
        RANK=weights.rank,
        ROWS=tiles.rows,
        OUTPUTS=tiles.outputs,
        DEPTH=tiles.second_depth,
        COMPUTE=_multiplied(weights.up.dtype),
        EARLY=early,
        num_warps=4,
        **follows(early),
    )
    return y


def _multiplied(dtype: torch.dtype) -> object:
    """Returns Triton's dtype of a product. Its interpreter (3.9) has no matrix product of bf16."""
    from triton import knobs

    from vllm_gaudi_ucm.ops.lora.impl.cuda.triton import products

    return products.DTYPES[torch.float32 if knobs.runtime.interpret and dtype == torch.bfloat16 else dtype]


_STACKED = StackedLora("stacked")
