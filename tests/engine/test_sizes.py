"""Sizes beyond the device end the start with the option's name, before anything of that size is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.serving import Engine
from vllm_gaudi_ucm.device.cpu import host_memory
from vllm_gaudi_ucm.device.host_limits import Cgroup
from vllm_gaudi_ucm.options.errors import UcmConfigError

pytestmark = pytest.mark.slow


def ours(**options: Any) -> dict[str, Any]:
    return {"ucm": options}


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("ucm.graphs.memory_budget: found 1e+300 GiB", ours(graphs={"mode": "eager", "memory_budget": 1e300})),
        ("ucm.graphs.step_memory: found 1e+300 GiB", ours(graphs={"mode": "eager", "step_memory": 1e300})),
        (
            "ucm.kv_cache.max_total_token_num: found 1000000000",
            ours(kv_cache={"granularity": "token", "max_total_token_num": 10**9}),
        ),
        (
            f"ucm.kv_cache.max_total_token_num: found {10**30}",
            ours(kv_cache={"granularity": "token", "max_total_token_num": 10**30}),
        ),
        ("--num-gpu-blocks-override: found 1000000000", {"num_gpu_blocks_override": 10**9}),
    ],
)
def test_memory_of_the_device(tiny_llama: Path, key: str, options: dict[str, Any]) -> None:
    """A worker knows its device: it says so before it allocates."""
    assert host_memory(Cgroup()).total < 100 << 40
    with pytest.raises(UcmConfigError) as error:
        Engine(tiny_llama, **options)
    assert f"{key}, expected at most " in str(error.value)
