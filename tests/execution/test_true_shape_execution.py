"""Steps at their true shapes: what is refused before there is a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_gaudi_ucm.batch.row_input import BUILT_IN_INPUTS
from vllm_gaudi_ucm.config.sections import AttentionConfig
from vllm_gaudi_ucm.execution.true_shape_execution import TrueShapeExecution
from vllm_gaudi_ucm.ops.cpu.native import library
from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION

DECODER: Any = SimpleNamespace(inputs=BUILT_IN_INPUTS, specs=[], window=None, lockstep=None)


@pytest.mark.parametrize("implementation", ["cpu", "native"])
def test_kernels_of_another_device_are_refused_at_start(implementation: Any) -> None:
    """covers: A18. Found in a step, the error would end the engine."""
    with pytest.raises(ValueError, match=rf"ucm.attention.implementation: .*{implementation}.* tensors on cuda"):
        TrueShapeExecution(DECODER, AttentionConfig(implementation=implementation), 16, torch.device("cuda"))


def test_kernels_that_cannot_be_built_are_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: A18"""
    monkeypatch.setattr(library, "_outcome", library._Outcome(None, "no compiler"))
    with ATTENTION.scope():
        with pytest.raises(ValueError, match=r"ucm.attention.implementation: .*no compiler.*choose 'auto' or 'cpu'"):
            TrueShapeExecution(DECODER, AttentionConfig(implementation="native"), 16, torch.device("cpu"))
        TrueShapeExecution(DECODER, AttentionConfig(), 16, torch.device("cpu"))
