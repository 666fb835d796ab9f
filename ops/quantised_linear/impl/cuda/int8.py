"""Products of 8-bit integers on CUDA, by Triton kernels. Any number of rows is rounded as the checkpoint specifies.

Integer products run at twice the rate of bfloat16's, and sums of integers are exact however they are divided.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from vllm_gaudi_ucm.ops.quantised_linear.impl.cuda.tiles import tiles_of
from vllm_gaudi_ucm.ops.quantised_linear.rounding import MOST_INPUTS, RoundedRows
from vllm_gaudi_ucm.ops.quantised_linear.weight import QuantisedWeight
from vllm_gaudi_ucm.ops.registry import why_not_triton

# Inputs multiplied at a time, and outputs of a program that adds up parts.
GROUP, ADDED = 128, 256


class CudaInt8:
    """Multiplies rounded rows by an int8 weight with a scale per output."""

    def __init__(self, weight: QuantisedWeight) -> None:
        assert weight.rounding is not None, "see covers"
        self._symmetric, self._is_fixed = weight.rounding.symmetric, weight.rounding.scale is not None

    @staticmethod
    def covers(weight: QuantisedWeight) -> bool:
        """True if the checkpoint rounds rows, and the kernels run here."""
        if weight.rounding is None or weight.codes.dtype != torch.int8 or weight.zeros is not None:
            return False
        by_output = weight.by_channel and weight.block[0] == 1
        return by_output and weight.inputs <= MOST_INPUTS and why_not_triton(weight.codes.device.type) is None

    def pack(self, weight: QuantisedWeight) -> dict[str, Tensor]:
        assert weight.rounding is not None, "see covers"
        fixed = weight.rounding.fixed()
        return {
            "weight": weight.codes.contiguous(),
            "weight_scale": weight.scales.reshape(-1).float().contiguous(),
            "weight_sum": weight.codes.sum(1, dtype=torch.int32),
            **({} if fixed is None else {"input_rounding": fixed}),
        }

    def multiply(self, x: Tensor, layer: nn.Module, bias: Tensor | None) -> Tensor:
        """Multiplies x [..., inputs]."""
        from vllm_gaudi_ucm.ops.quantised_linear.impl.cuda.triton.int8 import add_sums, multiply_int8

        rows = x.reshape(-1, x.shape[-1])
        weight, weight_scales, sums = (
            cast(Tensor, getattr(layer, name)) for name in ("weight", "weight_scale", "weight_sum")
        )
        (count, inputs), outputs = rows.shape, weight.shape[0]
        out = x.new_empty(count, outputs)
        if count:
            fixed = cast(Tensor, layer.input_rounding) if self._is_fixed else None
            narrow = round_rows(rows, self._symmetric, fixed)
            tiles = tiles_of(count, outputs, -(-inputs // GROUP))
            whole = tiles.splits == 1
            to = out if whole else x.new_empty(tiles.splits, count, outputs, dtype=torch.int32)
            scaling = narrow.scales, narrow.zeros, weight_scales, sums, weight_scales if bias is None else bias
            multiply_int8[tiles.grid(count, outputs)](
                *(narrow.codes, weight, *scaling, to, count, outputs),
                INPUTS=inputs,
                HAS_BIAS=bias is not None,
                ROWS=tiles.rows,
                OUTPUTS=tiles.outputs,
                GROUP=GROUP,
                SPLITS=tiles.splits,
                num_warps=tiles.warps,
                num_stages=tiles.stages,
            )
            if not whole:
                add_sums[(count, -(-outputs // ADDED))](
                    *(to, *scaling, out, count, outputs),
                    SPLITS=tiles.splits,
                    HAS_BIAS=bias is not None,
                    OUTPUTS=ADDED,
                )
        return out.reshape(*x.shape[:-1], outputs)


def round_rows(rows: Tensor, symmetric: bool, fixed: Tensor | None) -> RoundedRows:
    """Like `rounding.round_rows`. rows: [rows, inputs]. fixed: as in  `RowRounding.fixed`."""
    from vllm_gaudi_ucm.ops.quantised_linear.impl.cuda.triton import int8

    if rows.stride(1) != 1:
        rows = rows.contiguous()
    count, inputs = rows.shape
    codes = torch.empty(rows.shape, dtype=torch.int8, device=rows.device)
    scales = torch.empty(count, 1, dtype=torch.float32, device=rows.device)
    zeros = torch.empty(count, 1, dtype=torch.int32, device=rows.device)
    int8.round_rows[(count,)](
        *(rows, scales if fixed is None else fixed, codes, scales, zeros, inputs, rows.stride(0)),
        IS_FIXED=fixed is not None,
        SYMMETRIC=symmetric,
        INPUTS=1 << (inputs - 1).bit_length(),
        num_warps=8,
        enable_fp_fusion=False,
    )
    return RoundedRows(codes, scales, zeros)
