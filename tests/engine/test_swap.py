"""`ucm.preemption.mode`: preempted requests come back from host memory; no answer changes, and less is computed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.hpu_process import run_on_card
from tests.engine.serving import Answer, Engine, answer_of, assert_same, greedy_params
from tests.engine.swap import (
    ARRIVALS,
    BLOCK,
    COMMON,
    LENGTH,
    PROMPTS,
    SMALL,
    Poisoned,
    assert_swapped,
    preemption,
    tokens,
)
from vllm_gaudi_ucm.options.errors import UcmConfigError, UnsupportedFeatureError
from vllm_gaudi_ucm.protocol.memory_orders import LinkSpeed

pytestmark = pytest.mark.slow  # starts engines


@pytest.fixture(scope="module")
def wanted(tiny_llama: Path) -> list[Answer]:
    """With room for all."""
    with Engine(tiny_llama, max_model_len=256) as engine:
        return engine.alone(PROMPTS, LENGTH)


# what is cheaper is chosen whatever the prefix cache holds
@pytest.mark.usefixtures("contract")
@pytest.mark.parametrize(
    ("mode", "caching"),
    [("swap", True), ("swap", False), ("auto", True)],
    ids=["swap-prefix cache", "swap-no prefix cache", "auto-prefix cache"],
)
def test_nothing_is_computed_again(tiny_llama: Path, wanted: list[Answer], mode: str, caching: bool) -> None:
    # so few that preemptions do not depend on when a step ends that runs while the next one is scheduled
    few = {**SMALL, "num_gpu_blocks_override": 18, "enable_prefix_caching": caching}
    with Poisoned(tiny_llama, preemption(mode), **few) as engine:
        assert_same(engine.staggered(PROMPTS, ARRIVALS, LENGTH), wanted)
        assert engine.preemptions > 5
        totals = engine.totals
        if mode == "swap":
            assert totals.recomputed_tokens == 0
            assert totals.swapped_in > 5
        assert totals.swap_refusals == 0
        rates = engine.swaps.cost.rates
        assert rates.are_known
        engine.check_all_free()


def test_parts_of_blocks_that_have_just_come_back_are_copied(tiny_llama: Path) -> None:
    """Partial hits of blocks that are copied in the step in which they come back."""
    asked = [COMMON[: 2 * BLOCK + 5] + tokens(1 + index % 7) for index in range(14)]
    with Engine(tiny_llama, max_model_len=256) as engine:
        wanted = engine.alone(asked, LENGTH)
    ucm = {**preemption("swap"), "kv_cache": {"partial_hits": True}}
    with Poisoned(tiny_llama, ucm, **{**SMALL, "max_model_len": 160, "num_gpu_blocks_override": 12}) as engine:
        answers = engine.staggered(asked, [2 * index for index in range(len(asked))], LENGTH)
        assert engine.totals.copies > 5
        assert_swapped(engine, answers, wanted)


def test_drafts(tiny_llama: Path, wanted: list[Answer]) -> None:
    """A resumed request with one token to compute is a decode, which vLLM pads with drafts of -1."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    with Poisoned(tiny_llama, preemption("swap"), **SMALL, speculative_config=drafts) as engine:
        assert_swapped(engine, engine.staggered(PROMPTS, ARRIVALS, LENGTH), wanted)


def test_a_draft_model(tiny_llama: Path, wanted: list[Answer]) -> None:
    """Its keys and values lie in the same blocks."""
    drafts = {"method": "draft_model", "model": str(tiny_llama), "num_speculative_tokens": 2}
    # Each draft is right, so requests end soon: in more blocks, two are preempted if the next step is scheduled while
    # one runs, as on a GPU.
    few = {**SMALL, "max_model_len": 160, "num_gpu_blocks_override": 14}
    with Poisoned(tiny_llama, preemption("swap"), **few, speculative_config=drafts) as engine:
        assert_swapped(engine, engine.staggered(PROMPTS, ARRIVALS, LENGTH), wanted)


def test_static_shapes(tiny_llama: Path, wanted: list[Answer]) -> None:
    ucm = {**preemption("swap"), "graphs": {"mode": "eager", "max_graphs": 12}}
    with Poisoned(tiny_llama, ucm, **SMALL) as engine:
        assert_swapped(engine, engine.staggered(PROMPTS, ARRIVALS, LENGTH), wanted)


@pytest.mark.parametrize("static", [False, True], ids=["true shapes", "static"])
def test_a_sparse_method(tiny_llama: Path, wanted: list[Answer], static: bool) -> None:
    """With a budget of all blocks; blocks that come back are summarised again."""
    windows = {
        "sparse_steps": "always",
        "min_tokens": 32,
        "local_window_sz": 1,
        "init_window_sz": 1,
        "min_blocks": 2,
        "sparse_ratio": 1.0,
    }
    ucm = {**preemption("swap"), "ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": windows}}
    if static:
        ucm["graphs"] = {"mode": "eager", "max_graphs": 12}
    with Poisoned(tiny_llama, ucm, **SMALL) as engine:
        answers = engine.staggered(PROMPTS, ARRIVALS, LENGTH)
        assert engine.runner.parts.sparse is not None
        state = engine.runner.parts.sparse.state
        assert state is not None
        assert state.totals.attended_blocks
        assert_swapped(engine, answers, wanted)


def test_priorities(tiny_llama: Path, wanted: list[Answer]) -> None:
    """vLLM preempts requests that the same step has scheduled already: only what was computed before is copied."""
    order = list(range(len(PROMPTS)))
    random.Random(3).shuffle(order)
    with Poisoned(tiny_llama, preemption("swap"), **SMALL, scheduling_policy="priority") as engine:
        finished: dict[str, Any] = {}
        for step in range(4000):
            for index in (i for i, arrival in enumerate(ARRIVALS) if arrival == step):
                prompt = {"prompt_token_ids": PROMPTS[index]}
                engine.llm.llm_engine.add_request(str(index), prompt, greedy_params(LENGTH), priority=order[index])
            finished.update((output.request_id, output) for output in engine.step() if output.finished)
            if len(finished) == len(PROMPTS):
                break
        assert_swapped(engine, [answer_of(finished[str(index)]) for index in range(len(PROMPTS))], wanted)


def test_room_for_two_blocks(tiny_llama: Path, wanted: list[Answer]) -> None:
    """Other requests are computed again, which is counted."""
    with Poisoned(tiny_llama, preemption("swap"), **SMALL) as engine:
        block_bytes = engine.swaps._block_bytes
    with Poisoned(tiny_llama, preemption("swap", host_memory=2 * block_bytes), **SMALL) as engine:
        assert_same(engine.staggered(PROMPTS, ARRIVALS, LENGTH), wanted)
        assert engine.totals.swap_refusals > 2
        assert engine.totals.recomputed_tokens > 0
        engine.check_all_free()


def test_auto_follows_what_was_measured(tiny_llama: Path, wanted: list[Answer]) -> None:
    for speed, swaps in ((LinkSpeed(1e15, 1e15), True), (LinkSpeed(1.0, 1.0), False)):
        with Poisoned(tiny_llama, preemption("auto"), **SMALL) as engine:
            engine.greedy([[5, 6, 7, 8]], 2)
            engine.swaps.cost.measured(speed)
            assert_same(engine.staggered(PROMPTS, ARRIVALS, LENGTH), wanted)
            assert engine.preemptions > 2
            assert (engine.totals.swapped_out > 0) == swaps
            assert (engine.totals.recomputed_tokens > 0) != swaps
            assert engine.totals.swap_refusals == 0
            engine.check_all_free()


@pytest.mark.usefixtures("contract")
@pytest.mark.parametrize("seed", range(2))
def test_random_aborts(tiny_llama: Path, wanted: list[Answer], seed: int) -> None:
    rng = random.Random(seed)
    with Poisoned(tiny_llama, preemption("swap"), **SMALL) as engine:
        finished: dict[str, Any] = {}
        aborted: set[str] = set()
        for number in range(3 * len(PROMPTS)):
            engine.add(str(number), PROMPTS[number % len(PROMPTS)], greedy_params(LENGTH))
            for _ in range(rng.randrange(8)):
                finished.update((output.request_id, output) for output in engine.step() if output.finished)
                waiting = [request.request_id for request in engine.core.scheduler.waiting]
                live = [*waiting, *engine.core.scheduler.requests]
                if live and rng.random() < 0.2:
                    victim = rng.choice(live).partition("-")[0]
                    aborted.add(victim)
                    engine.llm.llm_engine.abort_request([victim])
                    engine.check()
        while engine.llm.llm_engine.has_unfinished_requests():
            finished.update((output.request_id, output) for output in engine.step() if output.finished)
        kept = [number for number in range(3 * len(PROMPTS)) if str(number) in finished and str(number) not in aborted]
        assert kept
        assert aborted
        assert engine.totals.swapped_in > 5
        answers = [answer_of(finished[str(number)]) for number in kept]
        assert_same(answers, [wanted[number % len(PROMPTS)] for number in kept], near_ties=3)
        engine.check_all_free()


@pytest.mark.parametrize("running", [False, True], ids=["kept", "preempted too"])
def test_a_reset_of_the_prefix_cache_drops_what_is_in_host_memory(
    tiny_llama: Path, wanted: list[Answer], running: bool
) -> None:
    """What was computed may be wrong by then: other weights."""
    with Poisoned(tiny_llama, preemption("swap"), **SMALL) as engine:
        for number, prompt in enumerate(PROMPTS):
            engine.add(str(number), prompt, greedy_params(LENGTH))
        finished: dict[str, Any] = {}
        resets = 0
        while engine.llm.llm_engine.has_unfinished_requests():
            finished.update((output.request_id, output) for output in engine.step() if output.finished)
            held = engine.swaps._slots.count - engine.swaps._slots.num_free
            if held and resets < 2:
                is_reset = engine.core.scheduler.reset_prefix_cache(reset_running_requests=running)
                # requests that run keep their blocks, and those that wait theirs
                assert is_reset == running
                assert engine.swaps._slots.num_free == engine.swaps._slots.count - (0 if running else held)
                engine.check()
                resets += 1
        assert resets == 2
        assert_same([answer_of(finished[str(number)]) for number in range(len(PROMPTS))], wanted, near_ties=2)
        engine.check_all_free()


def test_prompt_logprobs_are_computed_again(tiny_llama: Path) -> None:
    """vLLM reads nothing from a cache for such a request."""
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, prompt_logprobs=1)
    with Engine(tiny_llama, max_model_len=256) as engine:
        wanted = [engine.generate([prompt], params)[0] for prompt in PROMPTS]
    with Poisoned(tiny_llama, preemption("swap"), **SMALL) as engine:
        found = engine.generate(PROMPTS, params)
        assert engine.preemptions > 5
        assert engine.totals.swapped_out == 0
        assert engine.totals.recomputed_tokens > 0
        engine.check_all_free()
    for one, other in zip(found, wanted, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert len(one.prompt_logprobs or ()) == len(other.prompt_logprobs or ())


def test_refused_by_name(tiny_llama: Path) -> None:
    mode = preemption("auto")
    memory_mode = {"ucm_sparse_method": "GSA", "memory_mode": {"enabled": True}}
    with pytest.raises(ValueError, match=r"ucm\.preemption\.mode: found 'auto', expected 'recompute' with ucm\.memory"):
        Engine(tiny_llama, {**mode, **memory_mode})
    with pytest.raises(UnsupportedFeatureError, match=r"ucm\.preemption\.mode with a scheduler of your own"):
        Engine(tiny_llama, mode, scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler")
    with pytest.raises(UnsupportedFeatureError, match=r"a KV connector with ucm\.preemption\.mode"):
        Engine(tiny_llama, mode, kv_offloading_size=1.0, kv_offloading_backend="native")
    with pytest.raises(UcmConfigError, match=r"ucm\.preemption\.host_memory: found 100 B, expected room for a block"):
        Engine(tiny_llama, preemption("swap", host_memory=100), **SMALL)


def swap_on_the_card(model: str) -> dict[str, Any]:
    """The same requests, on the simulated card."""
    ucm = {**preemption("swap"), "graphs": {"max_graphs": 4, "warm_up": "skeleton", "skeleton": 1}}
    with Poisoned(Path(model), ucm, **SMALL) as engine:
        answers = engine.staggered(PROMPTS[:8], ARRIVALS[:8], LENGTH)
        engine.check_all_free()
        totals = engine.totals
        return {
            "tokens": [answer.tokens for answer in answers],
            "swapped": totals.swapped_in,
            "again": totals.recomputed_tokens,
        }


def test_on_the_simulated_card(tiny_llama: Path, wanted: list[Answer], tmp_path: Path) -> None:
    found = run_on_card(swap_on_the_card, tmp_path, model=str(tiny_llama)).result
    assert found["tokens"] == [answer.tokens for answer in wanted[:8]]
    assert found["swapped"] > 2
    assert found["again"] == 0
