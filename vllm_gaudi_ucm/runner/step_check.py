"""Compares the work of workers step by step: `ucm.distributed.check_ranks`."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from vllm_gaudi_ucm.protocol.attachments import report_of
from vllm_gaudi_ucm.protocol.memory_orders import memory_orders_of
from vllm_gaudi_ucm.runner.parts import WorkerPart

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_gaudi_ucm.distributed.ranks import Ranks
    from vllm_gaudi_ucm.runner.computed_step import ComputedStep, Division
    from vllm_gaudi_ucm.vllm_api.steps import ModelRunnerOutput, SchedulerOutput


class StepCheck(WorkerPart):
    """Compares steps between workers; raises RanksDisagreeError on every rank at the first difference.

    ranks: all workers, which call the same methods in the same order.
    samplers: the workers that sample, for logits and tokens.
    checks_offload: whether to compare reports of offloaded blocks: all workers then make outputs at the same point.
    """

    def __init__(self, ranks: Ranks, samplers: Ranks, checks_offload: bool = False) -> None:
        self._checks_offload = checks_offload
        self._ranks = ranks
        self._samplers = samplers
        self._step = 0

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Compares a step's message from the scheduler: tokens of each request, drafts, and orders."""
        self._step += 1
        orders = memory_orders_of(scheduler_output)
        moved = None if orders is None else (orders.moves, orders.swap_outs, orders.swap_ins)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        tokens = scheduler_output.num_scheduled_tokens
        self._ranks.check_same(f"step {self._step}", f"tokens {tokens}, drafts {drafts}, moved blocks {moved}")

    def before_forward(self, division: Division) -> None:
        """Compares the bucket in which a step or a part of it is about to run, and the blocks from which its sparse
        requests choose, because the ranks add up the scores of each block.
        """
        shape, selection = division.shape, division.plan.selection
        self._ranks.check_same(f"step {self._step}, bucket", f"{shape.padded} for {shape.true}")
        if selection is not None:
            bits = zlib.crc32(np.concatenate(selection).tobytes())
            found = f"{len(selection.candidate_blocks)}, modes {selection.modes.tolist()}, checksum {bits:08x}"
            self._ranks.check_same(f"step {self._step}, candidates of sparse requests", found)

    def before_sampling(self, step: ComputedStep) -> None:
        """Compares logits of any shape and dtype bit for bit."""
        if step.logits is None:
            return
        bits = zlib.crc32(step.logits.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        self._samplers.check_same(f"step {self._step}, checksum of logits", f"{bits:08x}")

    def before_output(self, step: ComputedStep, output: ModelRunnerOutput) -> None:
        """Compares an output's report of offloaded blocks: which have copies, which were restored, and their scores."""
        if not self._checks_offload:
            return
        report = report_of(output)
        found = "nothing" if report is None else msgspec.json.encode(report).decode()
        self._ranks.check_same(f"step {self._step}, report of offloaded blocks", found)

    def after_sampling(self, step: ComputedStep, tokens: Callable[[], list[list[int]]]) -> None:
        """Compares the tokens of each request, in the order of the sampler."""
        self._samplers.check_same(f"step {self._step}, tokens", str(tokens()))
