"""The KV cache: its budget, and the two tensors of each attention layer."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_gaudi_ucm.kv_cache.pair import KvPair
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.vllm_api.kv_cache import AttentionSpec, KVCacheConfig, KVCacheSpec, layer_specs
from vllm_gaudi_ucm.vllm_api.model import AttentionLayerBase

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.device.base import Device

_POPULATE_WRITE = 23  # of madvise, Linux 5.14: pages as if they had been written, values as they are
_PIECE = 4 << 20  # bytes provided per call, so that the thread ends soon after the memory is no longer wanted
_LOWEST_PRIORITY = 19
_PAUSE_SECONDS = 0.05


def zeroed_pages(size: int, may_provide: Callable[[], bool] = lambda: True) -> torch.Tensor:
    """Zeros, int8 [size], whose pages a thread of lowest priority provides while the engine is idle.

    Why: writing zeros to a KV cache of 4 GiB took 4 to 10 of the 23 seconds of a start, and most of such a cache is not
    used soon. A page that is written before the thread came to it costs a page fault then.

    may_provide: asked before every piece. Lowest priority alone is not enough where every core has a thread that
        computes: one that waits for the others waits for the kernel's zeros, and decode steps of 17 ms took 27.
    """
    if size == 0:
        return torch.zeros(0, dtype=torch.int8)
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # a decode reads runs of some hundred KB: 51 GB/s in place of 32 of two threads of a Zen 5
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    zeros = torch.frombuffer(pages, dtype=torch.int8)
    arguments = (weakref.ref(pages), zeros.data_ptr(), size, may_provide)
    threading.Thread(target=_provide, args=arguments, name="ucm-pages", daemon=True).start()
    return zeros


def _provide(pages: weakref.ref[mmap.mmap], address: int, size: int, may_provide: Callable[[], bool]) -> None:
    """Ends once all pages are there, the memory is unused, or the kernel refuses; then first writes provide pages."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    # unlike mmap's own method this lets other threads run meanwhile
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start in range(0, size, _PIECE):
        while not may_provide():
            time.sleep(_PAUSE_SECONDS)
            if pages() is None:
                return
        held = pages()
        if held is None or madvise(address + start, min(_PIECE, size - start), _POPULATE_WRITE):
            return
        del held


# vLLM's block pool keeps block 0 for itself (the null block) and never hands it to a request: pads point at it.
DUMMY_BLOCK = 0


class _Rows(NamedTuple):
    """Of keys or of values of a layer: [slots, kv heads, head size]."""

    shape: tuple[int, int, int]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        slots, heads, size = self.shape
        return slots * heads * size * self.dtype.itemsize


def _rows(name: str, spec: KVCacheSpec, num_blocks: int) -> tuple[_Rows, _Rows]:
    """Of keys and of values, which take all bytes of a page and no more."""
    assert isinstance(spec, AttentionSpec), "only layers with keys and values are served"
    slots, heads = num_blocks * spec.block_size, spec.num_kv_heads
    key, value = (_Rows((slots, heads, size), spec.dtype) for size in (spec.head_size, spec.head_size_v))
    found, expected = key.nbytes + value.nbytes, num_blocks * spec.unpadded_page_size_bytes
    if found != expected:
        raise ValueError(
            f"KV cache of the layer {name}: keys and values take {found} bytes, vLLM expects {expected}; "
            "only plain keys and values are served, so leave --kv-cache-dtype at auto"
        )
    return key, value


def allocate_kv_cache(
    config: KVCacheConfig, device: torch.device, is_idle: Callable[[], bool] = lambda: True
) -> dict[str, KvPair]:
    """Allocates keys and values of each layer, by its name.

    The dummy block is all zeros at first, so that reading it is harmless even before anything was written.

    is_idle: whether pages of the host may be provided now; see `zeroed_pages`.
    """
    rows = {name: _rows(name, spec, config.num_blocks) for name, spec in layer_specs(config).items()}
    if device.type != "cpu":
        return {name: KvPair(_zeros(key, device), _zeros(value, device)) for name, (key, value) in rows.items()}
    tensors = _on_host([one for both in rows.values() for one in both], is_idle)
    return {name: KvPair(next(tensors), next(tensors)) for name in rows}


def _zeros(rows: _Rows, device: torch.device) -> torch.Tensor:
    return torch.zeros(rows.shape, dtype=rows.dtype, device=device)


_PAGE = 4096


def _on_host(all_rows: Sequence[_Rows], is_idle: Callable[[], bool]) -> Iterator[torch.Tensor]:
    """Tensors of storages of their own, which lie in one piece of memory, so that one thread provides its pages."""
    sizes = [-(-rows.nbytes // _PAGE) * _PAGE for rows in all_rows]
    pages, offset = zeroed_pages(sum(sizes), is_idle).numpy(), 0
    for rows, size in zip(all_rows, sizes, strict=True):
        if not rows.nbytes:
            yield _zeros(rows, torch.device("cpu"))
            continue
        storage = torch.frombuffer(pages, dtype=rows.dtype, count=rows.nbytes // rows.dtype.itemsize, offset=offset)
        # not a view of anything, which a compiled graph that writes it would be told
        yield torch.empty(0, dtype=rows.dtype).set_(storage.untyped_storage()).resize_(rows.shape)
        offset += size


def dummy_kv_cache(specs: Mapping[str, KVCacheSpec], device: torch.device) -> dict[str, KvPair]:
    """A cache of the dummy block alone for each layer, in the layout of the real one."""
    rows = {name: _rows(name, spec, 1) for name, spec in specs.items()}
    return {name: KvPair(_zeros(key, device), _zeros(value, device)) for name, (key, value) in rows.items()}


def no_kv_cache(names: Iterable[str], device: torch.device) -> dict[str, KvPair]:
    """What is bound to the layers while there is no cache."""
    return {name: KvPair(torch.empty(0, device=device), torch.empty(0, device=device)) for name in names}


def attention_layers(vllm_config: VllmConfig) -> dict[str, AttentionLayerBase]:
    """The layers by name; they register themselves when the model is built."""
    context = vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in context.items() if isinstance(layer, AttentionLayerBase)}


def kv_cache_specs(vllm_config: VllmConfig) -> dict[str, KVCacheSpec]:
    """What each layer keeps per block."""
    specs = {name: layer.get_kv_cache_spec(vllm_config) for name, layer in attention_layers(vllm_config).items()}
    return {name: spec for name, spec in specs.items() if spec is not None}


def bind_kv_caches(vllm_config: VllmConfig, caches: Mapping[str, KvPair]) -> None:
    """Gives each layer its cache, which vLLM's layer hands on to `UnifiedAttentionImpl.forward` as it is."""
    layers = attention_layers(vllm_config)
    for name, cache in caches.items():
        layers[name].bind_kv_cache(cache)  # type: ignore[arg-type]  # vLLM's own layer stores it unseen


logger = plugin_logger(__name__)

GIB = 1 << 30
# A CPU's memory belongs to everybody on the machine: take what a demo or a test needs, and more only when asked.
CPU_DEFAULT = 4 * GIB


def kv_cache_budget(device: Device, vllm_config: VllmConfig, measure_steps: Callable[[], int]) -> int:
    """Bytes for the KV cache: `--kv-cache-memory-bytes` as given, else what the device has left.

    On an accelerator the memory that steps take beside the cache is taken off (`--gpu-memory-utilization` bounds the
    whole). On a CPU the default is 4 GiB or half of the free memory.

    measure_steps: runs the largest steps and returns the bytes to keep for them.
    """
    explicit = vllm_config.cache_config.kv_cache_memory_bytes
    free, total = device.memory()
    if explicit is not None:
        if explicit > free:
            raise ValueError(
                f"--kv-cache-memory-bytes {explicit}: only {free} bytes are free on {device.name()}; "
                f"give at most that, or free some memory"
            )
        return explicit
    if device.kind == "cpu":
        budget = min(CPU_DEFAULT, free // 2)
    else:
        kept = measure_steps()
        budget = free - kept - int(total * (1 - vllm_config.cache_config.gpu_memory_utilization))
        logger.info("%.2f GiB are kept for steps and their graphs", kept / GIB)
    logger.info("KV cache: %.2f GiB of %.2f GiB free on %s", budget / GIB, free / GIB, device.name())
    return max(budget, 0)
