"""When an engine with our connector stores blocks: not while it computes, and all of them soon after."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from tests.connector.fault_store import FaultStore
from tests.engine.serving import Engine, assert_same
from tests.engine.tiny_models import VOCAB
from vllm_gaudi_ucm.device.step_activity import STEPS

pytestmark = pytest.mark.slow  # starts engines

RNG = random.Random(47)
PROMPTS = [[RNG.randrange(3, VOCAB) for _ in range(count)] for count in (40, 150, 97)]
OUTPUTS = 20
# blocks that are full before the last token of the answer, which is not computed
BLOCKS = sum((len(prompt) + OUTPUTS - 1) // 16 for prompt in PROMPTS)
OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 6, "max_num_batched_tokens": 64}


@pytest.fixture
def served(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, FaultStore, Any]]:
    """An engine whose blocks wait for a minute, its store, and the connector's side in the worker."""
    store = FaultStore()
    monkeypatch.setattr("vllm_gaudi_ucm.connector.setup.open_store", lambda options, block_bytes: store)
    transfer = KVTransferConfig(
        kv_connector="UcmConnector",
        kv_connector_module_path="vllm_gaudi_ucm.connector",
        kv_role="kv_both",
        kv_connector_extra_config={"store": {"kind": "memory"}, "save_patience": 60},
    )
    with Engine(tiny_llama, kv_transfer_config=transfer, **OPTIONS) as engine:
        connector: Any = engine.runner.transfer and engine.runner.transfer.connector
        yield engine, store, connector.worker_side


def test_blocks_are_stored_after_the_steps(
    served: tuple[Engine, FaultStore, Any], tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """covers: C4. `save_patience`: an engine that does not rest stores nothing, one that rests stores everything."""
    engine, store, worker = served
    # by this clock no time passes: between two steps the engine is not idle, whatever else the machine does
    with monkeypatch.context() as patch:
        patch.setattr(STEPS, "_clock", lambda: 0.0)
        found = engine.greedy(PROMPTS, OUTPUTS)
        assert store.saved == []
    end = time.monotonic() + 60
    while len(store.saved) < BLOCKS and time.monotonic() < end:
        time.sleep(0.001)
    assert len(store.saved) == BLOCKS
    worker.saver.check_integrity()
    with Engine(tiny_llama, **OPTIONS) as other:
        assert_same(found, other.greedy(PROMPTS, OUTPUTS))


def test_blocks_that_a_prompt_wants_are_stored_at_once(
    served: tuple[Engine, FaultStore, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine does not rest, and the prefix cache has lost the blocks: the prompt waits until they are stored."""
    engine, store, _ = served
    monkeypatch.setattr(STEPS, "_clock", lambda: 0.0)
    monkeypatch.setattr("vllm_gaudi_ucm.connector.lookup.SAVES_SECONDS", 60.0)
    found = engine.alone(PROMPTS[1:2], OUTPUTS)
    assert store.saved == []
    engine.poison()
    engine.llm.reset_prefix_cache()
    again = engine.alone(PROMPTS[1:2], OUTPUTS)
    assert_same(again, found)
    assert again[0].cached_tokens == len(PROMPTS[1]) // 16 * 16


def test_an_engine_in_a_step_is_not_idle(
    served: tuple[Engine, FaultStore, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _, worker = served
    seen: list[bool] = []
    read = worker.blocks.read

    def note(blocks: Any) -> None:
        seen.append(STEPS.is_idle())
        read(blocks)

    monkeypatch.setattr(worker.blocks, "read", note)
    monkeypatch.setattr(STEPS, "_clock", lambda: time.monotonic() * 1e6)  # hours between two steps
    engine.greedy(PROMPTS, OUTPUTS)
    assert seen
    assert not any(seen)
    assert STEPS.is_idle()
