"""Helpers of `test_nixl.py`: two engines in one process, the second of which reads what the first has computed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.envs import disable_envs_cache

from tests.engine.serving import Answer, Engine, answer_of
from tests.ports import free_port

PATIENCE = 30.0


def nixl(role: str = "kv_both", **options: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector="NixlConnector", kv_role=role, **options)


def new_side_channel(patch: pytest.MonkeyPatch) -> None:
    """The next engine listens for the handshake on a port of its own."""
    # an engine that runs has made vLLM read its environment once
    disable_envs_cache()
    patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))


def params(max_tokens: int, transfer: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, logprobs=2, ignore_eos=True, extra_args={"kv_transfer_params": transfer}
    )


def prefill(engine: Engine, prompt: Sequence[int]) -> dict[str, Any]:
    """Computes a prompt, and returns what another engine must know to read its blocks."""
    (output,) = engine.generate([prompt], params(1, {"do_remote_decode": True}))
    assert output.kv_transfer_params is not None
    return dict(output.kv_transfer_params)


@dataclass(frozen=True)
class Decoded:
    """An answer, and the number of tokens that the engine has computed for it."""

    answer: Answer
    computed: int


def decode(
    engine: Engine, prompt: Sequence[int], transfer: dict[str, Any], max_tokens: int, *others: Engine
) -> Decoded:
    """Answers a prompt whose blocks another engine has. others: engines that run at the same time."""
    name, end, computed = engine.new_id(), time.monotonic() + PATIENCE, 0
    scheduler = engine.core.scheduler
    schedule = scheduler.schedule

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal computed
        step = schedule(*args, **kwargs)
        computed += step.total_num_scheduled_tokens
        return step

    scheduler.schedule = counted
    try:
        engine.add(name, prompt, params(max_tokens, transfer))
        while time.monotonic() < end:
            for other in others:
                other.step()
            found = [output for output in engine.step() if output.request_id == name and output.finished]
            if found:
                return Decoded(answer_of(found[0]), computed)
    finally:
        scheduler.schedule = schedule
    raise TimeoutError(f"the request {name} has no answer after {PATIENCE} s")


def finish_steps(engine: Engine) -> None:
    """Runs steps until no block is held for another engine."""
    end = time.monotonic() + PATIENCE
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    while pool.get_num_free_blocks() < pool.num_gpu_blocks - 1 and time.monotonic() < end:
        engine.core.step_fn()
        engine.step()
    engine.check_idle()
