"""Gaudi's fused kernels, if this machine has them; None otherwise, and torch's operators compute the same."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from vllm_gaudi_ucm.ops.hpu import operators as gaudi_operators


def find_sdpa() -> Callable[..., Tensor] | None:
    """Returns `FusedSDPA.apply`: attention without a log-sum-exp."""
    return gaudi_operators.FUSED_SDPA.resolve().call


# Looked up once, when this module is first imported: inside a compiled graph it would break the graph.
FUSED_SDPA = find_sdpa()
