"""Experts whose weights stay the codes of a quantised checkpoint, with their scales."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.quantised_linear.packed_codes import CodeKind, group_of, pack_codes, unpack_codes
from vllm_gaudi_ucm.ops.quantised_linear.weight import QuantisedWeight, dequantise


class ExpertCodes(NamedTuple):
    """The weights of one of the two products, for all experts; each expert's is a `QuantisedWeight`.

    codes: [experts, outputs, inputs], or of kinds of 4 bits uint8 [experts, outputs, inputs / 2], as `pack_codes` packs
        groups of `group`.
    scales: float32 [experts, ceil(outputs / block[0]), ceil(inputs / block[1])]. zeros: like them, or None.
    block: outputs and inputs that share a scale.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]
    kind: CodeKind
    group: int
    zeros: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, outputs, inputs."""
        experts, outputs, width = self.codes.shape
        return experts, outputs, width if self.kind == "whole" else 2 * width

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def expert(self, number: int) -> QuantisedWeight:
        codes = unpack_codes(self.codes[number], self.kind, self.group)
        return QuantisedWeight(
            codes, self.scales[number], self.block, None if self.zeros is None else self.zeros[number]
        )

    @property
    def for_kernels(self) -> bool:
        """True if inputs come in groups that a kernel multiplies at once."""
        return group_of(self.expert(0)) is not None

    def write_out(self, number: int, dtype: torch.dtype) -> Tensor:
        """[outputs, inputs] of an expert: each element the exact value, rounded once."""
        return dequantise(self.expert(number), dtype)

    def to(self, device: torch.device) -> ExpertCodes:
        zeros = None if self.zeros is None else self.zeros.to(device)
        return self._replace(codes=self.codes.to(device), scales=self.scales.to(device), zeros=zeros)


class CodedExperts(NamedTuple):
    """Experts of both products, like `ExpertWeights`.

    dtype: the dtype of rows and biases. largest: the largest magnitude of an e4m3 on their device.
    """

    w13: ExpertCodes
    w2: ExpertCodes
    dtype: torch.dtype
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    largest: float = 448.0


class ExpertPacker:
    """Takes one expert's weight after the other. All are of one kind and shape."""

    def __init__(self, experts: int, kind: CodeKind) -> None:
        self._count, self._kind = experts, kind
        self._found: ExpertCodes | None = None

    def add(self, number: int, weight: QuantisedWeight) -> None:
        if self._found is None:
            self._found = self._empty(weight)
        found = self._found
        found.codes[number] = pack_codes(weight.codes, found.kind, found.group)
        found.scales[number] = weight.scales
        if found.zeros is not None:
            assert weight.zeros is not None, "experts of a layer have one scheme"
            found.zeros[number] = weight.zeros

    def finish(self) -> ExpertCodes:
        assert self._found is not None, "there is at least one expert"
        return self._found

    def _empty(self, weight: QuantisedWeight) -> ExpertCodes:
        group = group_of(weight) or weight.inputs
        kind: CodeKind = self._kind if group % 2 == 0 else "whole"
        shape = self._count, *pack_codes(weight.codes[:1], kind, group).shape[1:]
        device = weight.codes.device
        dtype = weight.codes.dtype if kind == "whole" else torch.uint8
        scales = torch.empty(self._count, *weight.scales.shape, dtype=torch.float32, device=device)
        zeros = None if weight.zeros is None else torch.empty_like(scales)
        codes = torch.empty(shape[0], weight.outputs, shape[1], dtype=dtype, device=device)
        return ExpertCodes(codes, scales, weight.block, kind, group, zeros)
