"""Several workers of one engine: which part of a block each has, and what the scheduler makes of their reports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from tests.connector.scheduler_side import Side, make_request, matched, scheduled
from tests.connector.setup import make_setup
from vllm_gaudi_ucm.connector.connector import UcmConnector
from vllm_gaudi_ucm.connector.metadata import UcmWorkerMetadata
from vllm_gaudi_ucm.connector.setup import ConnectorSetup


@pytest.fixture
def setups(tmp_path: Path) -> Any:
    """One for each worker, and its shard."""

    def make(**changes: Any) -> list[ConnectorSetup]:
        size = changes.get("tp", 1) * changes.get("pp", 1)
        more = {"executor": "mp", "options": {"store": {"kind": "redis"}}, **changes}
        return [make_setup(tmp_path, rank=rank, **more) for rank in range(size)]

    return make


def test_every_worker_knows_all_shards(setups: Any) -> None:
    """covers: D9"""
    made = setups(tp=2, heads=1)
    assert made[0].shards == made[1].shards
    assert [shard.kv_heads for shard in made[0].shards] == [((0, 1, 2),), ((1, 2, 2),)]
    assert [setup.worker_saves for setup in made] == [True, True]
    assert len({shard.key(b"k" * 32) for shard in made[0].shards}) == 2
    (alone,) = setups()
    assert alone.shards == ()
    assert alone.worker_saves


def test_workers_with_the_same_heads_share_records(setups: Any) -> None:
    """Two heads for four workers: the first of two saves, both load."""
    made = setups(tp=4, heads=1)
    shards = made[0].shards
    assert shards[0] == shards[1] != shards[2] == shards[3]
    assert [setup.worker_saves for setup in made] == [True, False, True, False]


@pytest.mark.parametrize("draft_heads", [4, 1])
def test_a_draft_model_shares_out_its_heads_in_its_own_way(setups: Any, draft_heads: int) -> None:
    """Its layers lie in the same blocks: workers with the same heads of the model have different ones of it."""
    made = setups(tp=4, heads=1, draft_heads=draft_heads)
    assert len(set(made[0].shards)) == (4 if draft_heads == 4 else 2)


def test_pipeline_stages_have_layers_of_their_own(setups: Any) -> None:
    """Five layers in two stages, of two workers each."""
    layers = [("0", "1", "2"), ("0", "1", "2"), ("3", "4"), ("3", "4")]
    made = [setups(tp=2, pp=2, heads=1, layers=names)[rank] for rank, names in enumerate(layers)]
    shards = made[0].shards
    assert [shard.layers for shard in shards] == [(0, 3, 5), (0, 3, 5), (3, 5, 5), (3, 5, 5)]
    assert [shard.block_bytes for shard in shards] == [setup.block_bytes for setup in made]
    assert all(setup.shards == shards for setup in made)
    assert len({shard.key(b"k" * 32) for shard in shards}) == 4
    assert all(setup.worker_saves for setup in made)


@pytest.fixture
def side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Side]:
    """Of an engine with two workers."""
    more = {"executor": "mp", "options": {"store": {"kind": "redis"}}, "revision": "v1"}
    made = Side(tmp_path, monkeypatch, tp=2, heads=1, **more)
    yield made
    made.side.close()


def test_a_block_is_there_when_all_ranks_have_it(side: Side) -> None:
    """covers: D9. What one rank has lost is saved again, by whichever ranks lack it."""
    keys = side.save(64)
    request = make_request("second", 70)
    side.side.begin(request)
    assert matched(side, request) == 0, "these are no keys of any worker"
    side.side.end("second")
    first, second = side.setup.shards
    side.store.blocks = {shard.key(key): b"" for shard in (first, second) for key in keys}
    for lost, hits in ((None, 64), (second.key(keys[2]), 32), (first.key(keys[1]), 16)):
        side.store.blocks.pop(lost or b"", None)
        request = make_request("second", 70)
        side.side.begin(request)
        assert matched(side, request) == hits
        side.side.end("second")


class Reports:
    """vLLM's way of the workers' reports to the scheduler's side of a connector."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._aggregator = KVOutputAggregator(2)

    def step(self, *of_ranks: dict[str, Any]) -> KVConnectorOutput:
        outputs: list[ModelRunnerOutput | None] = []
        for fields in of_ranks:
            output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
            output.kv_connector_output = KVConnectorOutput(**fields)
            outputs.append(output)
        found = self._aggregator.aggregate(outputs)
        assert found is not None
        assert found.kv_connector_output is not None
        connector: Any = UcmConnector.__new__(UcmConnector)
        connector.scheduler_side = self._side.side
        UcmConnector.update_connector_output(connector, found.kv_connector_output)
        return found.kv_connector_output


def begin_load(side: Side) -> list[bytes]:
    """A request that waits for blocks 1 to 4."""
    keys = side.save(64)
    side.store.blocks = {shard.key(key): b"" for shard in side.setup.shards for key in keys}
    request = make_request("second", 70)
    side.side.begin(request)
    assert matched(side, request) == 64
    side.side.admitted(request, [[1, 2, 3, 4, 5]], 64)
    (load,) = side.side.metadata(scheduled()).loads
    assert load.keys == keys
    return keys


@pytest.mark.parametrize("first", [0, 1], ids=["rank 0 first", "rank 1 first"])
def test_one_rank_fails_while_another_still_loads(side: Side, first: int) -> None:
    """covers: C8 D9. The request waits for all ranks; what one of them lacks, all compute, and it is saved again."""
    keys, reports = begin_load(side), Reports(side)
    early = {"finished_recving": {"second"}, "invalid_block_ids": {3}}
    found = reports.step(*([early, {}] if first == 0 else [{}, early]))
    assert found.finished_recving is None
    # vLLM shortens the request's prefix now, and goes on waiting
    assert found.invalid_block_ids == {3}
    assert keys[2] in side.side.known
    assert reports.step({}, {}).finished_recving is None
    late = {"finished_recving": {"second"}, "invalid_block_ids": {2}}
    found = reports.step(*([{}, late] if first == 0 else [late, {}]))
    assert found.finished_recving == {"second"}
    assert [key in side.side.known for key in keys] == [True, False, False, True]
    request = side.side._states["second"].request
    assert side.side.matched_tokens(request, 0) == 0, "nothing is loaded for it again"
    assert [save.key for save in side.side.metadata(scheduled(second=70)).saves] == keys[1:3]


def test_all_ranks_have_their_parts(side: Side) -> None:
    """The request may load again, after a preemption."""
    keys, reports = begin_load(side), Reports(side)
    reports.step({"finished_recving": {"second"}}, {})
    reports.step({}, {"finished_recving": {"second"}})
    assert all(key in side.side.known for key in keys)
    assert matched(side, side.side._states["second"].request) == 64


def test_what_one_rank_could_not_save_is_offered_again(side: Side) -> None:
    keys, reports = side.save(64), Reports(side)
    reports.step({}, {"kv_connector_worker_meta": UcmWorkerMetadata([keys[1]])})
    assert [key in side.side.known for key in keys] == [True, False, True, True]
    reports.step(
        {"kv_connector_worker_meta": UcmWorkerMetadata([keys[2]])},
        {"kv_connector_worker_meta": UcmWorkerMetadata([keys[3]])},
    )
    assert [key in side.side.known for key in keys] == [True, False, False, False]


def test_a_partial_load_that_is_late_on_one_rank(side: Side) -> None:
    """The others have theirs, or fail for another reason: the request is not loaded again, whoever says so first."""
    begin_load(side)
    reports, state = Reports(side), side.side._states["second"]
    failed = {"finished_recving": {"second"}, "failed_recving": {"second"}}
    reports.step({**failed, "kv_connector_worker_meta": UcmWorkerMetadata([], ["second"])}, {})
    assert state.loading is not None
    reports.step({}, {"finished_recving": {"second"}})
    assert state.loading is None
    assert state.is_closed
