"""`gaudi-ucm trace`: the simulated steps against the planner, the limits, the seed, the log."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_gaudi_ucm.batch.batch_plan import BatchInput, plan_batch
from vllm_gaudi_ucm.cli import main as cli
from vllm_gaudi_ucm.graphs.cost.specs import DEVICES, LLAMA_8B
from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, dominates, phase_string
from vllm_gaudi_ucm.observability.phase_log import read_phase_log
from vllm_gaudi_ucm_tools.traffic.simulation import MIXES, Simulation
from vllm_gaudi_ucm_tools.traffic.step import Scheduled, measure_step

COST = CostModel(DEVICES["gaudi2"], LLAMA_8B, 128)


class Recorded(Simulation):
    """Keeps the batches that it scheduled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.batches: list[list[Scheduled]] = []

    def _schedule(self) -> list[Scheduled]:
        self.batches.append(super()._schedule())
        return self.batches[-1]


def planned(batch: Sequence[Scheduled], block_size: int) -> tuple[Bucket, int, int]:
    """The step as the planner sees it, from block tables: (bucket, attention pairs with the cache, unique pairs)."""
    ids: dict[Any, int] = {}
    tables = []
    for entry in batch:
        blocks = -(-(entry.computed + entry.new) // block_size)
        keys = [(entry.prefix, k) if k < entry.depth else (id(entry.request), k, "own") for k in range(blocks)]
        tables.append([ids.setdefault(key, len(ids) + 1) for key in keys])
    table = np.zeros((len(batch), max(map(len, tables))), np.int32)
    for row, blocks_of_row in enumerate(tables):
        table[row, : len(blocks_of_row)] = blocks_of_row
    columns = (np.array([getattr(e, name) for e in batch], np.int32) for name in ("computed", "new", "tokens"))
    plan = plan_batch(BatchInput(*columns, (table,)), block_size)
    shared, unique = plan.shared, plan.unique
    phase = phase_string(plan.causal is not None, shared is not None, unique is not None)
    sizes = [0 if part is None else len(part.blocks) for part in (shared, unique)]
    context = sum(e.new * (e.computed if e.new > 1 else e.computed + 1) for e in batch)
    unique_pairs = 0 if unique is None else int((unique.hi - unique.lo).sum())
    return Bucket(phase, plan.num_rows, *sizes, len(plan.logits_rows)), context, unique_pairs


@pytest.mark.parametrize("mix", MIXES)
def test_simulated_steps_are_what_the_planner_would_plan(mix: str) -> None:
    simulation = Recorded(MIXES[mix], COST, seed=3)
    block_size = MIXES[mix].limits.block_size
    records = list(simulation.steps(300))
    for record, batch in list(zip(records, simulation.batches, strict=True))[::3]:
        bucket, context, unique_pairs = planned(batch, block_size)
        assert record.bucket == bucket
        assert record.shared_pairs + record.unique_pairs == context
        assert record.unique_pairs == unique_pairs


def test_a_step_of_every_kind_by_hand() -> None:
    """Two decodes share two of three prefix blocks, a prompt chunk uses the third as well."""
    batch = [
        Scheduled("a", 1, 2, 300, 1, 301),
        Scheduled("b", 1, 2, 260, 1, 261),
        Scheduled("c", 1, 3, 384, 100, 600),
    ]
    counts = measure_step(batch, 128)
    assert counts.bucket == Bucket("csu", 102, 3, 2, 2)
    assert (counts.requests, counts.prompts, counts.causal_pairs) == (3, 1, 5050)
    assert counts.unique_pairs == (301 - 256) + (261 - 256)
    assert counts.shared_pairs == 256 + 256 + 100 * 384


@pytest.mark.parametrize("mix", MIXES)
def test_steps_keep_within_the_limits_and_blocks_are_conserved(mix: str) -> None:
    """covers: A7."""
    limits = MIXES[mix].limits
    simulation = Simulation(MIXES[mix], COST, seed=1)
    for record in simulation.steps(1500):
        assert dominates(limits.maximum, record.bucket)
        assert limits.allows("c" in record.bucket.phase, *record.bucket.forward.sizes[:4])
    held = sum(request.held for request in simulation.running)
    prefixes = sum(prefix.blocks for prefix in simulation._prefixes)
    assert held + prefixes + simulation._free == limits.num_blocks - 1
    assert all(request.held == 0 for request in simulation.waiting)


def test_a_small_cache_preempts_and_still_answers() -> None:
    mix = MIXES["batch"]
    simulation = Recorded(mix, COST, seed=0)
    computed: dict[int, int] = {}
    restarts = 0
    for _ in simulation.steps(1200):
        for entry in simulation.batches[-1]:
            restarts += computed.get(id(entry.request), 0) > entry.computed
            computed[id(entry.request)] = entry.computed + entry.new
    assert restarts > 0


def run(*argv: str | Path) -> int:
    return cli.main([str(arg) for arg in argv])


def test_the_log_is_one_that_phases_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "chat.jsonl"
    assert run("trace", "--mix", "chat", "--steps", 400, "--seed", 5, "-o", log) == 0
    assert "400 steps of the mix chat" in capsys.readouterr().out
    header, records = read_phase_log(log)
    assert header["max_num_batched_tokens"] == 2048
    assert header["modelled"] is True
    assert [record.step for record in records] == list(range(400))
    assert run("phases", log, "--json") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 400


def test_the_seed_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = [tmp_path / name for name in ("a", "b", "c")]
    for log, seed in zip(logs, (1, 1, 2), strict=True):
        assert run("trace", "--mix", "agentic", "--steps", 200, "--seed", seed, "-o", log, "--json") == 0
    out = capsys.readouterr().out
    assert json.loads(out[: out.index("\n}\n") + 3])["steps"] == 200
    texts = [log.read_text() for log in logs]
    assert texts[0] == texts[1] != texts[2]


def test_bad_options_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("trace", "--mix", "chat", "--steps", 0, "-o", tmp_path / "x") == 2
    assert "--steps is 0" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert run("trace", "--mix", "chat", "--model", tmp_path, "-o", tmp_path / "x") == 2
    assert "no hidden_size" in capsys.readouterr().err
