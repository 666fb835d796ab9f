"""Tails of prompts that were loaded in part: whether a server has graphs for them, and which steps run there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.graphs.shapes.prompt_remainder import TailShapes

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan
    from vllm_gaudi_ucm.graphs.shapes.limits import Limits
    from vllm_gaudi_ucm.sparse.selection.selection_state import SelectionLimits


def tail_shapes(limits: Limits, choices: SelectionLimits | None) -> TailShapes | None:
    """The shapes of a server's graphs for tails; None where nothing is loaded in part.

    limits, choices: of the server; None: no sparse method.
    """
    if choices is None or not choices.tail_rows:
        return None
    return TailShapes(limits, choices.tail_rows, choices.live_blocks, choices.most)


def is_tail(plan: UnifiedPlan, most_rows: int) -> bool:
    """Whether a step needs such a graph: its choice has more rows than ordinary ones have room for, `most_rows`."""
    return plan.selection is not None and bool((plan.selection.num_rows > most_rows).any())
