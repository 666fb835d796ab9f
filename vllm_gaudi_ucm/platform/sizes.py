"""Compares sizes in options with the machine before memory of that size is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from vllm_gaudi_ucm.config.ucm_config import ROOT, UcmConfig
from vllm_gaudi_ucm.connector.transfer_config import OURS, ConnectorOptions, configured_connectors
from vllm_gaudi_ucm.decisions.step_memory import GIB
from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError
from vllm_gaudi_ucm.options.values import show_bytes
from vllm_gaudi_ucm.store.memory import MemoryStoreOptions

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

    from vllm_gaudi_ucm.options.section import Section
    from vllm_gaudi_ucm.vllm_api.kv_cache import KVCacheConfig


class Host(NamedTuple):
    """The sizes of a machine. cores: all of them. memory: bytes, within the limit of the process."""

    cores: int
    memory: int


def check_host_sizes(config: UcmConfig, transfer: KVTransferConfig | None, host: Host) -> None:
    """Compares threads and host memory with the machine. Defaults are taken as they fill, and not compared.

    transfer: with valid options. Raises UcmConfigError.
    """
    found = []
    threads = config.cpu.threads
    if threads is not None and threads > host.cores:
        expected = f"1 to {host.cores}, the cores of this machine; more threads slow each other down"
        found.append(Problem(f"{ROOT}.cpu.threads", str(threads), expected))
    for key, section, name in _of_host_memory(config, transfer):
        asked = getattr(section, name)
        if name in section.model_fields_set and asked > host.memory:
            expected = f"at most {show_bytes(host.memory)}, the memory of the host"
            found.append(Problem(f"{key}.{name}", show_bytes(asked), expected))
    if found:
        raise UcmConfigError(found)


def _of_host_memory(config: UcmConfig, transfer: KVTransferConfig | None) -> Iterator[tuple[str, Section, str]]:
    """The options in use that are bytes of host memory: key of the section, the section, name."""
    if config.preemption.swaps:
        yield f"{ROOT}.preemption", config.preemption, "host_memory"
    if config.memory_mode.enabled and isinstance(config.memory_mode.store, MemoryStoreOptions):
        yield f"{ROOT}.memory_mode.store", config.memory_mode.store, "capacity"
    if config.ucm_sparse_method is not None:
        for name in sorted(config.ucm_sparse_config.used_by(config.ucm_sparse_method)):
            options = config.ucm_sparse_config.options(name)
            if "prefetch_cache_bytes" in type(options).model_fields:
                yield f"{ROOT}.ucm_sparse_config.{name}", options, "prefetch_cache_bytes"
    for connector in configured_connectors(transfer):
        if connector.name == OURS:
            ours = ConnectorOptions.resolve(connector.extra, connector.key)
            yield f"{connector.key}.prefetch", ours.prefetch, "prefetch_cache_bytes"
            if isinstance(ours.store, MemoryStoreOptions):
                yield f"{connector.key}.store", ours.store, "capacity"


def check_device_sizes(config: UcmConfig, memory: int) -> None:
    """Compares memory of the device that options ask for with all that it has.

    memory: bytes. Raises UcmConfigError.
    """
    graphs = config.graphs
    asked = {
        name: getattr(graphs, name) for name in ("memory_budget", "step_memory") if name in graphs.model_fields_set
    }
    found = [
        Problem(f"{ROOT}.graphs.{name}", f"{gib:g} GiB", f"at most {show_bytes(memory)}, the memory of the device")
        for name, gib in asked.items()
        if gib is not None and gib * GIB > memory
    ]
    if found:
        raise UcmConfigError(found)


def check_kv_cache(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig, config: UcmConfig, memory: int) -> None:
    """Compares a number of blocks or slots with all memory of the device, before they are allocated.

    `--kv-cache-memory-bytes` is compared with what is free, by `kv_cache_budget`.

    memory: bytes. Raises UcmConfigError.
    """
    size = sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors)
    key, asked = f"{ROOT}.kv_cache.max_total_token_num", config.kv_cache.max_total_token_num
    if asked is None:
        key, asked = "--num-gpu-blocks-override", vllm_config.cache_config.num_gpu_blocks_override
    if asked is None or size <= memory:
        return
    most = f"at most {asked * memory // size}, which take the {show_bytes(memory)} of the device"
    raise UcmConfigError([Problem(key, str(asked), most)])
