"""Mixture of experts on CUDA in Triton: pairs of row and expert grouped on the device, and two grouped products.

Four launches of static shapes, three where pairs are few. vLLM's fused experts are not called: they need vLLM's
compiled operators (`moe_align_block_size`, `moe_sum`, gates), which the empty-device build does not have.
The kernels are imported where they are launched, because triton is optional.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.moe.codes import CodedExperts, ExpertCodes
from vllm_gaudi_ucm.ops.moe.implementation import ExpertWeights, MoeImplementation
from vllm_gaudi_ucm.ops.moe.spec import CODES, PLAIN, MoeSpec
from vllm_gaudi_ucm.ops.narrow_floats import has_e4m3
from vllm_gaudi_ucm.ops.registry import why_not_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUPED = 1024  # pairs that a program of `group_pairs` reads at once, four times as many if there are more
SUMMED = 1024  # elements of a row that a program of `sum_pairs` adds up
# With at most one pair for this many experts, two pairs rarely share an expert: each gets a tile of its own.
APART = 4


class ExpertTiles(NamedTuple):
    """rows: pairs of a tile. columns, depth: its part of the weights. warps, stages: Triton's options of a program."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


class CudaMoe(MoeImplementation):
    """Mixture of experts by Triton kernels; if chosen by name, also on a CPU under Triton's interpreter."""

    devices: ClassVar[frozenset[str] | None] = frozenset({"cuda"})
    priority: ClassVar[int] = 20
    traceable: ClassVar[bool] = False

    def unavailable(self, device: str) -> str | None:
        return why_not_triton(device)

    def supports(self, spec: MoeSpec) -> bool:
        return spec.weights in (PLAIN, CODES)

    def takes_codes(self, weights: CodedExperts) -> bool:
        """True for groups of at least 32 inputs; for 8-bit floats only on a GPU that converts them."""
        narrow = any(each.codes.dtype == torch.float8_e4m3fn for each in (weights.w13, weights.w2))
        if narrow and not has_e4m3(weights.w13.codes.device):
            return False
        return weights.dtype in DTYPES and weights.w13.for_kernels and weights.w2.for_kernels

    def prepare_codes(self, weights: CodedExperts, spec: MoeSpec) -> CodedExperts:
        if not self.takes_codes(weights):
            raise ValueError(
                f"experts: codes {weights.w13.codes.dtype} in blocks of {weights.w13.block} and {weights.w2.block}, "
                f"rows {weights.dtype}; expected blocks of a multiple of 32 inputs that divides them, rows of "
                f"{', '.join(map(str, DTYPES))}, and compute capability 8.9 for 8-bit floats"
            )
        return weights

    def prepare(self, weights: ExpertWeights, spec: MoeSpec) -> ExpertWeights:
        if weights.w13.dtype not in DTYPES:
            raise ValueError(f"experts: w13 is {weights.w13.dtype}, expected one of {', '.join(map(str, DTYPES))}")
        return ExpertWeights(*(None if each is None else each.detach().contiguous() for each in weights))  # type: ignore[arg-type]

    def compute(
        self, x: Tensor, ids: Tensor, shares: Tensor, form: ExpertWeights | CodedExperts, spec: MoeSpec
    ) -> Tensor:
        from triton import knobs

        from vllm_gaudi_ucm.ops.moe.impl.cuda.triton import coded_products, groups, products, sums

        (rows, chosen), (experts, double, hidden) = ids.shape, form.w13.shape
        out, pairs = torch.empty_like(x, memory_format=torch.contiguous_format), ids.numel()
        x, ids, shares = x.contiguous(), ids.contiguous(), shares.contiguous()
        inner, found = x.new_empty(pairs, double // 2), x.new_empty(pairs, hidden)
        apart = rows == 1 or pairs * APART <= experts
        # neither is read if each pair has a tile of its own
        order, starts = ids, ids
        if not apart:
            order = torch.empty(pairs, dtype=torch.int32, device=x.device)
            starts = torch.empty(experts + 1, dtype=torch.int32, device=x.device)
            block, warps = (GROUPED, 4) if pairs <= 4 * GROUPED else (4 * GROUPED, 8)
            groups.group_pairs[(experts,)](ids, order, starts, pairs, EXPERTS=experts, BLOCK=block, num_warps=warps)
        tiles = choose_tiles(1 if apart else -(-pairs // experts), x.dtype.itemsize)
        # the last tile of each expert may be partly filled
        count = pairs if apart else min(pairs, experts) + pairs // tiles.rows
        # Triton's interpreter (3.9) has no matrix product of bf16
        interpreted_bf16 = knobs.runtime.interpret and x.dtype == torch.bfloat16
        shared: dict[str, Any] = {
            "EXPERTS": experts,
            "SPREAD": 1 << (experts - 1).bit_length(),
            "APART": apart,
            "ROWS": tiles.rows,
            "COMPUTE": products.DTYPES[torch.float32 if interpreted_bf16 else x.dtype],
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
        }
        limit = 0.0 if spec.limit is None else spec.limit
        columns = tiles.columns // 2
        is_coded = isinstance(form, CodedExperts)
        gated = coded_products.multiply_gated_codes if is_coded else products.multiply_gated
        second = coded_products.multiply_shared_codes if is_coded else products.multiply_shared
        w13, of_w13 = _operands(form.w13, tiles)
        w2, of_w2 = _operands(form.w2, tiles)
        gated[(count * -(-inner.shape[1] // columns),)](
            *(x, *w13, form.w13_bias, inner, ids, order, starts),
            *(inner.shape[1], hidden, chosen),
            FORM=spec.form,
            INTERLEAVED=spec.interleaved,
            ALPHA=spec.alpha,
            BETA=spec.beta,
            LIMIT=limit,
            COLUMNS=columns,
            **of_w13,
            **shared,
        )
        second[(count * -(-hidden // tiles.columns),)](
            *(inner, *w2, form.w2_bias, found, shares, ids, order, starts),
            *(hidden, inner.shape[1]),
            COLUMNS=tiles.columns,
            **of_w2,
            **shared,
        )
        pieces = -(-hidden // SUMMED)
        sums.sum_pairs[(rows * pieces,)](found, ids, out, hidden, CHOSEN=chosen, EXPERTS=experts, BLOCK=SUMMED)
        return out


def _operands(weights: Tensor | ExpertCodes, tiles: ExpertTiles) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Returns the arguments of a kernel for a product's weights: tensors, and constants."""
    if isinstance(weights, Tensor):
        return (weights,), {"DEPTH": tiles.depth}
    zeros = weights.scales if weights.zeros is None else weights.zeros
    return (weights.codes, weights.scales, zeros), {
        "GROUP": weights.group,
        "SCALE_ROWS": weights.block[0],
        "SCALE_COLUMNS": weights.block[1],
        "SCALE_LINES": weights.scales.shape[1],
        "SCALES": weights.scales.shape[2],
        "HAS_ZEROS": weights.zeros is not None,
        "KIND": weights.kind,
    }


def choose_tiles(pairs: int, itemsize: int) -> ExpertTiles:
    """Chooses tile sizes. pairs: the average per expert. Few pairs are bound by reading the weights, many by
    arithmetic.
    """
    depth = 128 // itemsize
    if pairs <= 16:
        return ExpertTiles(16, 64, 2 * depth, 4, 4)
    if pairs <= 32:
        return ExpertTiles(32, 64, 2 * depth, 4, 3)
    if pairs <= 96:
        return ExpertTiles(64, 128, depth, 4, 3)
    return ExpertTiles(128, 128, depth, 8, 3)
