"""Messages between scheduler and worker about offloaded blocks: plain data."""

import msgspec


class OffloadTotals(msgspec.Struct):
    """Blocks, except for `scored`, `missed`, `kept` and `repeated`.

    scored: how often a request was scored. missed: the sum, over these, of the estimated share of its attention that
    fell on offloaded blocks. kept: requests that got all of their blocks back because too much was missed.
    stored: left in the connector's store when a prompt was loaded. repeated: first steps of such prompts that missed
    too much and were computed again.
    saved, unsaved: copies made, and not made because the store could not. released: left the device.
    loaded, failed: came back from the store, and could not. found: came back from the prefix cache, without a copy.
    away: offloaded blocks of live requests, now.
    """

    scored: int = 0
    missed: float = 0.0
    kept: int = 0
    stored: int = 0
    repeated: int = 0
    saved: int = 0
    unsaved: int = 0
    released: int = 0
    loaded: int = 0
    failed: int = 0
    found: int = 0
    away: int = 0

    def count_offloaded(self, num_blocks: int) -> None:
        """Sets `away`, which is a count of now."""
        self.away = num_blocks


class BlockMove(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The move of one block of one request.

    generation: the request's; after a preemption, or for a later request of the same id, it is different.
    number: logical block. block: physical block that is read or written. row: place of the summary while offloaded.
    key: key of the connector's record of the block, if that is its copy.
    """

    generation: int
    number: int
    block: int
    row: int
    key: bytes = b""


class TablePatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """From this step on, logical block `number` of a request is physical block `block`; 0: it is offloaded."""

    generation: int
    request_id: str
    number: int
    block: int


class OffloadOrders(msgspec.Struct):
    """The orders of a step, carried out before its forward in this order.

    ended: generations that have ended: their moves are cancelled and their copies deleted.
    dropped: copies, by (generation, logical block), to delete; the blocks are on the device.
    stored: (generation, logical block, row) of blocks that a connector left in its store; it brings their summaries.
    patches: changes of block tables.
    saves: blocks to copy off the device. loads: blocks to bring back.
    ahead: copies, by (generation, logical block), to bring to host memory and keep there; copies that only earlier
        steps named are not needed any more.
    scored: requests to score after the forward, and their generation. totals: for the worker's metrics.
    """

    ended: list[int] = []
    dropped: list[tuple[int, int]] = []
    stored: list[tuple[int, int, int]] = []
    patches: list[TablePatch] = []
    saves: list[BlockMove] = []
    loads: list[BlockMove] = []
    ahead: list[tuple[int, int]] = []
    scored: dict[str, int] = {}
    totals: OffloadTotals = msgspec.field(default_factory=OffloadTotals)


class OffloadReport(msgspec.Struct):
    """The results of orders, of this step or of earlier ones. Pairs are (generation, logical block).

    saved, unsaved: blocks that have a copy now; blocks whose copy could not be made.
    loaded, failed: blocks that are on the device again; blocks whose copy could not be read.
    scores: by generation, the share of attention of each full block of its context; below 0 for one without a summary.
    """

    saved: list[tuple[int, int]] = []
    unsaved: list[tuple[int, int]] = []
    loaded: list[tuple[int, int]] = []
    failed: list[tuple[int, int]] = []
    scores: dict[int, list[float]] = {}

    def __bool__(self) -> bool:
        return bool(self.saved or self.unsaved or self.loaded or self.failed or self.scores)
