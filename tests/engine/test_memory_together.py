"""The memory options beside each other on one engine: no answer changes, and nothing reads what is not there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.hpu_process import run_on_card
from tests.engine.serving import Answer, Engine, answer_of, assert_same, greedy_params
from tests.engine.swap import ROOMY, Poisoned
from tests.engine.tiny_models import VOCAB
from vllm_gaudi_ucm.block_policies.compaction.free_runs import FreeRuns
from vllm_gaudi_ucm.observability.phase_log import read_phase_log
from vllm_gaudi_ucm.protocol.memory_orders import memory_orders_of

pytestmark = pytest.mark.slow  # starts engines

RNG = random.Random(21)
BLOCK = 16
SWAPPED: dict[str, Any] = {"preemption": {"mode": "swap", "host_memory": ROOMY}}
ALL: dict[str, Any] = {**SWAPPED, "kv_cache": {"partial_hits": True, "compaction": True}}
OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 40, "max_num_seqs": 8}
SMALL: dict[str, Any] = {**OPTIONS, "num_gpu_blocks_override": 29}


def tokens(count: int) -> list[int]:
    return [RNG.randrange(3, VOCAB) for _ in range(count)]


COMMON = tokens(2 * BLOCK + 5)
PROMPTS = [tokens(RNG.randint(5, 90)) if index % 2 else COMMON + tokens(RNG.randint(1, 30)) for index in range(12)]
LENGTHS = [RNG.choice([6, 6, 6, 50, 60]) for _ in range(40)]
LENGTHS[8:20] = [60] * 12  # many long ones after many short ones
MOST = 70
ALIKE = [COMMON + tokens(1 + index % 5) for index in range(8)]


class Watched(Poisoned):
    """Looks at all that knows blocks after each step; nothing is left in a free block that nobody may find."""

    def check(self) -> None:
        super().check()
        queue = self.core.scheduler.kv_cache_manager.block_pool.free_block_queue
        if isinstance(queue, FreeRuns):
            queue.check_integrity()

    def served(self, rng: random.Random | None = None, count: int = len(LENGTHS)) -> dict[int, Answer]:
        """Answers of the first `count` requests, by their number. All ask for MOST tokens, and get as many as LENGTHS
        says, of which the scheduler knows nothing before; with `rng` some are aborted."""
        found: dict[int, Answer] = {}
        aborted: set[int] = set()
        number = step = 0
        engine = self.llm.llm_engine
        while number < count or engine.has_unfinished_requests():
            if step % 4 == 0 and number < count:
                self.add(str(number), PROMPTS[number % len(PROMPTS)], greedy_params(MOST))
                number += 1
            for request in self.core.scheduler.requests.values():
                length = LENGTHS[int(request.request_id.partition("-")[0])]
                if request.num_output_tokens == length - 1:
                    request.max_tokens = length
            for output in self.step():
                if output.finished and int(output.request_id) not in aborted:
                    found[int(output.request_id)] = answer_of(output)
            live = [int(one.partition("-")[0]) for one in self.core.scheduler.requests]
            if rng is not None and live and rng.random() < 0.03:
                aborted.add(victim := rng.choice(live))
                engine.abort_request([str(victim)])
                self.check()
            step += 1
        self.check_all_free()
        return found


@pytest.fixture(scope="module")
def wanted(tiny_llama: Path) -> Iterator[list[Answer]]:
    """With room for all."""
    with Engine(tiny_llama, **OPTIONS) as engine:
        longest = engine.greedy(PROMPTS, max(LENGTHS))
        yield [longest[number % len(PROMPTS)].first(length) for number, length in enumerate(LENGTHS)]


def assert_answers(found: dict[int, Answer], wanted: list[Answer]) -> None:
    assert_same(list(found.values()), [wanted[number] for number in found], near_ties=2)


def test_swap(tiny_llama: Path, wanted: list[Answer]) -> None:
    """A preempted request comes back from host memory."""
    with Watched(tiny_llama, SWAPPED, **SMALL) as engine:
        found = engine.served()
        assert len(found) == len(LENGTHS)
        assert_answers(found, wanted)
        totals = engine.totals
        assert engine.preemptions
        assert totals.swapped_in
        assert totals.recomputed_tokens == 0


def test_exact_admission_with_copies_and_moves(tiny_llama: Path, wanted: list[Answer]) -> None:
    """Blocks that are copied or move change nothing in the promise that no request is preempted."""
    with Watched(tiny_llama, {**ALL, "scheduler": {"admission": "exact"}}, **SMALL) as engine:
        found = engine.served()
        assert len(found) == len(LENGTHS)
        assert_answers(found, wanted)
        assert engine.totals.admission_waits
        assert engine.preemptions == 0


def test_all_of_them_with_aborts(tiny_llama: Path, wanted: list[Answer], tmp_path: Path) -> None:
    """And the phase log has what their orders were."""
    log = tmp_path / "phases.jsonl"
    with Watched(tiny_llama, {**ALL, "phase_log": str(log)}, **SMALL) as engine:
        found = engine.served(random.Random(0))
        assert len(found) > len(LENGTHS) / 2
        assert_answers(found, wanted)
        totals = engine.totals
        assert min(totals.copies, totals.moves, totals.swapped_in, engine.preemptions) > 0
    steps = read_phase_log(log)[1]
    assert sum(step.copied_blocks for step in steps) == totals.copies
    assert sum(step.moved_blocks for step in steps) == totals.moves
    assert sum(step.swapped_in_blocks for step in steps) == totals.swapped_in
    # what leaves for a request that is aborted in the same step is not copied
    assert 0 < sum(step.swapped_out_blocks for step in steps) <= totals.swapped_out


def on_the_card(model: str) -> dict[str, Any]:
    """The same requests on the simulated card, without NaN: that would be recipes of the test."""
    graphs = {"max_graphs": 3, "warm_up": "full"}
    with Engine(Path(model), {**ALL, "graphs": graphs}, **SMALL) as engine:
        from habana_frameworks.torch.simulator import card

        engine.greedy([[5, 6, 7]], 4)
        warm = card.compilations
        orders: list[int] = []
        memory = engine.runner.parts.memory
        assert memory is not None
        begin_step = memory.begin_step

        def counting(scheduler_output: Any) -> Any:
            orders.append(len(scheduler_output.kv_cache_block_copies or ()))
            found = memory_orders_of(scheduler_output)
            orders.extend([] if found is None else [len(moves) for moves in found.moves])
            return begin_step(scheduler_output)

        memory.begin_step = counting  # type: ignore[method-assign]
        answers = engine.staggered(ALIKE, [0] + [6] * (len(ALIKE) - 1), 48)
        totals = engine.core.scheduler.block_policies.totals
        return {
            "tokens": [answer.tokens for answer in answers],
            "compiled": card.compilations - warm,
            "together": max(orders),
            "least": min(totals.copies, totals.moves, totals.swapped_in),
        }


def test_all_of_them_on_the_simulated_card(tiny_llama: Path, tmp_path: Path) -> None:
    """No number of blocks that are copied together is a new recipe."""
    with Engine(tiny_llama, **OPTIONS) as engine:
        wanted = [answer.tokens for answer in engine.greedy(ALIKE, 48)]
    found = run_on_card(on_the_card, tmp_path, model=str(tiny_llama)).result
    assert found["tokens"] == wanted
    assert found["least"] > 0
    assert found["together"] > 1
    assert found["compiled"] == 0


def test_all_of_them_at_static_shapes(tiny_llama: Path, wanted: list[Answer]) -> None:
    graphs = {"mode": "eager", "max_graphs": 7, "warm_up": "full", "recipe_check": "fail"}
    with Watched(tiny_llama, {**ALL, "graphs": graphs}, **SMALL) as engine:
        found = engine.served(count=24)
        assert len(found) == 24
        assert_answers(found, wanted)
        totals = engine.totals
        assert min(totals.copies, totals.moves, totals.swapped_in) > 0
