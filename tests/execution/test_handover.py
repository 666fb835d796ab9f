"""A stage of a pipeline in buckets: what its graphs read and leave, and when it talks to its neighbours."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from tests.batch.batches import Request, lay_out
from tests.graphs.shapes import COST
from vllm_gaudi_ucm.batch.batch_plan import plan_batch
from vllm_gaudi_ucm.batch.planned_step import PlannedStep
from vllm_gaudi_ucm.batch.row_input import BUILT_IN_INPUTS
from vllm_gaudi_ucm.execution.bucketed_execution import BucketedExecution, Capture
from vllm_gaudi_ucm.execution.decoder import DecoderStep
from vllm_gaudi_ucm.execution.handover import Handover
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.runners.base import EagerRunner
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.warm_up.ready_buckets import ReadyBuckets

LIMITS = Limits(max_num_batched_tokens=8, max_num_seqs=4, max_model_len=32, block_size=4, num_blocks=64)
WIDTH = 3
CPU = torch.device("cpu")


class Neighbours:
    """The stage before sends its number of the step to every row."""

    def __init__(self, is_first: bool, is_last: bool) -> None:
        self.is_first, self.is_last = is_first, is_last
        self.calls: list[str] = []
        self.sent: list[torch.Tensor] = []

    def receive(self, tensors: dict[str, torch.Tensor]) -> None:
        self.calls.append("receive")
        for tensor in tensors.values():
            tensor.fill_(100 * self.calls.count("receive"))

    def send(self, tensors: dict[str, torch.Tensor]) -> None:
        self.calls.append("send")
        self.sent.append(tensors["hidden_states"].clone())

    def finish_sends(self) -> None:
        self.calls.append("finish")


class Layers:
    """Adds the token to what was received, and writes over that, as a norm with a residual does."""

    window = None
    lockstep = None
    latent = None
    chosen = 0
    inputs = BUILT_IN_INPUTS

    def __init__(self, stage: Neighbours) -> None:
        self.stage = stage
        self.is_last = self.has_logits = stage.is_last

    def run_layers(self, step: DecoderStep) -> Any:
        self.stage.calls.append("run")
        tokens, received = step.rows["token_ids"], step.received
        hidden = torch.zeros(len(tokens), WIDTH) if received is None else received["hidden_states"]
        return {"hidden_states": hidden.add_(tokens.unsqueeze(1))}

    def unattended(self, rows: int, device: torch.device) -> DecoderStep:
        return DecoderStep({"token_ids": torch.zeros(rows)}, None, self.received(rows, device))

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        return hidden if rows is None else hidden[rows]

    def write_logits(self, out: torch.Tensor, hidden: torch.Tensor, rows: torch.Tensor) -> None:
        out.copy_(self.logits(hidden, rows))

    def between(self, rows: int, device: torch.device) -> dict[str, torch.Tensor]:
        return {"hidden_states": torch.zeros(rows, WIDTH, device=device)}

    def received(self, rows: int, device: torch.device) -> dict[str, torch.Tensor] | None:
        return None if self.stage.is_first else self.between(rows, device)


def steps_of(stage: Neighbours, count: int = 2) -> torch.Tensor:
    """Warms all graphs and runs so many steps of three decodes, tokens 5, 6 and 7; the logits of the last one."""
    layers: Any = Layers(stage)
    ready = ReadyBuckets(BucketSet([], [4], LIMITS, COST))
    execution = BucketedExecution(layers, ready, CPU, Capture(EagerRunner, lambda label: nullcontext(), 8))
    for shape in ready.buckets.forward:
        execution.warm_forward(shape)
        ready.mark_warm(shape)
    for rows in ready.buckets.logits:
        execution.warm_logits(rows)
        ready.mark_warm(rows)
    assert set(stage.calls) == {"run", "finish"}, "a warm-up waits for nobody"
    stage.calls.clear()
    plan = plan_batch(lay_out([Request(5, 1)] * 3, 4, 0).batch_input(), 4)
    for _ in range(count):
        execution.stage(PlannedStep.of_tokens(plan, np.arange(5, 8)))
        execution.forward()
    return execution.logits(plan.logits_rows) if layers.has_logits else torch.empty(0)


@pytest.mark.parametrize(
    ("is_first", "is_last", "calls"),
    [
        (True, False, ["finish", "run", "send"]),
        (False, False, ["finish", "receive", "run", "send"]),
        (False, True, ["finish", "receive", "run"]),
    ],
)
def test_a_step_receives_before_its_graph_and_sends_behind_it(is_first: bool, is_last: bool, calls: list[str]) -> None:
    stage = Neighbours(is_first, is_last)
    logits = steps_of(stage)
    assert stage.calls == calls * 2
    base = [0, 0] if is_first else [100, 200]
    expected = [[[number + token] * WIDTH for token in (5, 6, 7)] for number in base]
    if is_last:
        assert logits[:3].tolist() == expected[-1]
    else:
        assert [sent[:3].tolist() for sent in stage.sent] == expected
        # all rows of the bucket
        assert {len(sent) for sent in stage.sent} == {8}


def test_each_number_of_rows_has_tensors_of_its_own() -> None:
    stage = Neighbours(is_first=False, is_last=False)
    layers: Any = Layers(stage)
    handover = Handover(layers, stage, CPU)  # type: ignore[arg-type]  # stands for a stage
    for rows in (8, 4, 8):
        handover.reserve(rows)
    eight, four = handover.received(8), handover.received(4)
    assert eight is not None
    assert four is not None
    assert (len(eight["hidden_states"]), len(four["hidden_states"])) == (8, 4)
    handover.receive(8)
    assert eight["hidden_states"].min() == 100
    assert four["hidden_states"].max() == 0
    handover.leave(8, eight)
    handover.refill()
    assert eight["hidden_states"].max() == 0
    handover.send(8)
    assert stage.sent[-1].max() == 0
