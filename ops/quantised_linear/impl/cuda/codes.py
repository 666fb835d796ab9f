"""Products on CUDA: 8-bit floats with a scale per output by torch's scaled product, the rest by one Triton kernel.

The kernel reads codes in place, 4 or 8 bits each, and rows in the model's dtype: rows are not rounded. For many rows of
half precision, another kernel dequantises the weight and torch multiplies: a layer's plain weight exists only during
its product. torch's scaled product rounds rows to e4m3, as vLLM's layers do.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from vllm_gaudi_ucm.ops.narrow_floats import has_e4m3
from vllm_gaudi_ucm.ops.quantised_linear.impl.cuda.tiles import tiles_of
from vllm_gaudi_ucm.ops.quantised_linear.packed_codes import group_of, pack_codes
from vllm_gaudi_ucm.ops.quantised_linear.weight import QuantisedWeight
from vllm_gaudi_ucm.ops.registry import why_not_triton

# Elements of a program that adds up parts, and outputs of a program that dequantises a weight.
ADDED, WRITTEN = 1024, 16
# Rows up to which the kernel of codes takes less time than narrowing them and torch's scaled product, on an H200.
FEW_ROWS = 16
# Rows from which dequantising pays off: on an H200 the kernel then takes as long as dequantising and torch's product.
MANY_ROWS = 256
LARGEST = 448.0
SMALLEST_SCALE = 1e-12


def way_of(rows: int, dtype: torch.dtype, *, narrowed: bool = False) -> Literal["codes", "scaled", "written out"]:
    """Chooses how this many rows are multiplied, whatever the codes are. A captured graph uses the way of its bucket's
    rows.

    narrowed: torch's scaled product takes the weight.
    """
    if narrowed:
        return "codes" if rows <= FEW_ROWS else "scaled"
    return "written out" if rows >= MANY_ROWS and dtype.itemsize < 4 else "codes"


class CudaFp8:
    """Multiplies e4m3 rows by an e4m3 weight with a scale per output, in one scaled product; each row gets its own
    scale.

    Few rows are not narrowed: the kernel of codes reads the weight once and takes rows as they are.
    """

    def __init__(self, weight: QuantisedWeight) -> None:
        self._few = CudaCodes(weight) if CudaCodes.covers(weight) else None

    @staticmethod
    def covers(weight: QuantisedWeight, dtype: torch.dtype) -> bool:
        """True if torch's product takes this weight here: it needs multiples of 16 and results in bfloat16."""
        is_e4m3 = weight.codes.dtype == torch.float8_e4m3fn and weight.zeros is None
        by_output = weight.by_channel and weight.block[0] == 1
        sizes = weight.outputs % 16 == 0 and weight.inputs % 16 == 0
        on_gpu = weight.codes.device.type == "cuda" and has_e4m3(weight.codes.device)
        return is_e4m3 and by_output and sizes and dtype == torch.bfloat16 and on_gpu

    def pack(self, weight: QuantisedWeight) -> dict[str, Tensor]:
        return {"weight": weight.codes.contiguous(), "weight_scale": weight.scales.reshape(-1, 1).contiguous()}

    def multiply(self, x: Tensor, layer: nn.Module, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self._few is not None and way_of(len(rows), x.dtype, narrowed=True) == "codes":
            return self._few.multiply(x, layer, bias)
        narrow, scale = narrow_rows(rows)
        weight, scales = cast(Tensor, layer.weight), cast(Tensor, layer.weight_scale).view(1, -1)
        found = torch._scaled_mm(narrow, weight.t(), scale_a=scale, scale_b=scales, bias=bias, out_dtype=x.dtype)
        return found.reshape(*x.shape[:-1], found.shape[-1])


class CudaCodes:
    """Multiplies rows by codes of 4 or 8 bits with scales of any blocks, in a Triton kernel."""

    def __init__(self, weight: QuantisedWeight) -> None:
        self._block = weight.block
        self._group = group_of(weight)
        self._packed = is_packable(weight) and self._group is not None
        self._has_zeros = weight.zeros is not None

    @staticmethod
    def covers(weight: QuantisedWeight) -> bool:
        """True if the kernel runs here and takes these blocks."""
        if why_not_triton(weight.codes.device.type) is not None or group_of(weight) is None:
            return False
        return weight.codes.dtype != torch.float8_e4m3fn or has_e4m3(weight.codes.device)

    def pack(self, weight: QuantisedWeight) -> dict[str, Tensor]:
        codes = weight.codes
        if self._packed:
            assert self._group is not None
            codes = pack_codes(codes, "uint4", self._group)
        found = {"weight": codes.contiguous(), "weight_scale": weight.scales.contiguous()}
        if weight.zeros is not None:
            found["weight_zeros"] = weight.zeros.float().contiguous()
        return found

    def multiply(self, x: Tensor, layer: nn.Module, bias: Tensor | None) -> Tensor:
        from vllm_gaudi_ucm.ops.quantised_linear.impl.cuda.triton.rows import add_parts, multiply_codes

        rows = x.reshape(-1, x.shape[-1])
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        codes, scales = cast(Tensor, layer.weight), cast(Tensor, layer.weight_scale)
        outputs = codes.shape[0]
        if way_of(len(rows), x.dtype) == "written out":
            found = nn.functional.linear(rows, self._written_out(layer, x.dtype), bias)
            return found.reshape(*x.shape[:-1], outputs)
        out = x.new_empty(rows.shape[0], outputs)
        assert self._group is not None, "see covers"
        tiles = tiles_of(rows.shape[0], outputs, rows.shape[1] // self._group)
        whole = tiles.splits == 1
        # partial sums over the inputs
        to = out if whole else x.new_empty(tiles.splits, *out.shape, dtype=torch.float32)
        if rows.shape[0]:
            multiply_codes[tiles.grid(rows.shape[0], outputs)](
                rows,
                codes,
                scales,
                layer.weight_zeros if self._has_zeros else scales,
                scales if bias is None else bias,
                to,
                rows.shape[0],
                outputs,
                rows.stride(0),
                outputs,
                INPUTS=rows.shape[1],
                GROUP=self._group,
                SCALE_ROWS=self._block[0],
                SCALE_COLUMNS=self._block[1],
                SCALES=scales.shape[1],
                PACKED=self._packed,
                HAS_ZEROS=self._has_zeros,
                HAS_BIAS=bias is not None and whole,
                COMPUTE=_compute_type(x.dtype),
                ROWS=tiles.rows,
                OUTPUTS=tiles.outputs,
                SPLITS=tiles.splits,
                num_warps=tiles.warps,
                num_stages=tiles.stages,
            )
            if not whole:
                add_parts[(-(-out.numel() // ADDED),)](
                    to,
                    scales if bias is None else bias,
                    out,
                    out.numel(),
                    outputs,
                    SPLITS=tiles.splits,
                    HAS_BIAS=bias is not None,
                    ELEMENTS=ADDED,
                )
        return out.reshape(*x.shape[:-1], outputs)

    def _written_out(self, layer: nn.Module, dtype: torch.dtype) -> Tensor:
        """Returns the plain weight, which exists only during the product."""
        from vllm_gaudi_ucm.ops.quantised_linear.impl.cuda.triton.rows import write_out

        codes, scales, group = cast(Tensor, layer.weight), cast(Tensor, layer.weight_scale), self._group
        assert group is not None
        outputs, inputs = codes.shape[0], codes.shape[1] * (2 if self._packed else 1)
        out = torch.empty(outputs, inputs, dtype=dtype, device=codes.device)
        write_out[(-(-outputs // WRITTEN), inputs // group)](
            *(codes, scales, layer.weight_zeros if self._has_zeros else scales, out, outputs, inputs),
            GROUP=group,
            SCALE_ROWS=self._block[0],
            SCALE_COLUMNS=self._block[1],
            SCALES=scales.shape[1],
            PACKED=self._packed,
            HAS_ZEROS=self._has_zeros,
            OUTPUTS=WRITTEN,
        )
        return out


def narrow_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 [rows, inputs], and float32 [rows, 1], the scale of each row."""
    narrow = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty(len(rows), 1, dtype=torch.float32, device=rows.device)
    if why_not_triton(rows.device.type) is not None or rows.stride(1) != 1:
        scales = (rows.abs().amax(1, keepdim=True).float() / LARGEST).clamp_min(SMALLEST_SCALE)
        return (rows.float() / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales
    if len(rows):
        from vllm_gaudi_ucm.ops.quantised_linear.impl.cuda.triton import rows as kernels

        inputs = rows.shape[1]
        kernels.narrow_rows[(len(rows),)](
            rows,
            narrow,
            scales,
            inputs,
            rows.stride(0),
            LARGEST=LARGEST,
            SMALLEST=SMALLEST_SCALE,
            INPUTS=1 << (inputs - 1).bit_length(),
            num_warps=8,
        )
    return narrow, scales


def _compute_type(dtype: torch.dtype) -> Any:
    """Returns the dtype of Triton's products. Its interpreter has no products of bfloat16."""
    import triton.language as tl
    from triton import knobs

    if dtype == torch.float32 or (knobs.runtime.interpret and dtype == torch.bfloat16):
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16


def is_packable(weight: QuantisedWeight) -> bool:
    """True if codes are unsigned integers of 4 bits."""
    return weight.codes.dtype == torch.uint8 and int(weight.codes.amax()) < 16
