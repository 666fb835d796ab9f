"""Linear layers on CPU with packed weights: through oneDNN, which torch carries, and natively for a few rows.

Why: on CPUs that torch's default BLAS has no fast path for, `torch.nn.functional.linear` in fp32 reached a third of
oneDNN's speed (all of SmolLM2-135M's weights once, one thread of an AVX-512 core: 16 rows 100 ms against 34 ms, 1024
rows 4.8 s against 1.0 s, 1 row 38 ms against 17 ms). With few rows memory is the bound, and the native kernel closer to
it (another core, 1 row 42 ms against oneDNN's 50, 16 rows 60 ms against 70). A weight that fits in fewer bits is read
from a compact copy (`compact.py`), whose product differs in the order of its sums alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.native.library import native
from vllm_gaudi_ucm.ops.native.tensor import is_rows
from vllm_gaudi_ucm.ops.packed_linear.compact import Compact, find_compact
from vllm_gaudi_ucm.ops.packed_linear.panels import Panels, find_panels

# oneDNN chooses the block layout for a number of rows; of 1, 16, 256 and unknown, 16 was the best over 1 to 1024 rows.
PACK_FOR_ROWS = 16
# More rows are bound by arithmetic, which oneDNN orders better.
NATIVE_ROWS = 64


class PackedWeight(NamedTuple):
    """An opaque reordered weight [outputs, inputs], its panels for the native kernel, and its compact copy."""

    tensor: Tensor
    outputs: int
    inputs: int
    panels: Panels | None
    compact: Compact | None = None


def can_pack(weight: Tensor) -> bool:
    """Whether this torch and this CPU multiply a weight of this dtype and device fast when it is packed."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32


def pack(weight: Tensor, compact: bool = False) -> PackedWeight:
    """Reorders a weight [out features, in features] for which `can_pack` holds. A copy: the weight may be freed.

    compact: look for a form of fewer bits that holds every value, and keep that too.
    """
    plain = weight.detach().contiguous()
    packed = torch.ops.mkldnn._reorder_linear_weight(plain, PACK_FOR_ROWS)
    found = find_compact(plain) if compact else None
    return PackedWeight(packed, plain.shape[0], plain.shape[1], find_panels(plain, packed), found)


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [rows, in features] times the weight's transpose, plus bias [out features]; the result has the dtype of x."""
    native_form = weight.compact or weight.panels
    if native_form is not None and not torch.compiler.is_compiling() and _is_native(x, weight, bias):
        return _multiply_few_rows(x, native_form, weight.outputs, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight.tensor, bias, "none", [], "")


def _is_native(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> bool:
    """Few rows of the right size; what does not fit is left to oneDNN, which says so."""
    if not is_rows(x) or x.shape[0] > NATIVE_ROWS or x.shape[1] != weight.inputs:
        return False
    return bias is None or (bias.dtype == x.dtype and bias.shape == (weight.outputs,) and bias.is_contiguous())


def _multiply_few_rows(x: Tensor, weight: Compact | Panels, outputs: int, bias: Tensor | None) -> Tensor:
    kernels = native()
    assert kernels is not None, "these forms are found only for native kernels"
    out = x.new_empty((x.shape[0], outputs))
    address = None if bias is None else bias.data_ptr()
    sizes = (x.shape[0], x.shape[1], outputs, weight.width)
    if isinstance(weight, Compact):
        codes, scales, offsets = (part.data_ptr() for part in (weight.codes, weight.scales, weight.offsets))
        form = int(weight.form)
        kernels.ucm_compact_linear(
            x.data_ptr(), x.stride(0), form, codes, scales, offsets, address, out.data_ptr(), *sizes
        )
    else:
        kernels.ucm_linear(x.data_ptr(), x.stride(0), weight.address, address, out.data_ptr(), *sizes)
    return out
