"""Adapters on CUDA in Triton: one or two launches for a layer, whatever the number of its slices and of adapters in a
step.

A launch for each step groups its rows by adapter, so a program loads the matrices of one adapter once for all rows of
its tile. The first product is divided along its depth, because it has few columns, and the second one adds up the
pieces. The first product needs the layer's input alone: in a captured graph it may run in parallel with the product of
the layer itself, or be a part of it, if the matrices and the layer's weight are in one tensor (`ways.py`). The kernels
are imported where they are launched, because triton is optional.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vllm_gaudi_ucm.ops.cuda.early_start import follows, starts_early
from vllm_gaudi_ucm.ops.cuda.side_streams import side_streams
from vllm_gaudi_ucm.ops.lora.impl.cuda.tiles import RowTiles, Sizes, choose_second, choose_sizes, group_rows
from vllm_gaudi_ucm.ops.lora.impl.cuda.ways import Way, fastest_way, is_measured, leave_to_rule, set_times
from vllm_gaudi_ucm.ops.lora.impl.stacked import StackedLora
from vllm_gaudi_ucm.ops.lora.implementation import LoraImplementation
from vllm_gaudi_ucm.ops.lora.weights import AdapterWeights
from vllm_gaudi_ucm.ops.registry import why_not_triton

logger = logging.getLogger(__name__)

MOST_SLICES = 4


class Narrow(NamedTuple):
    """The first products of a layer. products: float32 [pieces, tiles * height, slices * rank]. stream: the side stream
    that computes them; None for the current one.
    """

    products: Tensor
    sizes: Sizes
    stream: torch.cuda.Stream | None


class Strides(NamedTuple):
    """Numbers of the first products from a row, a slice, a slot to the next one."""

    row: int
    slice: int
    slot: int


class Joined(NamedTuple):
    """A layer's own product and the first products for all slots. found: [rows, outputs + slices * slots * rank]."""

    found: Tensor


class CudaLora(LoraImplementation):
    """Adapters by Triton kernels; if chosen by name, also on a CPU under Triton's interpreter."""

    devices: ClassVar[frozenset[str] | None] = frozenset({"cuda"})
    priority: ClassVar[int] = 20
    traceable: ClassVar[bool] = False
    begins: ClassVar[bool] = True

    def unavailable(self, device: str) -> str | None:
        return why_not_triton(device)

    def route(self, rows: Tensor, slots: int, rank: int) -> RowTiles:
        return group_rows(rows, slots)

    def measure(self, weights: AdapterWeights) -> None:
        from vllm_gaudi_ucm.ops.lora.impl.cuda.measure import measure_ways

        if weights.down.device.type != "cuda" or len(weights.outputs) > MOST_SLICES or is_measured():
            return
        try:
            set_times(measure_ways(weights, self.layer))
        except Exception as error:
            # an engine serves without, only slower
            leave_to_rule()
            logger.warning("The ways of adapters cannot be measured, so a rule chooses: %s", error)
        torch.cuda.empty_cache()

    def layer(self, own: Tensor, x: Tensor, routes: RowTiles, weights: AdapterWeights, way: Way) -> Tensor:
        """Computes a layer and its adapters one way. own: [outputs, inputs], the weight of the layer."""
        begun = self._begin(x, routes, weights, way)
        y = self.own(begun, weights)
        if y is None:
            y = functional.linear(x, own)
        return self.add(y, x, routes, weights) if begun is None else self.finish(y, begun, routes, weights)

    def begin(self, x: Tensor, routes: RowTiles, weights: AdapterWeights) -> Narrow | Joined | None:
        """Computes the first products on a side stream, or with the layer's own one, if either is faster for this
        number of rows.
        """
        if not len(x) or x.stride(-1) != 1 or len(weights.outputs) > MOST_SLICES:
            return None
        return self._begin(x, routes, weights, fastest_way(len(x), joined=weights.joined is not None))

    def _begin(self, x: Tensor, routes: RowTiles, weights: AdapterWeights, way: Way) -> Narrow | Joined | None:
        if way is Way.JOINED:
            assert weights.joined is not None, "asked for by fastest_way alone"
            return Joined(functional.linear(x, weights.joined))
        return narrow_in_parallel(x, routes, weights) if way is Way.PARALLEL else None

    def own(self, begun: Narrow | Joined | None, weights: AdapterWeights) -> Tensor | None:
        return begun.found[:, : len(weights.up)] if isinstance(begun, Joined) else None

    def wait(self, begun: Narrow | Joined) -> None:
        if isinstance(begun, Narrow) and begun.stream is not None:
            torch.cuda.current_stream(begun.products.device).wait_stream(begun.stream)

    def finish(self, y: Tensor, begun: Narrow | Joined, routes: RowTiles, weights: AdapterWeights) -> Tensor:
        self.wait(begun)
        if isinstance(begun, Narrow):
            return _widen(y, begun.products, routes, weights, begun.sizes, early=False)
        narrow = begun.found[:, len(weights.up) :]
        sizes = choose_second(routes, weights.rank)
        strides = Strides(narrow.stride(0), weights.slots * weights.rank, weights.rank)
        return _widen(y, narrow, routes, weights, sizes, early=False, by_row=strides)

    def add(self, y: Tensor, x: Tensor, routes: RowTiles, weights: AdapterWeights) -> Tensor:
        if not len(x):
            return y
        if len(weights.outputs) > MOST_SLICES:
            return _STACKED.add(y, x, _STACKED.route(routes.rows, weights.slots, weights.rank), weights)
        early = starts_early(x.device)
        found = _narrow(x if x.stride(-1) == 1 else x.contiguous(), routes, weights, early)
        return _widen(y, found.products, routes, weights, found.sizes, early=early)

    def add_up(self, y: Tensor, narrow: Tensor, routes: RowTiles, weights: AdapterWeights) -> Tensor:
        if not len(y):
            return y
        sizes = choose_second(routes, weights.rank)
        by_row = Strides(weights.rank, 0, 0)
        return _widen(y, narrow.contiguous(), routes, weights, sizes, early=False, by_row=by_row)


def narrow_in_parallel(x: Tensor, routes: RowTiles, weights: AdapterWeights) -> Narrow:
    """Computes the first products on a side stream, from where the current stream is now."""
    if x.device.type != "cuda":
        return _narrow(x, routes, weights, early=False)
    stream = side_streams(x.device).ahead[0]
    return _narrow(x, routes, weights, early=False, stream=stream)


def _narrow(
    x: Tensor, routes: RowTiles, weights: AdapterWeights, early: bool, stream: torch.cuda.Stream | None = None
) -> Narrow:
    """Computes the first products of a layer. x: rows without gaps between their numbers."""
    from vllm_gaudi_ucm.ops.lora.impl.cuda.triton import products

    slices, rank, tiles = len(weights.outputs), weights.rank, len(routes.owners)
    sizes = choose_sizes(routes, x.shape[1], slices, rank, weights.down.dtype.itemsize)
    # memory of the current stream, which waits for the side stream before the memory is free again
    found = torch.empty(sizes.pieces, tiles * routes.height, slices * rank, dtype=torch.float32, device=x.device)
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(x.device))
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        products.narrow_rows[(tiles, sizes.pieces, -(-slices * rank // sizes.columns))](
            *(x, weights.down, routes.order, routes.owners, found, x.shape[1], weights.slots, x.stride(0)),
            SPAN=sizes.span,
            SLICES=slices,
            RANK=rank,
            ROWS=routes.height,
            COLUMNS=sizes.columns,
            DEPTH=sizes.depth,
            COMPUTE=_multiplied(weights.down.dtype),
            EARLY=early,
            num_warps=4,
            **follows(early),
        )
    return Narrow(found, sizes, stream)


def _widen(
    y: Tensor,
    narrow: Tensor,
    routes: RowTiles,
    weights: AdapterWeights,
    sizes: Sizes,
    *,
    early: bool,
    by_row: Strides | None = None,
) -> Tensor:
    """Adds the second products to y, [rows, outputs] in place if a row has no gaps. narrow: as of `Narrow`; or its rows
    are in the order of y, with the strides by_row.
    """
    from vllm_gaudi_ucm.ops.lora.impl.cuda.triton import products

    y = y if y.stride(-1) == 1 else y.contiguous()
    slices = len(weights.outputs)
    starts = [*accumulate(weights.outputs)]
    across = sum(-(-(end - start) // sizes.outputs) for start, end in pairwise((0, *starts)))
    starts += [starts[-1]] * (MOST_SLICES - slices)
    strides = by_row or Strides(slices * weights.rank, weights.rank, 0)
    products.widen_rows[(across, len(routes.owners))](
        *(y, narrow, weights.up, routes.order, routes.owners),
        *(sizes.pieces, weights.up.shape[1], y.stride(0), *strides, *starts),
        BY_ROW=by_row is not None,
        CHUNK=sizes.chunk,
        SLICES=slices,
        RANK=weights.rank,
        ROWS=routes.height,
        OUTPUTS=sizes.outputs,
        DEPTH=sizes.rank,
        COMPUTE=_multiplied(weights.up.dtype),
        EARLY=early,
        num_warps=sizes.warps,
        **follows(early),
    )
    return y


def _multiplied(dtype: torch.dtype) -> object:
    """Returns Triton's dtype of a product. Its interpreter (3.9) has no matrix product of bf16."""
    from triton import knobs

    from vllm_gaudi_ucm.ops.lora.impl.cuda.triton import products

    return products.DTYPES[torch.float32 if knobs.runtime.interpret and dtype == torch.bfloat16 else dtype]


_STACKED = StackedLora("stacked")
