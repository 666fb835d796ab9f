"""Asynchronous scheduling with drafts: steps are scheduled before it is known how many drafts are right, and no token
changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.engine.async_drafts import ASKED, DRAFTED, NUM_DRAFTS, drafted_by
from tests.engine.async_traffic import (
    GROWING,
    MIX,
    STATIC,
    Found,
    Watched,
    any_traffic,
    assert_equal,
    check_stop_strings,
    params,
    start,
)
from tests.engine.tiny_models import make_config, make_model
from tests.speculation.oracle_proposer import OracleProposer
from vllm_gaudi_ucm.observability.phase_log import read_phase_log

pytestmark = pytest.mark.slow  # starts engines


@pytest.fixture(scope="module")
def synchronous(tiny_text_model: Path) -> Iterator[Watched]:
    """Without drafts."""
    with start(tiny_text_model, {}, is_async=False) as engine:
        yield Watched(engine)


@pytest.fixture(scope="module")
def expected(synchronous: Watched) -> list[list[Found]]:
    return synchronous.serve(MIX)


def test_every_kind_of_request_gets_its_tokens(tiny_text_model: Path, expected: list[list[Found]]) -> None:
    """Drafts of the model itself, right for greedy requests, and then as many as an oracle likes, wrong or right or
    none; grammars, seeds, logprobs, aborts, and a text to stop at. covers: A1 A3 A6 A8"""
    wanted = [expected[index] for index in DRAFTED]
    with start(tiny_text_model, {}, is_async=True, speculative_config=drafted_by(tiny_text_model)) as engine:
        assert engine.core.batch_queue_size == 2
        watched = Watched(engine)
        assert_equal(watched.serve(ASKED), wanted)
        check_stop_strings(engine, expected)
        assert watched.queued > 0.8 * watched.schedules
        texts = {tuple(MIX[index].prompt): expected[index][0].tokens for index in DRAFTED}
        texts |= {tuple(prompt): [] for prompt in ([1, 2, 3],)}
        engine.runner.parts.drafts.proposer = OracleProposer(texts, random.Random(4), wrong=0.5)
        assert_equal(watched.serve(ASKED), wanted)


def test_a_step_reads_the_device_once(tiny_text_model: Path, tmp_path: Path, expected: list[list[Found]]) -> None:
    """At static shapes the passes of the draft model wait for nothing, nor does the step that verifies what they
    gave."""
    log = tmp_path / "log.jsonl"
    graphs = {"graphs": {**STATIC["graphs"], "max_graphs": 8}}
    ucm, drafts = {**graphs, "phase_log": str(log)}, drafted_by(tiny_text_model)
    with start(tiny_text_model, ucm, is_async=True, speculative_config=drafts) as engine:
        outputs = engine.generate([[5, 6, 7], [8, 9]], params(max_tokens=21))
        assert [len(output.outputs[0].token_ids) for output in outputs] == [21, 21]
        records = len(read_phase_log(log)[1])
        assert_equal(Watched(engine).serve(ASKED[:7]), [expected[index] for index in DRAFTED[:7]])
    reads = [record.host_reads for record in read_phase_log(log)[1][:records]]
    # a prompt, and four tokens in each step
    assert reads == [1] * (1 + 20 // (NUM_DRAFTS + 1))


def test_preempted_requests(tiny_text_model: Path, tmp_path: Path, synchronous: Watched) -> None:
    """Beside drafts that are wrong, in a cache that is too small, with a shorter draft model. covers: A7"""
    vocabulary = AutoConfig.from_pretrained(tiny_text_model).vocab_size
    config = make_config("llama", num_hidden_layers=1, hidden_size=32, num_key_value_heads=1, vocab_size=vocabulary)
    drafts = {**drafted_by(make_model(tmp_path / "draft", config, seed=3)), "max_model_len": 64}
    grown, options = synchronous.serve(GROWING), {"num_gpu_blocks_override": 18, "max_model_len": 256}
    for model in (drafted_by(tiny_text_model), drafts):
        with start(tiny_text_model, {}, is_async=True, speculative_config=model, **options) as engine:
            watched = Watched(engine)
            assert_equal(watched.serve(GROWING), grown)
            assert engine.preemptions > 2


@pytest.mark.usefixtures("contract")
def test_any_traffic(tiny_text_model: Path, synchronous: Watched) -> None:
    """Requests of any kind and aborts at any time, while blocks move, are copied and leave. covers: A7 A8 A20"""
    traffic = any_traffic(10, 14)
    memory = {
        "kv_cache": {"compaction": True, "partial_hits": True},
        "preemption": {"mode": "swap", "host_memory": 4 << 20},
    }
    options = {"num_gpu_blocks_override": 20, "max_model_len": 256, "speculative_config": drafted_by(tiny_text_model)}
    with start(tiny_text_model, memory, is_async=True, **options) as engine:
        watched = Watched(engine)
        assert_equal(watched.serve(traffic), synchronous.serve(traffic))
        assert engine.preemptions
