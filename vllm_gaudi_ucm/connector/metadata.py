"""Messages between the two sides of the connector, sent with every step: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_gaudi_ucm.prefetch.plan import PrefetchPlan
from vllm_gaudi_ucm.vllm_api.kv_transfer import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(frozen=True)
class RecordLoad:
    """Summaries of consecutive blocks. For each block: its row of memory mode if it is left in the store, below 0
    otherwise; and its physical block if it is loaded, 0 otherwise.
    """

    key: bytes
    rows: list[int]
    block_ids: list[int]


@dataclass(frozen=True)
class BlockLoad:
    """Blocks of a request that waits for them: block `block_ids[i]` gets what is stored under `keys[i]`.

    is_partial: there are blocks before or between these that are not on the device, left in the store or before a
    window; if one of these cannot be loaded, the request cannot compute what follows it, and starts again.
    """

    request_id: str
    keys: list[bytes]
    block_ids: list[int]
    records: list[RecordLoad] = field(default_factory=list)
    is_partial: bool = False


@dataclass(frozen=True)
class BlockSave:
    """A block that is full once this step has run."""

    key: bytes
    block_id: int


@dataclass(frozen=True)
class RecordSave:
    """Summaries of these blocks, which are full once this step has run."""

    key: bytes
    block_ids: list[int]


@dataclass
class UcmMetadata(KVConnectorMetadata):
    """The message from the scheduler to the worker. lookups: its LookupCounts as a tuple, for the worker's metrics.
    used: the keys of each request that has ended, in the order of its context. hurries_saves: a request waits for
    blocks on their way to the store.
    """

    loads: list[BlockLoad] = field(default_factory=list)
    saves: list[BlockSave] = field(default_factory=list)
    records: list[RecordSave] = field(default_factory=list)
    prefetch: PrefetchPlan = field(default_factory=PrefetchPlan)
    lookups: tuple[int, int, int, int] = (0, 0, 0, 0)
    used: list[list[bytes]] = field(default_factory=list)
    hurries_saves: bool = False


@dataclass
class UcmWorkerMetadata(KVConnectorWorkerMetadata):
    """The worker's message to the scheduler: keys that were not stored, and requests whose blocks came too late."""

    unsaved: list[bytes] = field(default_factory=list)
    late: list[str] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> UcmWorkerMetadata:
        assert isinstance(other, UcmWorkerMetadata), "all workers have the same connector"
        return UcmWorkerMetadata(self.unsaved + other.unsaved, self.late + other.late)
