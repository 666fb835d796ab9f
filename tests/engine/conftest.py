"""Engines of these tests run in the test's own process, so that a test can look inside."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
import torch

from tests.connector.fault_store import FaultStore
from tests.engine.contracts import CONTRACTS, runner_contract
from tests.engine.serving import Engine
from tests.engine.tiny_models import make_config, make_model
from tests.import_heap import leave_out_collections
from tests.ports import port_of_ranks
from tests.warm_context import WarmContext


@pytest.fixture(scope="session", autouse=True)
def in_process() -> Iterator[None]:
    """All engines of the session share one world of size one, which must outlive each of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("HF_HUB_OFFLINE", "1")
        leave_out_collections()
        # each engine reads the metadata of all that is installed, and looks for a GPU's generator with a stack of texts
        patch.setattr("importlib.metadata.entry_points", cache(metadata.entry_points))
        if not torch.cuda.is_available():
            patch.setattr("torch.cuda.manual_seed_all", lambda seed: None)
        # of chat templates: without a tokenizer it fails, and what is logged of that keeps the engine alive
        patch.setattr("vllm.renderers.base.BaseRenderer.warmup", lambda self, chat_params: None)
        patch.setattr("vllm.v1.executor.multiproc_executor.get_mp_context", WarmContext)
        patch.setattr("vllm.utils.network_utils._get_open_port", port_of_ranks)
        yield
        from vllm.distributed import cleanup_dist_env_and_memory, model_parallel_is_initialized

        # not where the engines of all tests had processes of their own
        if model_parallel_is_initialized():
            cleanup_dist_env_and_memory()


@pytest.fixture(params=CONTRACTS)
def contract(request: pytest.FixtureRequest, in_process: None) -> Iterator[str]:
    """The test runs once under each contract of vLLM's scheduler."""
    with runner_contract(request.param):
        yield request.param


@pytest.fixture
def first_contract(in_process: None) -> Iterator[None]:
    """The test runs under V1 alone, whatever the environment says."""
    with runner_contract("V1"):
        yield


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory, in_process: None) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "llama", make_config("llama"))


@pytest.fixture
def fault_store(monkeypatch: pytest.MonkeyPatch) -> FaultStore:
    """The store of every connector that is made."""
    store = FaultStore()
    monkeypatch.setattr("vllm_gaudi_ucm.connector.setup.open_store", lambda options, block_bytes: store)
    return store


@pytest.fixture(scope="session")
def smol_engine(smollm2: Path, in_process: None) -> Iterator[Engine]:
    """The demo model, once for all tests that need real text."""
    with Engine(
        smollm2,
        skip_tokenizer_init=False,
        max_model_len=3072,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        block_size=32,
        kv_cache_memory_bytes=640 << 20,
        max_logprobs=20,
    ) as engine:
        yield engine
