"""Memory mode on real schedulers: what leaves, what comes back, and that tables and free blocks always agree."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from vllm.v1.request import RequestStatus

from tests.memory_mode.fake_worker import FakeWorker
from tests.memory_mode.scheduler_side import run_step, scheduler_of
from tests.scheduler.schedulers import BLOCK_SIZE, request
from vllm_gaudi_ucm.memory_mode.scheduler_side import STEPS_UNDER_WAY


def test_what_is_freed_admits_others(tmp_path: Path) -> None:
    """A prompt of 40 blocks keeps 16; the freed ones are free for others, and the tail and windows stay."""
    scheduler, worker = scheduler_of(tmp_path), FakeWorker(random.Random(0))
    scheduler.add_request(request("a", 160, max_tokens=80))
    pool = scheduler.kv_cache_manager.block_pool
    for _ in range(3):
        run_step(scheduler, worker)
    full = pool.get_num_free_blocks()
    for _ in range(12):
        run_step(scheduler, worker)
    table = scheduler.offload._blocks.table("a")
    resident = [number for number, block in enumerate(table) if not block.is_null]
    assert len(resident) < 0.55 * len(table)
    assert resident[0] == 0
    assert resident[-3:] == list(range(len(table) - 3, len(table)))
    assert pool.get_num_free_blocks() >= full + 20
    assert worker.tables["a"] == [block.block_id for block in table]


@pytest.mark.parametrize("moves", [1, 4])
def test_moves_per_step(tmp_path: Path, moves: int) -> None:
    scheduler, worker = scheduler_of(tmp_path, caching=False, moves_per_step=moves), FakeWorker(random.Random(0))
    scheduler.add_request(request("a", 160, max_tokens=80))
    most = [0, 0]
    for _ in range(40):
        meta = run_step(scheduler, worker).ucm_sparse_meta
        most = [max(most[0], len(meta.offload.saves)), max(most[1], len(meta.offload.loads))]
    assert most == [moves, moves]


def test_moves_under_way_are_bounded(tmp_path: Path) -> None:
    """A slow store holds up moves, not memory."""
    scheduler = scheduler_of(tmp_path, caching=False, moves_per_step=2)
    worker = FakeWorker(random.Random(0), delay=40)
    scheduler.add_request(request("a", 160, max_tokens=80))
    under_way = []
    for _ in range(60):
        run_step(scheduler, worker)
        under_way.append(len(worker._moving))
    assert 6 <= max(under_way) <= 2 * 2 * STEPS_UNDER_WAY


def test_refresh_steps(tmp_path: Path) -> None:
    """Scored in the first sparse step, soon again, and then every so many."""
    scheduler, worker = scheduler_of(tmp_path, refresh_steps=5), FakeWorker(random.Random(0))
    scheduler.add_request(request("a", 60, max_tokens=80))
    scored = [bool(run_step(scheduler, worker).ucm_sparse_meta.offload.scored) for _ in range(17)]
    assert [step for step, is_scored in enumerate(scored) if is_scored] == [1, 2, 4, 8, 13]


def test_everything_comes_back_where_too_much_is_missed(tmp_path: Path) -> None:
    """Random scores miss more than half of the attention."""
    scheduler, worker = scheduler_of(tmp_path, caching=False, max_missed=0.3), FakeWorker(random.Random(0))
    scheduler.add_request(request("a", 160, max_tokens=80))
    away = []
    for _ in range(60):
        run_step(scheduler, worker)
        away.append(scheduler.offload.num_offloaded)
    totals = scheduler.offload.totals
    assert max(away) > 10
    assert away[-1] == 0
    assert totals.kept == 1
    assert totals.missed > 0.3


@pytest.mark.parametrize(("ratio", "most"), [(0.1, 20), (0.02, 4)])
def test_away_ratio(tmp_path: Path, ratio: float, most: int) -> None:
    """So many blocks have a copy; those that came back give theirs up for others."""
    scheduler, worker = scheduler_of(tmp_path, offloaded_ratio=ratio), FakeWorker(random.Random(0))
    scheduler.add_request(request("a", 160, max_tokens=80))
    found = []
    for _ in range(20):
        run_step(scheduler, worker)
        found.append(scheduler.offload.num_offloaded)
        assert len(worker._copies) <= most
    assert max(found) == most
    assert min(found[6:]) >= most // 4


def test_shared_blocks_stay(tmp_path: Path) -> None:
    """covers: C10. A block that another request uses would free nothing; once that one is over, it leaves."""
    scheduler, worker = scheduler_of(tmp_path), FakeWorker(random.Random(0))
    scheduler.add_request(request("a", 160, max_tokens=90))
    scheduler.add_request(request("b", 160, max_tokens=10))
    while scheduler.requests.keys() == {"a", "b"}:
        run_step(scheduler, worker)
        tables = [scheduler.offload._blocks.table(name) for name in "ab"]
        for one, other in zip(*tables, strict=False):
            assert one.is_null == other.is_null or one.ref_cnt <= 1
    for _ in range(10):
        run_step(scheduler, worker)
    assert scheduler.offload.num_offloaded > 10


def test_blocks_come_back_from_the_prefix_cache(tmp_path: Path) -> None:
    """Without a load, as long as nobody wrote over them."""
    scheduler, worker = scheduler_of(tmp_path), FakeWorker(random.Random(0))
    scheduler.add_request(request("a", 160, max_tokens=80))
    for _ in range(40):
        assert not run_step(scheduler, worker).ucm_sparse_meta.offload.loads
    assert scheduler.offload.totals.found


def test_the_prefix_cache_loses_the_end_of_a_context_first(tmp_path: Path) -> None:
    """Blocks leave by their scores. When their request ends they are freed with its others, the last one first, so that
    the beginning is found after others have taken room.
    """
    scheduler, worker = scheduler_of(tmp_path, num_blocks=60), FakeWorker(random.Random(0))
    scheduler.add_request(request("a", 160, max_tokens=12))
    away = 0
    while scheduler.requests:
        run_step(scheduler, worker)
        away = max(away, scheduler.offload.num_offloaded)
    assert away > 10
    scheduler.add_request(request("b", 100, max_tokens=1, start=16))
    while scheduler.requests:
        run_step(scheduler, worker)
    _, found, _ = scheduler.kv_cache_manager.get_computed_blocks(request("c", 160))
    # b's 25 blocks were the 16 unused ones, and others from the end of a's 42
    assert found // BLOCK_SIZE >= 40 - 10


def test_failed_saves_change_nothing(tmp_path: Path) -> None:
    """covers: C8"""
    scheduler, worker = scheduler_of(tmp_path), FakeWorker(random.Random(0), fail_saves=1.0)
    scheduler.add_request(request("a", 160, max_tokens=80))
    for _ in range(30):
        run_step(scheduler, worker)
    assert scheduler.offload.totals.unsaved
    assert scheduler.offload.num_offloaded == 0


def test_failed_loads_stay_away(tmp_path: Path) -> None:
    """covers: C8"""
    scheduler = scheduler_of(tmp_path, caching=False)
    worker = FakeWorker(random.Random(0), fail_loads=1.0)
    scheduler.add_request(request("a", 160, max_tokens=80))
    for _ in range(60):
        run_step(scheduler, worker)
    totals = scheduler.offload.totals
    assert totals.failed
    assert totals.loaded == 0
    sent = run_step(scheduler, worker).ucm_sparse_meta.offload.totals
    assert sent.failed == totals.failed
    assert sent.away == scheduler.offload.num_offloaded
    (generation,) = scheduler.offload._states.values()
    assert len(generation.lost) == totals.failed, "each is tried once"


def test_short_and_dense_requests_keep_everything(tmp_path: Path) -> None:
    scheduler, worker = scheduler_of(tmp_path), FakeWorker(random.Random(0))
    scheduler.add_request(request("short", 12, max_tokens=5))
    scheduler.add_request(request("off", 160, max_tokens=60, ucm_sparse=False))
    for _ in range(30):
        run_step(scheduler, worker)
    assert scheduler.offload.totals.scored == 0


def test_an_id_used_again_while_a_block_is_on_its_way(tmp_path: Path) -> None:
    """covers: C5 C9"""
    scheduler = scheduler_of(tmp_path, caching=False)
    worker = FakeWorker(random.Random(0), delay=6)
    for _ in range(3):
        scheduler.add_request(request("a", 160, max_tokens=80))
        while not (scheduler.offload._states["a"].loading):
            run_step(scheduler, worker)
        scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    run_step(scheduler, worker)
    assert not worker._moving


@pytest.mark.parametrize("method", ["GSA", "KVStar"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("windows", [(), (6, 13)], ids=["one table", "windows"])
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic(tmp_path: Path, method: str, caching: bool, seed: int, windows: tuple[int, ...]) -> None:
    """covers: C5 C8 C9 C10. Few blocks (preemption), aborts, reused ids, resets, moves that are slow or fail. Windows
    have their blocks, whatever leaves."""
    rng = random.Random(seed)
    store = {"kind": "file", "path": str(tmp_path / "kv")}
    moves = rng.choice([2, 8])
    options = {"moves_per_step": moves, "offloaded_ratio": 1.0, "store": store, "windows": windows}
    scheduler = scheduler_of(tmp_path, 90 if windows else 60, method, caching, **options)
    worker = FakeWorker(rng, fail_saves=0.05, fail_loads=0.05, delay=3, windows=windows)
    preempted = 0
    for step in range(250):
        name = f"r{rng.randrange(6)}"
        if step < 200 and name not in scheduler.requests and rng.random() < 0.3:
            length = rng.choice([3, 41, 80, 120, 160])
            scheduler.add_request(request(name, length, max_tokens=rng.randint(1, 60), start=rng.randrange(3)))
        if scheduler.requests and rng.random() < 0.03:
            scheduler.finish_requests(rng.choice(list(scheduler.requests)), RequestStatus.FINISHED_ABORTED)
        if rng.random() < 0.01:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        preempted += len(run_step(scheduler, worker).preempted_req_ids or ())
    totals = scheduler.offload.totals
    assert preempted
    assert totals.released
    assert totals.found if caching else totals.loaded
    for name in list(scheduler.requests):
        scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    run_step(scheduler, worker)
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert not worker._moving
    assert not worker._copies


def test_what_requests_need_next_is_left_free(tmp_path: Path) -> None:
    """A block in each group."""
    for windows in ((), (6, 13)):
        blocks = scheduler_of(tmp_path, 60, windows=windows).offload._blocks
        assert blocks.group == len(windows)
        assert blocks.num_spare(5) == 59 - 5 * (1 + len(windows))


def test_blocks_that_the_same_step_fills_are_not_found(tmp_path: Path) -> None:
    """covers: F5. A request that misses a block runs in a division of its own, before the one that fills that block
    for the cache."""
    scheduler, worker = scheduler_of(tmp_path, graphs="eager"), FakeWorker(random.Random(0))
    scheduler.add_request(request("first", 40))
    for _ in range(2):
        run_step(scheduler, worker)
    offload, pool = scheduler.offload, scheduler.kv_cache_manager.block_pool
    left = offload._blocks.table("first")[5].block_id
    assert offload.leave_stored("first", {5: b"key"})
    pool.evict_blocks({left})
    worker.poison([left])
    # as the worker's table would be, had the request just been loaded
    worker.tables["first"][5] = 0
    scheduler.add_request(request("second", 40))
    output = run_step(scheduler, worker)
    assert list(output.num_scheduled_tokens) == ["first", "second"]
    assert output.num_scheduled_tokens["second"] == 20
    assert offload.num_offloaded
    assert not offload.totals.found


@pytest.mark.parametrize("graphs", ["off", "eager"])
def test_how_much_of_a_prompt_may_be_a_sparse_step(tmp_path: Path, graphs: str) -> None:
    """A block of rows, whatever the shapes. Only with blocks away."""
    scheduler = scheduler_of(tmp_path, graphs=graphs)
    scheduler.add_request(request("a", 40))
    scheduler.schedule()
    offload = scheduler.offload
    assert not offload.has_gaps("a", 1)
    assert not offload.is_guess("a")
    assert offload.leave_stored("a", {3: b"key"})
    assert offload.has_gaps("a", BLOCK_SIZE)
    assert not offload.has_gaps("a", BLOCK_SIZE + 1)
    assert offload.is_guess("a")
    assert scheduler.sparse.has_gaps == offload.has_gaps
    offload.end("a")
    assert not offload.has_gaps("a", 1)
