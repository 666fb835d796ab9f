"""The choice of buckets: the optimum of its candidates, everything covered, better than the server's own."""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from tests.vllm_gaudi.servers import COST, TRAFFICS, server, traffic
from vllm_gaudi_ucm_tools.vllm_gaudi.bucket_file import parse_bucket_file, write_bucket_file
from vllm_gaudi_ucm_tools.vllm_gaudi.choice import choose, most_blocks
from vllm_gaudi_ucm_tools.vllm_gaudi.level_search import Demand, search
from vllm_gaudi_ucm_tools.vllm_gaudi.look_up import LookUp
from vllm_gaudi_ucm_tools.vllm_gaudi.replay import replay
from vllm_gaudi_ucm_tools.vllm_gaudi.report import SetReport
from vllm_gaudi_ucm_tools.vllm_gaudi.settings import SettingsError
from vllm_gaudi_ucm_tools.vllm_gaudi.strategies import prepare, prepare_from_file
from vllm_gaudi_ucm_tools.vllm_gaudi.traffic import Prefill, Step, Traffic

GRAPHS = 48


def test_the_search_finds_the_optimum() -> None:
    """Compared with every set of levels."""
    rng = random.Random(3)
    for _ in range(6):
        points = [(rng.randint(1, 4), rng.randint(0, 5), rng.randint(1, 9)) for _ in range(8)]
        first, second, count = np.array(points).T
        demand = Demand(
            first, second, count.astype(np.float64), range(1, 5), frozenset(), lambda end: 5, lambda a, b: a + a * b + b
        )
        curve = search(demand, 6)
        pairs = [(a, b) for a in range(1, 5) for b in range(6)]
        for number in range(1, 6):
            best = min(
                (cost for levels in combinations(pairs, number) if (cost := spent(levels, points)) is not None),
                default=None,
            )
            assert best is None or curve.seconds[: number + 1].min() == pytest.approx(best)
            if np.isfinite(curve.seconds[number]):
                assert spent(tuple(curve.levels(number)), points) == pytest.approx(curve.seconds[number])


def spent(levels: tuple[tuple[int, int], ...], points: list[tuple[int, int, int]]) -> float | None:
    """Returns the seconds of points in these buckets; None if a first level lacks its end, or the last one."""
    ends = {a for a, _ in levels}
    if 4 not in ends or any((a, 5) not in levels for a in ends):
        return None
    total = 0.0
    for first, second, count in points:
        a, b = min(level for level in levels if level[0] >= first and level[1] >= second)
        total += count * (a + a * b + b)
    return total


@pytest.mark.parametrize("name", TRAFFICS)
def test_tuned_buckets_cost_less_than_those_of_exp(name: str, tmp_path: Path) -> None:
    """With fewer graphs, from a file that the server reads, and nothing is compiled while it serves."""
    settings, found = traffic(name)
    theirs = prepare(settings)
    most = min(GRAPHS + 40 * (settings.drafts > 0), theirs.num_graphs)
    chosen = choose(found, settings, COST, most, margin=0.05)
    assert chosen.prepared.num_graphs <= most
    assert not chosen.outcome.compiled
    path = tmp_path / "buckets.txt"
    write_bucket_file(path, chosen.entries, settings, [name])
    assert prepare_from_file(parse_bucket_file(path), settings) == chosen.prepared
    own = SetReport("own", "own", chosen.prepared, chosen.outcome, COST)
    exp = SetReport("exp", "exp", theirs, replay(found.steps, theirs, settings), COST)
    assert own.seconds[1] == pytest.approx(exp.seconds[1], rel=0.02)
    assert own.ratio < exp.ratio


@pytest.mark.parametrize("name", TRAFFICS)
def test_every_step_that_can_come_is_covered(name: str) -> None:
    settings, found = traffic(name)
    prepared = choose(found, settings, COST, GRAPHS + 40 * (settings.drafts > 0)).prepared
    rng = random.Random(5)
    steps = []
    for _ in range(1500):
        ranks = []
        for _ in range(settings.ranks):
            decodes = rng.choice((0, 1, settings.max_num_seqs, rng.randint(1, settings.max_num_seqs)))
            most = min(decodes * settings.blocks_per_request, most_blocks(settings))
            blocks = (
                0
                if not decodes
                else rng.choice((decodes, max(most, decodes), rng.randint(decodes, max(most, decodes))))
            )
            highest = rng.randint(min(blocks, settings.num_blocks), settings.num_blocks) if decodes else 0
            prefills, left = [], settings.max_num_batched_tokens
            for _ in range(rng.choice((0, 1, 2, 5, 12))):
                query = rng.randint(1, max(1, left // rng.choice((1, 1, 3, 8))))
                longest = settings.max_model_len - query
                if query > left or longest < 0:
                    break
                prefills.append(Prefill(query, rng.choice((0, 0, longest, rng.randint(0, longest)))))
                left -= query
            ranks.append(Step(tuple(prefills), decodes, blocks, highest, settings.decode_tokens))
        steps.append(tuple(ranks))
    outcome = replay(steps, prepared, settings)
    assert not outcome.compiled


def test_every_batch_reaches_the_last_block_of_a_contiguous_cache() -> None:
    settings, found = traffic("contiguous")
    prepared = choose(found, settings, COST, 24).prepared
    batches = {batch for batch, _, _ in prepared.decodes}
    assert {(batch, 1, settings.num_blocks) for batch in batches} <= set(prepared.decodes)
    assert all(LookUp(prepared, settings).decode(batch, settings.num_blocks)[0] == batch for batch in batches)


def test_too_few_graphs_are_refused_with_the_least_number() -> None:
    settings = server(2048, 16, 4096, 500, drafts=2, environment={"VLLM_PROMPT_BS_BUCKET_MAX": "8"})
    found = Traffic("x", [(Step((Prefill(100, 0),), 3, 5, 0, 3),)])
    with pytest.raises(SettingsError, match=r"expected at least \d+") as refused:
        choose(found, settings, COST, 2)
    least = int(str(refused.value).split("at least ")[1].split()[0])
    assert choose(found, settings, COST, least).prepared.num_graphs <= least


def test_slices_are_kept() -> None:
    sliced = {"PT_HPU_SDPA_QKV_SLICE_MODE_FWD": "true", "VLLM_FUSEDSDPA_SLIDE_THLD": "1024"}
    settings = server(3000, 8, 4096, 500, environment=sliced)
    steps = [(Step((Prefill(query, 0),), 2, 5),) for query in range(100, 3000, 100)]
    chosen = choose(Traffic("x", steps), settings, COST, 30)
    assert not chosen.outcome.compiled
    assert all(query % 1024 == 0 for _, query, context in chosen.prepared.prompts if query >= 1024 and not context)
