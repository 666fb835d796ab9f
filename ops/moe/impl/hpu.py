"""Mixture of experts on a Gaudi by `torch.ops.hpu.mixture_of_experts`: lists of matrices, one of each expert."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.gaudi_operators import EXPERTS, EXPERTS_WITH_BIAS
from vllm_gaudi_ucm.ops.moe.implementation import ExpertWeights, MoeImplementation
from vllm_gaudi_ucm.ops.moe.spec import PLAIN, MoeSpec

# The operator's names of gates; its gelu is the tanh form.
ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu"}


class Matrices(NamedTuple):
    """Views of each expert's weights and biases, made once: at the same offsets in every layer."""

    w13: list[Tensor]
    w2: list[Tensor]
    w13_bias: list[Tensor]
    w2_bias: list[Tensor]


class HpuMoe(MoeImplementation):
    """Gates that the operator knows: SwiGLU and GeGLU without biases, and those of gpt-oss with them."""

    devices: ClassVar[frozenset[str] | None] = frozenset({"hpu"})
    priority: ClassVar[int] = 10

    def supports(self, spec: MoeSpec) -> bool:
        if spec.weights != PLAIN:
            return False
        if spec.bias:
            of_gpt_oss = spec.form == "silu" and spec.interleaved and spec.beta == 1 and spec.limit is not None
            return of_gpt_oss and EXPERTS_WITH_BIAS.resolve().call is not None
        return spec.form in ACTIVATIONS and spec.is_plain_gate and EXPERTS.resolve().call is not None

    def prepare(self, weights: ExpertWeights, spec: MoeSpec) -> Matrices:
        return Matrices(*([] if each is None else list(each.detach().unbind(0)) for each in weights))

    def compute(self, x: Tensor, ids: Tensor, shares: Tensor, form: Matrices, spec: MoeSpec) -> Tensor:
        # other dtypes of ids and shares the graph compiler refuses
        chosen = x, ids.to(torch.int64), shares.to(x.dtype)
        last = len(form.w13) - 1
        if spec.bias:
            return torch.ops.hpu.mixture_of_experts.bias_fused_weights(
                *chosen,
                *form,
                permuted_weights=True,
                experts_min=0,
                experts_max=last,
                alpha=spec.alpha,
                limit=spec.limit,
            )
        # by place: parameters of this overload are called differently in different builds
        return torch.ops.hpu.mixture_of_experts.fused_weights(
            *chosen, form.w13, form.w2, True, ACTIVATIONS[spec.form], 0, last
        )
