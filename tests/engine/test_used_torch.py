"""`LLM(...)` in a process that has computed with torch before, as every comparison with another engine has."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.contracts import v2_without_driver
from tests.engine.hpu_process import run_apart
from tests.engine.serving import TINY_OPTIONS, greedy_params
from tests.engine.tiny_models import make_config, make_model

pytestmark = pytest.mark.slow  # starts engines

SECONDS = 150
# vLLM's default: the engine has a process of its own
USER = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_GAUDI_UCM_DEVICE": "cpu", "OMP_NUM_THREADS": "2"}


def compute_then_serve(model: str) -> list[Any]:
    """Threads that a computation has left in this process, and tokens of an engine that was started afterwards.

    Then everything is cleaned up, as vLLM's examples do it, in this process, which has no worker.
    """
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    before = len(os.listdir("/proc/self/task")) - threading.active_count()
    # not by the variable: this process was forked from one in which torch has read it
    torch.set_num_threads(2)
    torch.rand(1024, 1024).exp_()
    after = len(os.listdir("/proc/self/task")) - threading.active_count()
    with v2_without_driver():
        llm = LLM(**{**TINY_OPTIONS, "model": model})
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], greedy_params(4), use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    return [after - before, list(output.outputs[0].token_ids)]


def test_a_process_that_has_computed(tmp_path: Path, in_process: None) -> None:
    """A forked engine sleeps for ever in its first parallel region, here the table of rotary angles. covers: F1"""
    config = make_config("llama", max_position_embeddings=1 << 15)
    model = make_model(tmp_path / "llama", config)
    threads, tokens = run_apart(compute_then_serve, tmp_path, USER, SECONDS, model=str(model)).result
    assert threads > 0, "no parallel region has run in the parent"
    assert len(tokens) == 4
