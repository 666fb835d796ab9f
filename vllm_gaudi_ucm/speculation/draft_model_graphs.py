"""A draft model at static shapes: graphs of its own for the buckets of its target, warmed together with them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from vllm_gaudi_ucm.speculation.draft_model import likeliest_tokens

if TYPE_CHECKING:
    from vllm_gaudi_ucm.execution.static_execution import Stage, StaticExecution
    from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape


class DraftModelGraphs:
    """Forward and logits graphs, and the choice of drafts from the logits of a bucket: all of it a function of the
    bucket alone, so a pass compiles nothing once its bucket is warm.

    Args:
        make_execution: makes the draft model's execution, given what to enter around its device work.
        stage: the target's; the labels of a draft model's work say that it is the draft model's.
    """

    def __init__(self, make_execution: Callable[[Stage], StaticExecution], stage: Stage) -> None:
        self._target_stage = stage
        self.execution = make_execution(self._stage)

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """int64 [rows] on the device; logits: float32 [rows of a bucket, vocabulary]."""
        with self._stage("greedy"):
            return likeliest_tokens(logits)

    def warm_forward(self, shape: ForwardShape) -> None:
        """See StaticExecution."""
        self.execution.warm_forward(shape)

    def warm_logits(self, rows: int) -> None:
        """The graph of so many logits rows, and the choice among them."""
        self.likeliest(self.execution.warm_logits(rows))

    def _stage(self, label: str) -> AbstractContextManager[None]:
        return self._target_stage(f"{label}, draft model")
