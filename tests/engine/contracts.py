"""The two contracts between vLLM's scheduler and a worker: engines of these tests run under either, on any device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from vllm.envs import disable_envs_cache

SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
CONTRACTS = ("V1", "V2")
"""V1: resumed requests come as cached ones. V2: they come as new ones, and all new ones carry all their tokens; vLLM's
default wherever Triton has a driver, but the plugin asks for V1."""


@contextmanager
def runner_contract(name: str) -> Iterator[None]:
    """Engines that are started within have this contract."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, str(int(name == "V2")))
        # what an engine has read of the environment outlives it
        disable_envs_cache()
        with v2_without_driver():
            yield
    disable_envs_cache()


@contextmanager
def v2_without_driver() -> Iterator[None]:
    """Has vLLM start with V2 if the environment asks for it. It would refuse without a driver for Triton, which its own
    runner needs."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get(SWITCH) == "1":
            patch.setattr("vllm.config.vllm.HAS_TRITON", True)
        yield
