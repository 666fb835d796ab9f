"""Linear layers on a CPU with packed weights: by oneDNN, which is part of torch, or by faster native kernels.

Why: on CPUs without a fast path in torch's default BLAS, `torch.nn.functional.linear` in fp32 reached a third of
oneDNN's speed (all weights of SmolLM2-135M once, one thread of an AVX-512 core: 16 rows 100 ms against 34 ms, 1024 rows
4.8 s against 1.0 s, 1 row 38 ms against 17 ms). With few rows memory bandwidth is the limit, and the native kernel
comes closer to it (another core: 1 row 42 ms against oneDNN's 50, 16 rows 60 ms against 70). A weight whose values fit
in fewer bits is read from a compact copy (`packing.py`); its product differs only in the order of the sums. On a CPU
with a matrix unit both forms are multiplied there, as sums of bfloat16 (`ops/cpu/native/source/tile_linear.cpp`), and a
weight with a compact copy needs no other copy; nor does it with 512-bit vectors and panels that stay in the cache.

A bfloat16 weight is multiplied with bfloat16 rows in pairs if the CPU has instructions for that (`bf16_linear.cpp`), or
from the same memory on the matrix unit (`bf16_tiles.cpp`); otherwise a few rows of half precision are widened. All are
native calls, which a graph can hold. The fastest way for each number of rows is measured once per CPU
(`measured_ways.py`).
"""

from __future__ import annotations

import os
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.cpu.native import matrix_unit
from vllm_gaudi_ucm.ops.cpu.native.half_rows import narrow_rows, widen_rows
from vllm_gaudi_ucm.ops.cpu.native.library import HALF_TYPES, is_half_rows, is_rows, native
from vllm_gaudi_ucm.ops.cpu.packed_linear.packing import (
    Compact,
    Form,
    Panels,
    find_compact,
    find_pairs,
    find_panels,
    panels_of,
)
from vllm_gaudi_ucm.ops.cpu.packed_linear.way import MEASURED_ROWS, NATIVE_ROWS, Kind, Way, fastest_way, times_of, ways

# oneDNN lays a weight out for this number of rows. It is a hint: other layouts are slower with few rows or with many.
PACK_FOR_ROWS = 16
# A compact weight needs no copy for oneDNN on a CPU with this many lanes, which has registers for all of its sums.
ALONE_LANES = 16
# Number of fp32 panels for the native kernel, in addition to the values of `Form`.
_FLOAT32 = 3


class PackedWeight(NamedTuple):
    """An opaque reordered weight [outputs, inputs], its panels for the native kernels, and its compact copy.

    tensor: None if only another form is kept.
    pairs: a bfloat16 weight arranged for instructions that multiply pairs.
    is_fp32: products are computed in fp32, even for a weight in half precision, if the CPU cannot compute in it.
    """

    tensor: Tensor | None
    outputs: int
    inputs: int
    panels: Panels | None
    compact: Compact | None = None
    is_fp32: bool = True
    pairs: Panels | None = None


def can_pack(weight: Tensor) -> bool:
    """True if packing makes products with a weight of this dtype and device fast, with this torch and CPU."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or weight.dtype in HALF_TYPES


def pack(weight: Tensor, compact: bool = False) -> PackedWeight:
    """Reorders a weight [out features, in features] for which `can_pack` holds. A copy: the weight may be freed.

    compact: also look for a form with fewer bits that holds every value exactly. It is kept too, or alone if the CPU
        multiplies it fast for any number of rows.
    """
    plain = weight.detach().contiguous()
    if not _has_units_for(plain.dtype):
        # exact, and products are fp32: without units for half precision torch takes five times as long
        plain, compact = plain.float(), True
    outputs, inputs = plain.shape
    pairs = find_pairs(plain)
    if pairs is not None:
        is_alone = not _needs_onednn(pairs, inputs)
        packed = None if is_alone else torch.ops.mkldnn._reorder_linear_weight(plain, PACK_FOR_ROWS)
        return PackedWeight(packed, outputs, inputs, None, is_fp32=False, pairs=pairs)
    found = find_compact(plain.float()) if compact else None
    is_fp32 = plain.dtype == torch.float32
    if found is not None and is_fp32 and _enough_alone(inputs):
        return PackedWeight(None, outputs, inputs, None, found)
    packed = torch.ops.mkldnn._reorder_linear_weight(plain, PACK_FOR_ROWS)
    panels = find_panels(plain, packed)
    if panels is None and is_fp32 and _enough_alone(inputs) and (own := panels_of(plain)) is not None:
        # this release of oneDNN lays weights out differently
        return PackedWeight(None, outputs, inputs, own)
    return PackedWeight(packed, outputs, inputs, panels, found, is_fp32)


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [..., in features] times the weight's transpose, plus bias [out features]; the result has the dtype of x.

    Raises RuntimeError if sizes or dtypes do not match.
    """
    if x.dim() != 2:
        rows = x.reshape(-1, x.shape[-1])
        return packed_linear(rows, weight, bias).view(*x.shape[:-1], weight.outputs)
    if x.dtype in HALF_TYPES and (found := _in_half(x, weight, bias)) is not None:
        return found
    if weight.tensor is None and x.stride(1) != 1:
        x = x.contiguous()
    form = weight.compact or weight.panels
    if form is not None and not torch.compiler.is_compiling() and _fits(x, weight, bias):
        # oneDNN's copy of any other weight is not for fp32 rows
        way = _way(kind_of(form), x.shape[0], _has_tiles(form), weight.tensor is not None and weight.is_fp32)
        if way is not Way.ONEDNN:
            return multiply_form(x, form, weight.outputs, bias, tiles=way is Way.TILES)
    if weight.tensor is None:
        raise RuntimeError(
            f"a packed weight of {weight.outputs} outputs and {weight.inputs} inputs: found x {x.dtype} "
            f"{tuple(x.shape)}, bias {None if bias is None else tuple(bias.shape)}; expected "
            f"{'float32' if weight.pairs is None else 'bfloat16'} rows of {weight.inputs} on the CPU, a bias of "
            f"{weight.outputs}, and no compilation"
        )
    return torch.ops.mkldnn._linear_pointwise(x, weight.tensor, bias, "none", [], "")


def _in_half(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor | None:
    """Multiplies rows in half precision by native kernels, or in fp32; None if oneDNN is to do it."""
    if weight.pairs is not None:
        if not is_half_rows(x):
            x = x.contiguous()
        if x.dtype != torch.bfloat16 or torch.compiler.is_compiling() or not _sizes_fit(x, weight, bias):
            return None  # oneDNN gets the rows, and raises the error
        way = _way(Kind.PAIRS, x.shape[0], has_pair_tiles(weight.inputs), weight.tensor is not None)
        return None if way is Way.ONEDNN else multiply_pairs(x, weight.pairs, bias, tiles=way is Way.TILES)
    if not weight.is_fp32 and not (weight.compact is not None and x.shape[0] <= NATIVE_ROWS and is_half_rows(x)):
        return None
    wide_bias = None if bias is None else widen_rows(bias.view(1, -1)).view(-1)
    product = packed_linear(widen_rows(x), weight, wide_bias)
    return narrow_rows(product, x.new_empty(product.shape))


def _way(kind: Kind, rows: int, tiles: bool, onednn: bool, plain: bool = False) -> Way:
    return fastest_way(kind, min(rows, MEASURED_ROWS[-1] + 1), ways(tiles, onednn, plain))


def _has_tiles(form: Compact | Panels) -> bool:
    return matrix_unit.in_use() and not _is_float16(form)


def plain_is_faster(weight: PackedWeight, plain: Tensor, rows: int) -> bool:
    """Returns whether times say that torch multiplies so many rows by the weight before packing, `plain`, faster."""
    if weight.pairs is not None:
        kind, dtype, tiles = Kind.PAIRS, torch.bfloat16, has_pair_tiles(weight.inputs)
    elif (form := weight.compact or weight.panels) is not None:
        kind, dtype, tiles = kind_of(form), torch.float32, _has_tiles(form)
    else:
        return False
    return plain.dtype == dtype and _way(kind, rows, tiles, weight.tensor is not None, plain=True) is Way.PLAIN


def multiplies_pairs() -> bool:
    """True if this CPU has instructions for pairs of bfloat16."""
    kernels = native()
    return kernels is not None and bool(kernels.ucm_multiplies_bf16())


def has_pair_tiles(inputs: int) -> bool:
    """True if the matrix unit multiplies pairs of this many inputs: whole tiles, read in place."""
    return inputs % 32 == 0 and matrix_unit.in_use()


def kind_of(form: Compact | Panels) -> Kind:
    """The kind of a weight that is kept in this form; panels are fp32 here."""
    return Kind[form.form.name] if isinstance(form, Compact) else Kind.FLOAT32


def multiply_pairs(x: Tensor, weight: Panels, bias: Tensor | None, tiles: bool) -> Tensor:
    kernels = native()
    assert kernels is not None, "pairs are found only for native kernels"
    out = x.new_empty((x.shape[0], weight.owner.shape[0] * weight.width))
    address = None if bias is None else bias.data_ptr()
    given = (x.data_ptr(), x.stride(0), weight.address, address, out.data_ptr())
    multiply = kernels.ucm_bf16_tile_linear if tiles else kernels.ucm_bf16_linear
    multiply(*given, *x.shape, out.shape[1], weight.width)
    return out


def _has_units_for(dtype: torch.dtype) -> bool:
    """True if oneDNN computes in this dtype here, and not much more slowly than in fp32."""
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _enough_alone(inputs: int) -> bool:
    """True if native kernels multiply a weight of this size as fast as oneDNN, for any number of rows."""
    if matrix_unit.in_use():
        return True
    kernels = native()
    # a panel is fp32, or is expanded to fp32
    return kernels is not None and kernels.ucm_lanes() >= ALONE_LANES and stays_in_cache(64 * inputs * 4)


def _needs_onednn(pairs: Panels, inputs: int) -> bool:
    """True if a weight in pairs needs a copy for oneDNN, too, for steps of many rows."""
    if matrix_unit.in_use() or not stays_in_cache(pairs.width * inputs * 2):
        return True  # with the unit, oneDNN handles large weights better than the times of a small one suggest
    times = times_of(Kind.PAIRS)
    return bool(times.seconds) and times.needs_onednn(ways(tiles=False, onednn=True))


def stays_in_cache(size: int) -> bool:
    """True if a panel of this size in bytes fits in half of a core's second-level cache; rows get the other half."""
    return 2 * size <= second_cache()


@cache
def second_cache() -> int:
    """Returns the bytes of a core's second-level cache; 1 MiB if the system does not tell."""
    try:
        found = os.sysconf("SC_LEVEL2_CACHE_SIZE")
    except (OSError, ValueError):
        found = 0
    return found if found > 0 else 1 << 20


def _is_float16(form: Compact | Panels) -> bool:
    """True for a form that the matrix unit cannot read."""
    return isinstance(form, Compact) and form.form is Form.FLOAT16


def _fits(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> bool:
    """True if sizes and dtypes match; if not, oneDNN gets them and raises the error."""
    return is_rows(x) and _sizes_fit(x, weight, bias)


def _sizes_fit(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> bool:
    """True if x is [rows, inputs] and the bias has an element of the same dtype for each output."""
    if x.shape[1] != weight.inputs:
        return False
    return bias is None or (bias.dtype == x.dtype and bias.shape == (weight.outputs,) and bias.is_contiguous())


def multiply_form(x: Tensor, weight: Compact | Panels, outputs: int, bias: Tensor | None, tiles: bool) -> Tensor:
    """Multiplies by a native kernel. tiles: on the matrix unit, which must be in use."""
    kernels = native()
    assert kernels is not None, "these forms are found only for native kernels"
    out = x.new_empty((x.shape[0], outputs))
    address = None if bias is None else bias.data_ptr()
    given = (x.data_ptr(), x.stride(0))
    to = (address, out.data_ptr(), x.shape[0], x.shape[1], outputs, weight.width)
    if isinstance(weight, Compact):
        codes, scales, offsets = (part.data_ptr() for part in (weight.codes, weight.scales, weight.offsets))
        multiply = kernels.ucm_tile_linear if tiles else kernels.ucm_compact_linear
        multiply(*given, int(weight.form), codes, scales, offsets, *to)
    elif tiles:
        kernels.ucm_tile_linear(*given, _FLOAT32, weight.address, None, None, *to)
    else:
        kernels.ucm_linear(*given, weight.address, *to)
    return out
