"""Graphs for the tail of a prompt that was loaded in part: up to a block of rows of one request, which choose together.

An ordinary graph has room for the rows of a verification in each of its choices, because all of its selected blocks
are multiplied with as many rows. A tail has many more, but a single choice: so it runs alone, in one of three graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.graphs.bucket import Bucket, ForwardShape, dominates
from vllm_gaudi_ucm.graphs.limits import LimitsError
from vllm_gaudi_ucm.runner.static_inputs import ForwardInputs, StaticInputs

if TYPE_CHECKING:
    import torch

    from vllm_gaudi_ucm.graphs.graph_runner.base import GraphRunner, StaticFunction
    from vllm_gaudi_ucm.graphs.limits import Limits
    from vllm_gaudi_ucm.runner.batch_plan import UnifiedPlan
    from vllm_gaudi_ucm.sparse.device.selection_limits import SelectionLimits

# Contexts of so much of the longest have a graph of their own: most are far shorter than --max-model-len.
SHORT_SHARE = 4


def tail_limits(limits: Limits, choices: SelectionLimits) -> Limits:
    """Of a step that is one tail."""
    return replace(
        limits,
        max_num_batched_tokens=choices.tail_rows,
        max_num_seqs=1,
        max_shared_blocks=None,
        max_selected_blocks=choices.most,
    )


def tail_shapes(limits: Limits, choices: SelectionLimits) -> list[ForwardShape]:
    """Of their graphs, the smallest first; the last one holds every tail.

    Rows are padded to a block of them: so few cost what reading the weights costs. A tail has no unique blocks, as
    all of its rows see the same. With requests of up to 32768 tokens attention takes 41, 138 and 419 us per layer in
    them (Llama 3.1 8B, blocks of 128, Gaudi 2; modelled, without the scores).

    Args:
        limits: from `tail_limits`.
        choices: of the server.
    """
    rows, most, every = choices.tail_rows, limits.max_selected_blocks, limits.most_shared_blocks
    live = min(every, choices.live_blocks)
    # the last one for blocks that wait for their summaries: these are attended without being chosen
    sizes = (live, -(-most // SHORT_SHARE)), (live, most), (every, most)
    return list(dict.fromkeys(ForwardShape.of(True, rows, shared, 0, selected) for shared, selected in sizes))


class TailGraphs:
    """`inputs` and `graphs` of the `shapes`, all captured before the first step.

    Args:
        limits: of the server's steps.
        choices: of the server; it has `tail_rows`.
        inputs: makes StaticInputs of the limits of steps and of choices.
        make_runner: the kind of graphs.
        compute: the forward over the inputs of one.
    """

    def __init__(
        self,
        limits: Limits,
        choices: SelectionLimits,
        inputs: Callable[[Limits, SelectionLimits], StaticInputs],
        make_runner: Callable[[StaticFunction], GraphRunner],
        compute: Callable[[ForwardInputs], None],
    ) -> None:
        own = tail_limits(limits, choices)
        self.shapes = tail_shapes(own, choices)
        self._most_rows = choices.max_rows
        self.inputs = inputs(own, choices.of_tail())
        self._compute = compute
        self.graphs = make_runner(self._run)

    def holds(self, plan: UnifiedPlan) -> bool:
        """Whether the step is one for these graphs: its choice has more rows than others have room for."""
        return plan.selection is not None and bool((plan.selection.num_rows > self._most_rows).any())

    def lookup(self, step: Bucket) -> ForwardShape:
        """The smallest that dominates the step. Raises LimitsError for one that is no tail of the server."""
        for shape in self.shapes:
            if dominates(shape.step(step.logits), step):
                return shape
        raise LimitsError(f"step {step.to_list()} exceeds the graphs for tails, {[s.to_list() for s in self.shapes]}")

    def _run(self, flat: torch.Tensor, shape: ForwardShape) -> None:
        self._compute(self.inputs.split(flat, shape))
