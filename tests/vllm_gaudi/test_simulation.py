"""The simulated engine: every token is computed once, blocks are conserved, and places stay compact."""

from __future__ import annotations

import random

import pytest

from tests.vllm_gaudi.servers import TRAFFICS, traffic
from vllm_gaudi_ucm_tools.vllm_gaudi.block_pool import SLACK, BlockPool
from vllm_gaudi_ucm_tools.vllm_gaudi.demand import check_traffic
from vllm_gaudi_ucm_tools.vllm_gaudi.simulation import Engine


@pytest.mark.parametrize("name", TRAFFICS)
def test_all_tokens_are_computed_within_the_limits(name: str) -> None:
    settings, found = traffic(name)
    log = TRAFFICS[name][1]
    check_traffic(found, settings)
    steps = [step for ranks in found.steps for step in ranks]
    computed = sum(prefill.query for step in steps for prefill in step.prefills)
    prompts, answers = (sum(getattr(request, kind) for request in log) for kind in ("prompt", "output"))
    decodes = sum(step.decodes for step in steps)
    shared = name == "shared prefix"
    full = name == "contiguous, full"
    assert computed < prompts if shared else computed > prompts if full else computed == prompts
    if not settings.drafts and not full:
        # the first token of an answer comes from its prompt
        assert decodes == answers - len(log)
    assert decodes < answers
    for step in steps:
        assert sum(prefill.query for prefill in step.prefills) <= settings.max_num_batched_tokens
        if settings.contiguous and step.decodes:
            assert 0 < step.highest <= settings.num_blocks


def test_blocks_are_conserved_and_keep_their_prefix_until_they_are_taken() -> None:
    rng = random.Random(1)
    pool, held = BlockPool(60), []
    for turn in range(400):
        if held and rng.random() < 0.5:
            pool.give_back(held.pop(rng.randrange(len(held))))
        else:
            known = pool.known([(key, 0) for key in range(rng.randint(0, 4))])
            count = rng.randint(1, 6)
            if pool.num_taken_by(known) + count <= pool.num_free:
                pool.share(known)
                blocks = [*known, *pool.take(count)]
                pool.name(blocks[-1], (turn % 5, 0))
                held.append(blocks)
        assert pool.num_free + len({block for blocks in held for block in blocks}) == 59
    while held:
        pool.give_back(held.pop())
    assert pool.num_free == 59


def test_scattered_blocks_move_down() -> None:
    pool = BlockPool(400)
    blocks = pool.take(300)
    pool.give_back(blocks[:290])
    assert pool.highest(blocks[290:]) == 300
    assert pool.compact()
    assert pool.highest(blocks[290:]) == 10
    assert not pool.compact()
    assert pool.take(200)
    assert SLACK == 32


def test_a_request_that_makes_room_for_itself_leaves_no_block_behind() -> None:
    """The last request of a full cache is preempted for its own next block; a long log would lose all blocks."""
    settings, log = TRAFFICS["contiguous, full"]
    engine = Engine(settings, acceptance=0.6, seed=0)
    for request in log * 20:
        engine.add(request)
    num_steps = 0
    while engine.busy:
        engine.schedule()
        engine.finish()
        num_steps += 1
        assert num_steps < 10_000
    assert engine.num_finished == 20 * len(log)
    assert engine.num_free == settings.num_blocks - 1
