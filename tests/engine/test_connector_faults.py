"""Our connector with a store that fails in every way: tokens are those without a store, and nothing waits for long."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig

from tests.connector.fault_store import FaultStore
from tests.engine.serving import Answer, Engine, assert_same, greedy_params
from tests.engine.tiny_models import VOCAB

BLOCK = 16
RNG = random.Random(21)


def tokens(count: int) -> list[int]:
    return [RNG.randrange(3, VOCAB) for _ in range(count)]


COMMON = tokens(64)
# aligned and not, shorter than a block, one block and a token, shared prefixes
PROMPTS = [tokens(5), tokens(16), tokens(17), tokens(96), COMMON + tokens(30), COMMON + tokens(16), COMMON]
STATIC = {"graphs": {"mode": "eager", "max_graphs": 16, "warm_up": "full", "recipe_check": "fail"}}
OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 6, "max_num_batched_tokens": 96}
OUTPUTS = 20


def transfer(**options: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="UcmConnector",
        kv_connector_module_path="vllm_gaudi_ucm.connector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "store": {"kind": "memory"},
            "load_deadline": 0.4,
            "lookup_deadline": 0.3,
            **options,
        },
    )


class Served:
    """An engine with the connector over a fault store; local prefix caching is off, so that hits come from the store."""

    def __init__(self, engine: Engine, store: FaultStore) -> None:
        self.engine = engine
        self.store = store
        assert engine.runner.transfer is not None
        connector: Any = engine.runner.transfer.connector
        self.worker = connector.worker_side
        self.scheduler = engine.core.scheduler.connector.scheduler_side

    def fill(self) -> None:
        """The store holds every block of the prompts and their answers."""
        self.store.heal()
        self.engine.greedy(PROMPTS, OUTPUTS)
        self.settle()

    def settle(self) -> None:
        """Nothing is left of any request, on the device, in the connector, or on its way to the store."""
        for _ in range(3):
            self.engine.step()
        assert self.worker.saver.flush(5.0)
        self.worker.saver.check_integrity()
        self.worker.engine.check_integrity()
        assert self.worker.num_loading == 0
        assert self.scheduler.num_requests == 0
        self.engine.check_idle()


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[Answer]:
    with Engine(tiny_llama, **OPTIONS) as engine:
        return engine.greedy(PROMPTS, OUTPUTS)


@pytest.fixture(scope="module", params=[{}, STATIC], ids=["true shapes", "static"])
def served(tiny_llama: Path, expected: list[Answer], request: pytest.FixtureRequest) -> Iterator[Served]:
    store = FaultStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm_gaudi_ucm.connector.setup.open_store", lambda options, block_bytes: store)
        with Engine(
            tiny_llama, request.param, kv_transfer_config=transfer(), enable_prefix_caching=False, **OPTIONS
        ) as engine:
            yield Served(engine, store)
            store.heal()


def hits(answers: list[Answer]) -> list[int]:
    return [answer.cached_tokens for answer in answers]


ALL_HIT = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]


def test_a_filled_store_takes_the_place_of_prefill(served: Served, expected: list[Answer]) -> None:
    served.store.clear()
    served.scheduler.known.clear()
    first = served.engine.greedy(PROMPTS, OUTPUTS)
    served.settle()
    assert_same(first, expected)
    second = served.engine.greedy(PROMPTS, OUTPUTS)
    served.settle()
    assert_same(second, expected)
    assert hits(second) == ALL_HIT
    # the answers' blocks are there, too, and none was stored twice
    whole = served.engine.greedy([PROMPTS[3] + expected[3].tokens], 1)
    assert hits(whole) == [(96 + OUTPUTS - 1) // BLOCK * BLOCK]
    assert len(served.store.saved) == len(set(served.store.saved)) == len(served.store.blocks)
