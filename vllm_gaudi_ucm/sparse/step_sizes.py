"""Sizes of a step, dense and with its choices, as buckets count them, from what the scheduler knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from vllm_gaudi_ucm.protocol.attachments import computed_tokens

if TYPE_CHECKING:
    from vllm_gaudi_ucm.sparse.budget import Budget
    from vllm_gaudi_ucm.vllm_api.steps import SchedulerOutput


class StepSizes(NamedTuple):
    """Sizes of a step. has_prompt: whether a request has several rows. shared, unique: cached blocks of requests with
    several rows, and with one. selected: blocks that are chosen. A block that several requests share counts for each.
    """

    rows: int
    has_prompt: bool
    shared: int
    unique: int
    selected: int = 0


StepSeconds = Callable[[StepSizes], float | None]
"""Returns the seconds of a step's bucket; None: no bucket holds the step, which is computed in parts."""


def step_sizes(
    scheduler_output: SchedulerOutput, budgets: Mapping[str, Budget], block_size: int
) -> tuple[StepSizes, StepSizes]:
    """Returns the sizes of a step that is dense, and of one with the choices of these requests."""
    rows, shared, unique = 0, 0, 0
    spared_shared, spared_unique, has_prompt = 0, 0, False
    for request_id, computed in computed_tokens(scheduler_output):
        count = scheduler_output.num_scheduled_tokens[request_id]
        rows += count
        budget = budgets.get(request_id)
        spared = 0 if budget is None else budget.num_candidates
        if count == 1:
            # its own token is in the cache when it attends
            unique += -(-(computed + 1) // block_size)
            spared_unique += spared
        else:
            has_prompt = True
            shared += -(-computed // block_size)
            spared_shared += spared
    selected = sum(budget.num_selected for budget in budgets.values())
    dense = StepSizes(rows, has_prompt, shared, unique)
    return dense, StepSizes(rows, has_prompt, shared - spared_shared, unique - spared_unique, selected)
