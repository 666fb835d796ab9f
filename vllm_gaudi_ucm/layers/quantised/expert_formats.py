"""Parameters of quantised experts for vLLM's loader: one tensor for all experts of a layer.

The formats are the same as for linear layers (`formats.py`). Names, shapes and marks of parameters match those of
vLLM's own methods, which `RoutedExperts` reads: scales to divide among ranks, and tensors with inputs first.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.layers.quantised.formats import (
    AwqFormat,
    GptqFormat,
    Mxfp4Format,
    PackedIntegers,
    PlainFormat,
    ScaledFormat,
    WeightFormat,
)
from vllm_gaudi_ucm.ops.quantised_linear.packed_codes import CodeKind
from vllm_gaudi_ucm.ops.quantised_linear.weight import QuantisedWeight

# of an e8m0: a scale of 1, and NaN
ONE, NOT_LOADED = 127, 255


class ExpertSizes(NamedTuple):
    """The sizes of a rank's part of an expert.

    all_inner: the size on all `ranks` that share each expert. filled: the part of `inner` that the checkpoint fills;
        the rest is zero.
    """

    hidden: int
    inner: int
    all_inner: int
    ranks: int
    filled: int


class ExpertMatrix(NamedTuple):
    """One of the two products of each expert. halves: matrices that are stacked in it, gate and up."""

    name: str
    halves: int
    outputs: int
    inputs: int
    all_inputs: int
    sizes: ExpertSizes

    def groups(self, size: int | None) -> int:
        """Groups of inputs with a scale of their own; None: all inputs are one.

        Raises ValueError if a group would span two ranks.
        """
        if size is None or size == self.all_inputs:
            return 1
        if self.inputs % size:
            raise ValueError(
                f"experts of {self.all_inputs} inputs have {self.inputs} on each rank, which is not a multiple of "
                f"the group size {size}; take fewer ranks (--tensor-parallel-size), or --enable-expert-parallel"
            )
        return self.inputs // size


def matrices(sizes: ExpertSizes) -> tuple[ExpertMatrix, ExpertMatrix]:
    return (
        ExpertMatrix("w13", 2, 2 * sizes.inner, sizes.hidden, sizes.hidden, sizes),
        ExpertMatrix("w2", 1, sizes.hidden, sizes.inner, sizes.all_inner, sizes),
    )


class Stacked(NamedTuple):
    """A parameter of all experts.

    shape: the shape for one expert. scale: how vLLM's loader divides scales, in its own terms (`quant_method` of a
        parameter).
    inputs_first: inputs are its first dimension. loaded: whether the checkpoint's tensor is needed.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    scale: str | None = None
    inputs_first: bool = False
    loaded: bool = True

    def empty(self, experts: int) -> Tensor:
        """Returns an empty parameter. Scales are NaN until they are loaded, so missing ones are detected."""
        if not self.loaded:
            return torch.empty(0, dtype=self.dtype)
        fill = NOT_LOADED if self.dtype == torch.uint8 and self.scale else 0
        if self.dtype == torch.float32:
            return torch.full((experts, *self.shape), torch.nan, dtype=torch.float32)
        # 8-bit floats have no `full`; codes of a rank's padding must be zeros
        return torch.full((experts, *self.shape), fill, dtype=torch.uint8).to(self.dtype)


def refined(form: WeightFormat, sizes: ExpertSizes) -> tuple[WeightFormat, tuple[int, int] | None]:
    """Returns the format with blocks that end where an expert's part ends, and into how many of them a block of the
    checkpoint is divided.

    The loader repeats each scale as often (`weight_scale_refine` of a method), which changes no weight.

    Raises ValueError if the blocks of a checkpoint do not divide evenly among ranks.
    """
    if not isinstance(form, ScaledFormat) or form.block is None:
        return form, None
    rows, columns = form.block
    if sizes.ranks > 1 and (sizes.all_inner % rows or sizes.all_inner % columns):
        raise ValueError(
            f"experts of {sizes.all_inner} rows in blocks of {rows} x {columns} cannot be shared by {sizes.ranks} "
            "ranks; take --enable-expert-parallel, or fewer ranks (--tensor-parallel-size)"
        )
    block = gcd(rows, sizes.inner), gcd(columns, sizes.inner)
    return replace(form, block=block), (rows // block[0], columns // block[1])


def stacked(form: WeightFormat, matrix: ExpertMatrix, refine: tuple[int, int] | None) -> Iterator[Stacked]:
    """Returns the parameters of a product. form, refine: from `refined`."""
    outputs, inputs = matrix.outputs, matrix.inputs
    match form:
        case ScaledFormat():
            yield Stacked("weight", (outputs, inputs), form.codes)
            yield _scale_of_codes(form, matrix, refine)
            if form.static_inputs:
                yield Stacked("input_scale", (), loaded=False)
            if form.zero_of_inputs:
                yield Stacked("input_zero_point", (), loaded=False)
        case PackedIntegers():
            groups, per_word = matrix.groups(form.group), 32 // form.bits
            scale = "channel" if form.group is None else "group"
            yield Stacked("weight_packed", (outputs, inputs // per_word), torch.int32)
            yield Stacked("weight_scale", (outputs, groups), scale=scale)
            if not form.symmetric:
                yield Stacked("weight_zero_point", (outputs // per_word, groups), torch.int32, scale)
            yield Stacked("weight_shape", (), loaded=False)
        case GptqFormat() | AwqFormat():
            groups = matrix.groups(form.group)
            scale = "channel" if form.group is None else "group"
            words = (inputs, outputs // 8) if isinstance(form, AwqFormat) else (inputs * form.bits // 32, outputs)
            yield Stacked("qweight", words, torch.int32, inputs_first=True)
            if isinstance(form, AwqFormat) and form.has_zeros:
                yield Stacked("qzeros", (groups, outputs // 8), torch.int32, scale, inputs_first=True)
            else:
                yield Stacked("qzeros", (), torch.int32, loaded=False)
            yield Stacked("scales", (groups, outputs), scale=scale, inputs_first=True)
            yield Stacked("g_idx", (), torch.int32, loaded=False)
        case Mxfp4Format():
            yield Stacked(form.codes, (outputs, inputs // 2), torch.uint8)
            yield Stacked("weight_scale", (outputs, matrix.groups(form.group)), torch.uint8, "group")
        case PlainFormat():
            yield Stacked("weight", (outputs, inputs), form.dtype)
        case _:
            raise AssertionError(f"experts of {form}")


def _scale_of_codes(form: ScaledFormat, matrix: ExpertMatrix, refine: tuple[int, int] | None) -> Stacked:
    if form.block is None:
        if form.strategy == "channel":
            return Stacked(form.scale, (matrix.outputs, 1), scale="channel")
        return Stacked(form.scale, (2,) if matrix.halves == 2 else (), scale="tensor")
    assert refine is not None
    sizes = matrix.sizes

    def blocks(size: int, axis: int) -> int:
        """The number of blocks that the loader makes of the checkpoint's, which may be more than the weight has."""
        assert form.block is not None
        return -(-size // (form.block[axis] * refine[axis])) * refine[axis]

    if matrix.halves == 2:
        shape = 2 * blocks(sizes.all_inner, 0) // sizes.ranks, blocks(sizes.hidden, 1)
    else:
        shape = blocks(sizes.hidden, 0), blocks(sizes.all_inner, 1) // sizes.ranks
    return Stacked(form.scale, shape, scale="block")


def kind_of(form: WeightFormat) -> CodeKind:
    """Returns the kind in which codes of the format are kept."""
    match form:
        case Mxfp4Format():
            return "e2m1"
        case AwqFormat() | PackedIntegers(bits=4) | GptqFormat(bits=4):
            return "uint4"
    return "whole"


def decode(form: WeightFormat, matrix: ExpertMatrix, parts: Mapping[str, Tensor]) -> QuantisedWeight:
    """Returns the weight of one expert. parts: by the names of `stacked`. form: from `refined`."""
    if not isinstance(form, ScaledFormat):
        return form.decode(parts)
    scale = parts[form.scale]
    if form.block is not None:
        rows, columns = -(-matrix.outputs // form.block[0]), -(-matrix.inputs // form.block[1])
        scale = scale.unflatten(0, (matrix.halves, -1))[:, : rows // matrix.halves, :columns].flatten(0, 1)
    elif form.strategy == "tensor":
        # every matrix keeps its own scale, as the scale of its outputs
        scale = scale.reshape(-1).repeat_interleave(matrix.outputs // matrix.halves).unsqueeze(1)
    return form.decode({**parts, form.scale: scale.contiguous()})
