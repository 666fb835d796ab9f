"""Sizes beyond the machine end the start with the option's name, before anything of that size is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm.config import KVTransferConfig

from tests.platform.features import save_config, start
from vllm_gaudi_ucm.device.host_limits import find_cores

FAR = "100TiB"
SPARSE = {"ucm_sparse_method": "GSA"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_config(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM", "llama")


def connector(**options: Any) -> dict[str, Any]:
    ours: dict[str, Any] = {
        "kv_connector": "UcmConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "vllm_gaudi_ucm.connector",
        "kv_connector_extra_config": {"store": {"kind": "memory"}, **options},
    }
    return {"kv_transfer_config": KVTransferConfig(**ours)}


def ucm(**options: Any) -> dict[str, Any]:
    return {"additional_config": {"ucm": options}}


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("ucm.preemption.host_memory", ucm(preemption={"mode": "swap", "host_memory": FAR})),
        ("ucm.preemption.host_memory", ucm(preemption={"mode": "auto", "host_memory": 10**30})),
        (
            "ucm.ucm_sparse_config.GSA.prefetch_cache_bytes",
            ucm(**SPARSE, ucm_sparse_config={"GSA": {"prefetch_cache_bytes": FAR}}),
        ),
        (
            "ucm.memory_mode.store.capacity",
            ucm(**SPARSE, memory_mode={"enabled": True, "store": {"kind": "memory", "capacity": FAR}}),
        ),
        ("kv_connector_extra_config.store.capacity", connector(store={"kind": "memory", "capacity": FAR})),
        ("kv_connector_extra_config.prefetch.prefetch_cache_bytes", connector(prefetch={"prefetch_cache_bytes": FAR})),
    ],
)
def test_host_memory(llama: Path, key: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{key}: found [\d.,e+]+ TiB, expected at most [\d.,]+ .iB, the memory of"):
        start(llama, **options)


@pytest.mark.parametrize("threads", [20000, 2**31, 10**30])
def test_threads(llama: Path, threads: int) -> None:
    cores = find_cores().machine
    with pytest.raises(ValueError, match=rf"ucm\.cpu\.threads: found {threads}, expected 1 to {cores}, the cores of"):
        start(llama, **ucm(cpu={"threads": threads}))
    start(llama, **ucm(cpu={"threads": cores}))


def test_what_is_not_used_is_not_compared(llama: Path) -> None:
    start(llama, **ucm(preemption={"host_memory": FAR}, ucm_sparse_config={"GSA": {"prefetch_cache_bytes": FAR}}))


def test_defaults_are_taken_as_they_fill(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with less memory than a default has starts."""
    small = psutil.virtual_memory()._replace(total=1 << 30, available=1 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: small)
    start(llama, **ucm(preemption={"mode": "swap"}))
    with pytest.raises(ValueError, match=r"host_memory: found 2 GiB, expected at most 1 GiB"):
        start(llama, **ucm(preemption={"mode": "swap", "host_memory": "2GiB"}))
