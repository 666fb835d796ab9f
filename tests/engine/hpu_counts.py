"""What an engine on the simulated card must not do once it is warm, counted in its process."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.engine.serving import Engine

# Writes that copy or are dropped, calls that are dropped, integers that are chosen wrongly.
WRITES = range(12, 17)
# Calls of a layer before there are buckets: sizes of outputs, and steps whose memory is measured.
BEFORE_BUCKETS = 5


def broken_duties() -> dict[str, int]:
    """How often duties 12 to 16 were broken so far, by operator."""
    from habana_frameworks.torch.simulator.duties import duties

    return {f"{duty} {operator}": count for (duty, operator), count in duties.counts.items() if duty in WRITES}


def remains() -> list[str]:
    """Tensors that still hold what a compile-only warm-up has left (duty 22)."""
    from habana_frameworks.torch.simulator.garbage import garbage

    gc.collect()
    return [str(found) for found in garbage.find()]


def count_layer_graphs() -> int:
    """Graphs that dynamo has of a layer's region, for all engines of the process."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    from vllm_gaudi_ucm.execution.regions import _run_layer

    return len(_debug_get_cache_entry_list(_run_layer.__code__))


def layer_graphs(engine: Engine, before: int = 0) -> dict[str, Any]:
    """How many graphs there are more than `before`, and of how many forward buckets, some with chosen blocks."""
    static = engine.runner.static
    assert static is not None
    forward = static.execution.ready.buckets.forward
    return {
        "graphs": count_layer_graphs() - before,
        "buckets": len(forward),
        "choosing": sum(bucket.selected_blocks > 0 for bucket in forward),
    }
