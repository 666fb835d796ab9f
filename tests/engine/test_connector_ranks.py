"""Two workers in processes of their own: each keeps its part of a block, and what one of them lacks, both compute."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import RequestOutput
from vllm.config import KVTransferConfig

from tests.engine.broken_connector import BrokenOnOneRank
from tests.engine.connector_ranks import failed_blocks, ours, spoil, transfer
from tests.engine.multi_connector import multi, offloading, shared
from tests.engine.rank_faults import heal_loads, hold_loads, loading, lose_blocks, lost_loads
from tests.engine.serving import Answer, Engine, answer_of, assert_same, greedy_params
from tests.engine.tiny_models import VOCAB, make_config, make_model
from tests.engine.worker_processes import EngineOfWorkers
from tests.store.redis_server import RedisServer, needs_redis
from vllm_gaudi_ucm.connector.connector import our_connector
from vllm_gaudi_ucm.connector.scheduler_side import SchedulerSide
from vllm_gaudi_ucm.store.base import HEADER_BYTES
from vllm_gaudi_ucm.store.block_key import chain_keys
from vllm_gaudi_ucm.store.held_folder import record_name
from vllm_gaudi_ucm.store.medium import StoredBlock
from vllm_gaudi_ucm.store.shards import Shard

pytestmark = pytest.mark.slow  # starts engines

BLOCK = 16
RNG = random.Random(31)


def tokens(count: int) -> list[int]:
    return [RNG.randrange(3, VOCAB) for _ in range(count)]


COMMON = tokens(64)
PROMPTS = [tokens(5), tokens(17), tokens(96), COMMON + tokens(30), tokens(80), tokens(150)]
ALL_HIT = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]
OUTPUTS = 8
OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 6, "max_num_batched_tokens": 96}
STAGES: dict[str, Any] = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}


# the workers compare in each step what they run: the blocks that sparse requests choose among, too
CHECKED: dict[str, Any] = {"distributed": {"check_ranks": True}}
WINDOWS: dict[str, Any] = {"sparse_steps": "always", "min_tokens": 32, "local_window_sz": 1, "min_blocks": 2}


def gsa(ratio: float) -> dict[str, Any]:
    return {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": {**WINDOWS, "sparse_ratio": ratio}}}


class Ranked(EngineOfWorkers):
    """An engine with two workers; its core is in this process."""

    def __init__(self, model: Path, ucm: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(model, {**(ucm or {}), **CHECKED}, **{**OPTIONS, "tensor_parallel_size": 2, **options})

    @property
    def side(self) -> SchedulerSide:
        ours = our_connector(self.core.scheduler.connector)
        assert ours is not None
        assert ours.scheduler_side is not None
        return ours.scheduler_side

    def prompt_keys(self) -> list[bytes]:
        """Of the blocks of the prompts that may be loaded."""
        namespace = self.side._setup.namespace(sparse=True)
        return [
            key
            for prompt, hit in zip(PROMPTS, ALL_HIT, strict=True)
            for key in chain_keys(namespace, None, prompt[:hit], BLOCK)
        ]

    def settle(self) -> None:
        """Nothing is left of any request, and the store has the prompts whole."""
        end = time.monotonic() + 60
        while not all(found := self.side.store.lookup(self.prompt_keys())):
            assert time.monotonic() < end, f"{sum(found)} of {len(found)} blocks were saved"
            self.step()
            time.sleep(0.05)
        pool = self.core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert self.side.num_requests == 0


def hits(answers: list[Answer]) -> list[int]:
    return [answer.cached_tokens for answer in answers]


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[Answer]:
    with Engine(tiny_llama, **OPTIONS) as engine:
        return engine.greedy(PROMPTS, OUTPUTS)


@pytest.fixture(scope="module")
def expected_sparse(tiny_llama: Path) -> list[Answer]:
    with Engine(tiny_llama, gsa(0.4), **OPTIONS) as engine:
        return engine.alone(PROMPTS, OUTPUTS)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    needs_redis()
    server = RedisServer(tmp_path)
    yield server
    server.kill()


def records(folder: Path, shard: Shard, keys: list[bytes]) -> list[Path]:
    """The files of one rank's parts of blocks."""
    blocks = [StoredBlock(shard.key(key), shard.block_bytes) for key in keys]
    return [folder / "blocks" / "blocks" / record_name(block) for block in blocks]


def test_two_ranks_share_a_folder(tiny_llama: Path, expected: list[Answer], tmp_path: Path) -> None:
    """A second engine finds what the first has saved. Then one rank's records fail, one rank's records are gone, and
    an engine with one worker comes to the same folder. All blocks are chosen, so that answers are those without a
    method, whenever a block gets its summary."""
    options: dict[str, Any] = {"kv_transfer_config": transfer(tmp_path), "enable_prefix_caching": False}
    with Ranked(tiny_llama, gsa(1.0), **options) as engine:
        found = engine.greedy(PROMPTS, OUTPUTS)
        assert_same(found, expected)
        assert hits(found) == [0] * len(PROMPTS)
        engine.settle()
        keys, shards = engine.prompt_keys(), engine.side._setup.shards
    assert {shard.kv_heads for shard in shards} == {((0, 1, 2),), ((1, 2, 2),)}
    assert all(path.exists() for shard in shards for path in records(tmp_path, shard, keys))
    static = {"graphs": {"mode": "eager", "max_graphs": 4, "warm_up": "full"}}
    # few, so that loads soon write what other requests had
    with Ranked(tiny_llama, {**gsa(1.0), **static}, **options, num_gpu_blocks_override=48) as engine:
        found = engine.greedy(PROMPTS, OUTPUTS)
        assert_same(found, expected)
        assert hits(found) == ALL_HIT
        for act in (spoil, Path.unlink):
            _check_without_a_part(engine, tmp_path, act, expected)
        _check_late(engine, expected)
        # what was computed again was saved again, by the rank that lacked it
        found = engine.greedy(PROMPTS, OUTPUTS)
        assert_same(found, expected)
        assert hits(found) == ALL_HIT
        engine.settle()
    with Engine(tiny_llama, gsa(1.0), **OPTIONS, **options) as one:
        found = one.greedy(PROMPTS, OUTPUTS)
        assert_same(found, expected)
        assert hits(found) == [0] * len(PROMPTS)
    assert all(path.exists() for shard in shards for path in records(tmp_path, shard, keys))


def _check_without_a_part(engine: Ranked, folder: Path, act: Callable[[Path], None], expected: list[Answer]) -> None:
    """One rank lacks its part of every third block, the other rank of others."""
    keys = engine.prompt_keys()
    # as after five seconds, for which blocks may be on their way to the store
    engine.side.known.clear()
    for rank, shard in enumerate(engine.side._setup.shards):
        for path in records(folder, shard, keys[rank::3]):
            act(path)
    found = engine.greedy(PROMPTS, OUTPUTS)
    assert_same(found, expected)
    if act is Path.unlink:
        assert sum(hits(found)) < sum(ALL_HIT)
    engine.settle()


def _check_late(engine: Ranked, expected: list[Answer]) -> None:
    """One rank has its parts when the other one still reads: requests wait for both, while others run. In the end one
    rank is too late, and both compute.

    At static shapes, where a step has room for few summaries, blocks of requests that have ended wait for theirs still
    when loads write them: those of the request that runs meanwhile are made by both ranks in the same steps.
    """
    for rank in (0, 1):
        engine.greedy(PROMPTS, 2)
        engine.on_workers(partial(hold_loads, rank=rank))
        ids, finished = [*_begin(engine), engine.new_id()], dict[str, RequestOutput]()
        engine.add(ids[-1], tokens(150), greedy_params(OUTPUTS))
        # nothing of the first one and of the last one is stored
        while not {ids[0], ids[-1]} <= finished.keys() or engine.on_workers(loading)[1 - rank]:
            finished.update(_finished(engine))
        # one block is in host memory, and may be all of a prompt
        assert engine.on_workers(loading)[rank] >= len(PROMPTS) - 2
        assert len(finished) <= 3
        del finished[ids.pop()]
        engine.on_workers(heal_loads)
        _check_answers(engine, ids, finished, expected)
    before = engine.on_workers(lost_loads)
    engine.on_workers(partial(hold_loads, rank=1, deadline=0.05))
    _check_answers(engine, _begin(engine), {}, expected)
    engine.on_workers(heal_loads)
    after = engine.on_workers(lost_loads)
    assert after[0] == before[0]
    assert after[1][1] > before[1][1]


def _begin(engine: Ranked) -> list[str]:
    ids = [engine.new_id() for _ in PROMPTS]
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        engine.add(request_id, prompt, greedy_params(OUTPUTS))
    return ids


def _finished(engine: Ranked) -> dict[str, RequestOutput]:
    """By a step."""
    return {output.request_id: output for output in engine.step() if output.finished}


def _check_answers(engine: Ranked, ids: list[str], finished: dict[str, RequestOutput], expected: list[Answer]) -> None:
    """Once all have finished."""
    end = time.monotonic() + 60
    while len(finished) < len(ids):
        assert time.monotonic() < end
        finished.update(_finished(engine))
    assert_same([answer_of(finished[request_id]) for request_id in ids], expected)
    engine.settle()


def test_sparse_steps_over_a_server(
    tiny_llama: Path, expected_sparse: list[Answer], redis: RedisServer, tmp_path: Path
) -> None:
    """covers: C8 D9. Both ranks choose among the same blocks, whichever of them has not got some, or has them late."""
    options: dict[str, Any] = {
        "kv_transfer_config": transfer(tmp_path, kind="redis", url=redis.url),
        "enable_prefix_caching": False,
        # no prompt is divided: one whose last token is left alone would end with a sparse step
        "max_num_batched_tokens": 512,
    }
    with Ranked(tiny_llama, gsa(0.4), **options) as engine:
        for hit in ([0] * len(PROMPTS), ALL_HIT):
            found = engine.greedy(PROMPTS, OUTPUTS)
            assert_same(found, expected_sparse)
            assert hits(found) == hit
            engine.settle()
        for rank in (0, 1):
            assert engine.on_workers(lost_loads)[rank] == (0, 0)
            engine.on_workers(partial(lose_blocks, rank=rank, keys=engine.prompt_keys()[rank::3]))
            assert_same(engine.greedy(PROMPTS, OUTPUTS), expected_sparse)
            assert engine.on_workers(lost_loads)[rank][0] > 0
            engine.on_workers(heal_loads)
            engine.settle()
        _check_late(engine, expected_sparse)
        redis.kill()
        engine.side.known.clear()
        assert_same(engine.greedy(PROMPTS, OUTPUTS), expected_sparse)


def test_two_stages_share_a_folder(tmp_path: Path, in_process: None) -> None:
    """covers: C8 D9. Two layers and one: records of two sizes. Stages load while steps of other requests are in flight,
    and what one stage lacks, both compute again; requests are preempted, too, as the cache is small."""
    model = make_model(tmp_path / "model", make_config("llama", num_hidden_layers=3))
    with Engine(model, **OPTIONS) as engine:
        expected = engine.greedy(PROMPTS, OUTPUTS)
    small: dict[str, Any] = {"enable_prefix_caching": False, "num_gpu_blocks_override": 20, **STAGES}
    options = {"kv_transfer_config": transfer(tmp_path), **small}
    # beside sparse steps that choose all blocks: a request that was preempted is computed densely again
    with Ranked(model, gsa(1.0), **options) as engine:
        found = engine.greedy(PROMPTS, OUTPUTS)
        assert_same(found, expected)
        engine.settle()
        keys, shards = engine.prompt_keys(), engine.side._setup.shards
        assert [shard.layers for shard in shards] == [(0, 2, 3), (2, 3, 3)]
        assert all(path.exists() for shard in shards for path in records(tmp_path, shard, keys))
        engine.side.known.clear()
        found = engine.greedy(PROMPTS, OUTPUTS)
        assert_same(found, expected)
        assert hits(found) == ALL_HIT
        assert engine.llm.collective_rpc(failed_blocks) == [0, 0]
        for act in (spoil, Path.unlink):
            _check_without_a_part(engine, tmp_path, act, expected)
        assert all(count > 2 for count in engine.llm.collective_rpc(failed_blocks))
        found = engine.greedy(PROMPTS, OUTPUTS)
        assert_same(found, expected)
        assert hits(found) == ALL_HIT
        assert engine.preemptions > 0  # how often depends on how fast blocks are loaded
        engine.settle()


def test_orders_reach_both_ranks(tiny_llama: Path) -> None:
    """Blocks that are swapped, copied in part and moved, in a cache that is too small for all of it."""
    asked = [COMMON[: 2 * BLOCK + 5] + tokens(1 + index % 7) for index in range(12)]
    with Engine(tiny_llama, max_model_len=160) as engine:
        wanted = engine.greedy(asked, 40)
    ucm = {"preemption": {"mode": "swap"}, "kv_cache": {"partial_hits": True, "compaction": True}}
    small: dict[str, Any] = {"max_model_len": 160, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 12}
    with Ranked(tiny_llama, ucm, **small) as engine:
        answers = engine.staggered(asked, [2 * index for index in range(len(asked))], 40)
        assert_same(answers, wanted)
        rules = engine.core.scheduler.block_policies
        totals, swaps = rules.totals, rules.named("swap")
        assert engine.preemptions > 2
        assert totals.swapped_in > 2
        assert totals.recomputed_tokens == 0
        assert totals.copies > 2
        assert totals.moves > 2
        swaps.check_integrity()
        # 4 GiB for both ranks, each of which has one of two heads: keys and values of two layers
        assert swaps._slots.count == (4 << 30) // (2 * 2 * 2 * BLOCK * 16 * 4)
        assert swaps.cost.rates.are_known


def test_offloaded_blocks_come_back_to_both_ranks(tiny_llama: Path, expected: list[Answer]) -> None:
    """vLLM's OffloadingConnector, beside a sparse method: all blocks are chosen, because it may leave one token of a
    prompt to a sparse step."""
    config = KVTransferConfig(**offloading())
    with Ranked(tiny_llama, gsa(1.0), kv_transfer_config=config, num_gpu_blocks_override=17) as engine:
        assert_same(engine.alone(PROMPTS, OUTPUTS), expected)
        again = engine.alone(PROMPTS, OUTPUTS)
        assert_same(again, expected)
        assert again[5].cached_tokens >= 128


def test_a_load_of_another_child_that_fails_on_one_rank(
    tiny_llama: Path, expected: list[Answer], tmp_path: Path
) -> None:
    """covers: C8 D3. Both ranks have computed with what is not there, and neither stores it."""
    config = multi(shared(tmp_path, BrokenOnOneRank), ours(tmp_path))
    with Ranked(tiny_llama, kv_transfer_config=config, enable_prefix_caching=False) as engine:
        assert_same(engine.alone(PROMPTS, OUTPUTS), expected)
        engine.settle()
        keys, shards = engine.prompt_keys(), engine.side._setup.shards
        files = [path for shard in shards for path in records(tmp_path, shard, keys)]
        stored = [path.read_bytes() for path in files]
        engine.side.known.clear()
        for path in files:
            path.unlink()
        found = engine.alone(PROMPTS, OUTPUTS)
        assert_same(found, expected)
        time.sleep(2.0)
        # the broken child has nothing of one prompt
        kept = [(path, content) for path, content in zip(files, stored, strict=True) if path.exists()]
        for path, content in kept:
            assert floats(path.read_bytes()) == pytest.approx(floats(content), abs=1e-4)
        assert len(kept) < len(files)


def floats(record: bytes) -> np.ndarray:
    """Of the block behind its header."""
    return np.frombuffer(record, np.float32, offset=HEADER_BYTES)
