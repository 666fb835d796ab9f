"""A model of Transformers whose linear layers multiply rows that are rounded to 8-bit integers, exactly."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Answer
from vllm_gaudi_ucm.ops.cpu.native.library import native

# One element that falls on the other side of a tie moves logprobs by far more than other rounding does; most rows have
# none. Rows that are not rounded move half of the logprobs by more than 1e-2.
NEAR, USUAL = 0.1, 1e-4
DYNAMIC = {"int8 per channel": True, "int8 per tensor": True, "int8, rows with zeros": False}
"""Whether codes are symmetric, of schemes in which each row has its own scale."""
FIXED = {"int8, fixed rows": True, "int8, fixed rows with a zero": False}
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that are one matrix in an engine, and share the scale of their rows."""
SPLIT = ("o_proj", "down_proj")
"""Layers of which each rank has a part of the inputs, which it rounds by itself."""


class RoundedLinear(nn.Module):
    """The product of codes of rows with codes of a weight, in float64, which holds their sums exactly.

    fixed: least and most of what rows hold; None: each row has its own. parts: of the inputs, rounded by themselves.
    """

    def __init__(
        self, codes: Tensor, scales: Tensor, symmetric: bool, fixed: tuple[float, float] | None, parts: int
    ) -> None:
        super().__init__()
        self._codes, self._scales = codes.double(), scales.double().reshape(-1)
        self._symmetric, self._fixed, self._parts = symmetric, fixed, parts

    def forward(self, x: Tensor) -> Tensor:
        both = zip(x.chunk(self._parts, -1), self._codes.chunk(self._parts, 1), strict=True)
        return sum((self._product(rows, codes) for rows, codes in both), torch.zeros(())).to(x.dtype)

    def _product(self, x: Tensor, codes: Tensor) -> Tensor:
        if self._fixed is not None:
            least, most = (torch.full_like(x[..., :1], end) for end in self._fixed)
        else:
            least, most = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
        if self._symmetric:
            scale, zero = torch.maximum(-least, most) / 127, torch.zeros_like(least)
        else:
            scale = (most - least) / 255
            zero = (-128 - least / scale).round()
        rows = ((x / scale).round() + zero).clamp(-128, 127).double()
        return (rows - zero.double()) @ codes.t() * scale.double() * self._scales


def round_rows(
    reference: ReferenceModel, quantised: Mapping[str, Tensor], schemes: Mapping[str, str], ranks: int
) -> None:
    """Replaces the layers that a checkpoint has in 8-bit integers. schemes: as of `compressed_tensors`."""
    model = reference.model
    for name, layer in list(model.named_modules()):
        scheme = next((found for pattern, found in schemes.items() if re.match(pattern, name)), "")
        if not isinstance(layer, nn.Linear) or scheme not in DYNAMIC | FIXED:
            continue
        assert layer.bias is None
        parent, _, own = name.rpartition(".")
        together = next((group for group in TOGETHER if own in group), (own,))
        fixed = _range(quantised, [f"{parent}.{other}" for other in together]) if scheme in FIXED else None
        codes, scales = quantised[f"{name}.weight"], quantised[f"{name}.weight_scale"]
        parts = ranks if own in SPLIT else 1
        rounded = RoundedLinear(codes, scales, (DYNAMIC | FIXED)[scheme], fixed, parts)
        setattr(cast(nn.Module, model.get_submodule(parent)), own, rounded)


def _range(quantised: Mapping[str, Tensor], names: Sequence[str]) -> tuple[float, float]:
    """What all of these layers' rows may hold."""
    ends = []
    for name in names:
        scale = float(quantised[f"{name}.input_scale"])
        zero = quantised.get(f"{name}.input_zero_point")
        ends.append(
            (-127 * scale, 127 * scale) if zero is None else tuple(scale * (code - int(zero)) for code in (-128, 127))
        )
    return min(least for least, _ in ends), max(most for _, most in ends)


def rounded_reference(meant: Path, quantised: Path, schemes: Mapping[str, str], ranks: int = 1) -> ReferenceModel:
    """meant, quantised: folders of a checkpoint with plain weights, and of the same with codes.

    Rows stay as they are where this CPU does not multiply integers fast.
    """
    reference, kernels = ReferenceModel(meant), native()
    if kernels is not None and kernels.ucm_multiplies_int8():
        round_rows(reference, load_file(quantised / "model.safetensors"), schemes, ranks)
    return reference


def assert_rounded(reference: ReferenceModel, prompts: Sequence[Sequence[int]], answers: Sequence[Answer]) -> None:
    """Asserts greedy tokens, and but for a few the logprobs of the reference."""
    reference.assert_greedy(prompts, answers, near=NEAR)
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = reference.after(prompt, answer.tokens)
        chosen = expected[torch.arange(len(answer.tokens)), answer.tokens]
        found.append((torch.tensor(answer.logprobs) - chosen).abs())
    assert torch.cat(found).median() <= USUAL
