"""The scheduler's decisions about sparse requests in a step: plain data that travels with the SchedulerOutput."""

from enum import IntEnum

import msgspec

from vllm_gaudi_ucm.protocol.offload import OffloadOrders


class SelectionMode(IntEnum):
    """How the worker gets a request's selection in a step.

    SELECT: score again and store. REUSE: take the stored one. CHECK: score again, but keep the stored selection if at
    most `update_threshold` blocks were added or removed.
    """

    SELECT = 0
    REUSE = 1
    CHECK = 2


class RequestSelection(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sparse request in one step. Blocks are logical: block i holds tokens [i * block_size, (i + 1) * block_size).

    mode: where the selection comes from.
    sink_blocks: blocks [0, sink_blocks) are always attended.
    window_start: blocks from here to the end of the context, the tail block and drafts included, are always attended;
        blocks [sink_blocks, window_start) are the candidates.
    num_selected: candidates to attend, at most as many as there are.
    update_threshold: of CHECK: |added| + |removed| up to which the stored selection is kept.
    tile_rows: rows of a prompt that choose together, and store nothing; 0: all rows of the request do, and store.
    """

    mode: SelectionMode
    sink_blocks: int
    window_start: int
    num_selected: int
    update_threshold: int = 0
    tile_rows: int = 0


class SparseMeta(msgspec.Struct):
    """The sparse requests of a step by id; every other request is dense.

    offload: orders of KV offload, if it is on.
    locks: selections that KVStar has locked and unlocked since the start, for the worker's metrics.
    dense_steps: steps since the start that were dense because a choice would not have paid off, for the same metrics.
    """

    requests: dict[str, RequestSelection] = {}
    offload: OffloadOrders | None = None
    locks: tuple[int, int] = (0, 0)
    dense_steps: int = 0
