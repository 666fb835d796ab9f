"""The two contracts between vLLM's scheduler and a worker: engines of these tests run under either, on any device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from vllm.envs import disable_envs_cache

SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
CONTRACTS = ("V1", "V2")
"""V1: resumed requests come as cached ones. V2: they come as new ones, and all new ones carry all their tokens; vLLM's
default wherever Triton has a driver, so on every GPU."""


@contextmanager
def runner_contract(name: str) -> Iterator[None]:
    """Engines that are started within have this contract."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, str(int(name == "V2")))
        allow_without_driver(patch)
        # what an engine has read of the environment outlives it
        disable_envs_cache()
        yield
    disable_envs_cache()


def allow_without_driver(patch: pytest.MonkeyPatch) -> None:
    """vLLM refuses V2 without a driver for Triton, which its own runner needs and ours does not."""
    patch.setattr("vllm.config.vllm.HAS_TRITON", True)
