"""What the two sides of the connector tell each other with every step: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from vllm_gaudi_ucm.prefetch.plan import PrefetchPlan


@dataclass(frozen=True)
class BlockLoad:
    """Blocks of a request that waits for them: block `block_ids[i]` gets what is stored under `keys[i]`."""

    request_id: str
    keys: list[bytes]
    block_ids: list[int]


@dataclass(frozen=True)
class BlockSave:
    """A block that is full once this step has run."""

    key: bytes
    block_id: int


@dataclass
class UcmMetadata(KVConnectorMetadata):
    """From the scheduler to the worker. lookups: its LookupCounts as a tuple, for the worker's metrics."""

    loads: list[BlockLoad] = field(default_factory=list)
    saves: list[BlockSave] = field(default_factory=list)
    prefetch: PrefetchPlan = field(default_factory=PrefetchPlan)
    lookups: tuple[int, int, int, int] = (0, 0, 0, 0)


@dataclass
class UcmWorkerMetadata(KVConnectorWorkerMetadata):
    """From the worker to the scheduler: keys whose blocks were not stored after all."""

    unsaved: list[bytes] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> UcmWorkerMetadata:
        assert isinstance(other, UcmWorkerMetadata), "all workers have the same connector"
        return UcmWorkerMetadata(self.unsaved + other.unsaved)
