"""Products of 8-bit integers on a CPU that adds up four products at a time (AVX512-VNNI)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from vllm_gaudi_ucm.ops.cpu.native.half_rows import narrow_rows, widen_rows
from vllm_gaudi_ucm.ops.cpu.native.library import HALF_TYPES, is_rows, native
from vllm_gaudi_ucm.ops.quantised_linear.rounding import MOST_INPUTS, multiply_rounded
from vllm_gaudi_ucm.ops.quantised_linear.weight import QuantisedWeight, RowRounding

if TYPE_CHECKING:
    from vllm_gaudi_ucm.ops.quantised_linear.api import Product, Target

# Outputs of a panel; outputs of a vector, at the end of which the last panel may end; inputs multiplied at a time.
PANEL, VECTOR, AT_ONCE = 64, 16, 4


class CpuInt8:
    """Multiplies rounded rows by an int8 weight with a scale per output, in the native kernel."""

    def __init__(self, weight: QuantisedWeight) -> None:
        assert weight.rounding is not None, "see covers"
        self._symmetric, self._is_fixed = weight.rounding.symmetric, weight.rounding.scale is not None
        self._outputs = weight.outputs

    @staticmethod
    def covers(weight: QuantisedWeight) -> bool:
        """True if the checkpoint rounds rows, and this CPU multiplies integers fast."""
        if weight.rounding is None or weight.codes.dtype != torch.int8 or weight.zeros is not None:
            return False
        if not (weight.by_channel and weight.block[0] == 1 and weight.inputs <= MOST_INPUTS):
            return False
        kernels = native()
        return kernels is not None and bool(kernels.ucm_multiplies_int8())

    def pack(self, weight: QuantisedWeight) -> dict[str, Tensor]:
        outputs = -(-weight.outputs // VECTOR) * VECTOR
        codes = nn.functional.pad(weight.codes, (0, -weight.inputs % AT_ONCE, 0, outputs - weight.outputs))
        scales = nn.functional.pad(weight.scales.reshape(-1).float(), (0, outputs - weight.outputs))
        panels = (part.unflatten(1, (-1, AT_ONCE)).transpose(0, 1).flatten() for part in codes.split(PANEL))
        assert weight.rounding is not None, "see covers"
        fixed = weight.rounding.fixed()
        return {
            "weight": torch.cat(tuple(panels)),
            "weight_scale": scales.contiguous(),
            "weight_sum": codes.sum(1, dtype=torch.int32),
            **({} if fixed is None else {"input_rounding": fixed}),
        }

    def multiply(self, x: Tensor, layer: nn.Module, bias: Tensor | None) -> Tensor:
        """Multiplies x [..., inputs]."""
        rows = x.reshape(-1, x.shape[-1])
        if torch.compiler.is_compiling():
            found = multiply_rounded(rows, self._unpacked(layer, rows.shape[1]), bias)
        elif rows.dtype in HALF_TYPES:
            wide = None if bias is None else widen_rows(bias.view(1, -1)).view(-1)
            found = self._product(widen_rows(rows), layer, wide)
            found = narrow_rows(found, x.new_empty(found.shape))
        else:
            found = self._product(rows, layer, bias)
        return found.view(*x.shape[:-1], self._outputs)

    def _unpacked(self, layer: nn.Module, inputs: int) -> QuantisedWeight:
        """Restores the weight from its packed form for a compiler, which cannot trace a native kernel."""
        packed, scales = cast(Tensor, layer.weight), cast(Tensor, layer.weight_scale)
        outputs, width = len(scales), -(-inputs // AT_ONCE) * AT_ONCE
        last = outputs % PANEL
        panels = packed.split([(outputs - last) * width, last * width])
        codes = torch.cat(
            [
                part.view(-1, width // AT_ONCE, size, AT_ONCE).transpose(1, 2).reshape(-1, width)
                for part, size in zip(panels, (PANEL, last), strict=True)
                if size and part.numel()
            ]
        )[: self._outputs, :inputs]
        fixed = cast(Tensor, layer.input_rounding) if self._is_fixed else None
        rounding = RowRounding(self._symmetric, *((None, None) if fixed is None else fixed.unbind()))
        return QuantisedWeight(codes, scales[: self._outputs].unsqueeze(1), (1, inputs), None, rounding)

    def _product(self, rows: Tensor, layer: nn.Module, bias: Tensor | None) -> Tensor:
        """rows: float32 [rows, inputs]."""
        kernels = native()
        assert kernels is not None, "see covers"
        if not is_rows(rows):
            rows = rows.contiguous()
        bias = bias if bias is None else bias.contiguous()
        out = rows.new_empty((rows.shape[0], self._outputs))
        fixed = cast(Tensor, layer.input_rounding) if self._is_fixed else None
        parts = (cast(Tensor, getattr(layer, name)) for name in ("weight", "weight_scale", "weight_sum"))
        kernels.ucm_int8_linear(
            rows.data_ptr(),
            rows.stride(0),
            None if fixed is None else fixed.data_ptr(),
            int(self._symmetric),
            *(part.data_ptr() for part in parts),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            *rows.shape,
            self._outputs,
        )
        return out


def choose(weight: QuantisedWeight, target: Target) -> Product | None:
    """See `choose_product`.

    A CPU keeps plain weights, except for rounded rows. Plain weights are packed like any others, in fewer bits if that
        is exact.
    """
    return CpuInt8(weight) if CpuInt8.covers(weight) else None
