"""Computes the budget of the KV cache, and allocates the tensors of each attention layer."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm_gaudi_ucm.kv_cache.pair import IndexedLatents, KvPair, LatentRows, LayerCache
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.ops.registry import has_folders
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.vllm_api.kv_cache import (
    AttentionSpec,
    IndexedLatentSpec,
    KVCacheConfig,
    KVCacheSpec,
    buffers,
    keep_split_chunks,
    keep_whole_contexts,
    layer_specs,
    num_whole_groups,
)
from vllm_gaudi_ucm.vllm_api.model import Attention, AttentionLayerBase, has_attention

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.device.base import Device

_POPULATE_WRITE = 23  # of madvise, Linux 5.14: pages as if they had been written, values as they are
_PIECE = 4 << 20  # bytes provided per call, so that the thread ends soon after the memory is no longer wanted
_LOWEST_PRIORITY = 19
_PAUSE_SECONDS = 0.05


def zeroed_pages(size: int, may_provide: Callable[[], bool] = lambda: True) -> torch.Tensor:
    """Returns zeros, int8 [size], whose pages a thread of lowest priority provides while the engine is idle.

    Why: writing zeros to a KV cache of 4 GiB took 4 to 10 of the 23 seconds of a start, and most of such a cache is not
    used soon. Writing a page that the thread has not reached yet costs a page fault.

    may_provide: called before every piece. Lowest priority alone is not enough if every core has a computing thread: a
        thread that waits for the others also waits for the kernel's zeros, and decode steps of 17 ms took 27.
    """
    if size == 0:
        return torch.zeros(0, dtype=torch.int8)
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # a decode reads runs of some hundred KB: two threads of a Zen 5 read 51 GB/s instead of 32
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    zeros = torch.frombuffer(pages, dtype=torch.int8)
    arguments = (weakref.ref(pages), zeros.data_ptr(), size, may_provide)
    threading.Thread(target=_provide, args=arguments, name="ucm-pages", daemon=True).start()
    return zeros


def _provide(pages: weakref.ref[mmap.mmap], address: int, size: int, may_provide: Callable[[], bool]) -> None:
    """Ends once all pages exist, the memory is unused, or the kernel refuses; first writes then provide the pages."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    # unlike mmap's own method, this lets other threads run in the meantime
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
    """Shape [slots, kv heads, head size] and dtype of one tensor of a layer."""

    shape: tuple[int, int, int]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        slots, heads, size = self.shape
        return slots * heads * size * self.dtype.itemsize


def _rows(name: str, spec: KVCacheSpec, num_blocks: int) -> tuple[_Rows, ...]:
    """Returns rows of keys and of values, which together fill a page exactly, or of keys that hold their values, alone
    or with keys of an indexer.
    """
    assert isinstance(spec, AttentionSpec), "only layers with keys and values are served"
    slots, heads = num_blocks * spec.block_size, spec.num_kv_heads
    # vLLM has one name for both kinds of 8-bit floats; only this one is supported
    dtype = torch.float8_e4m3fn if spec.dtype == torch.uint8 else spec.dtype
    rows = tuple(_Rows((slots, heads, size), dtype) for size in (spec.head_size, spec.head_size_v) if size)
    if isinstance(spec, IndexedLatentSpec):
        rows = (*rows, _Rows((slots, heads, spec.index_size), spec.index_dtype))
    found, expected = sum(one.nbytes for one in rows), num_blocks * spec.unpadded_page_size_bytes
    if found != expected:
        raise ValueError(
            f"KV cache of the layer {name}: keys and values take {found} bytes, vLLM expects {expected}; "
            "only plain keys and values are served, so take --kv-cache-dtype auto or fp8"
        )
    return rows


def _kind(spec: KVCacheSpec) -> type[LayerCache]:
    if isinstance(spec, IndexedLatentSpec):
        return IndexedLatents
    return LatentRows if isinstance(spec, AttentionSpec) and not spec.head_size_v else KvPair


# The lowest compute capability of GPUs that convert these floats.
_WITH_E4M3 = (8, 9)


def allocate_kv_cache(
    config: KVCacheConfig, device: torch.device, is_idle: Callable[[], bool] = lambda: True
) -> dict[str, LayerCache]:
    """Allocates keys and values of each layer, by its name. Layers of several groups share one memory, see `buffers`.

    The dummy block is all zeros at first, so that reading it is harmless even before the first write.

    is_idle: returns whether pages of the host may be provided now; see `zeroed_pages`.
    """
    specs = layer_specs(config)
    rows = {name: _rows(name, spec, config.num_blocks) for name, spec in specs.items()}
    narrow = any(one.dtype == torch.float8_e4m3fn for both in rows.values() for one in both)
    if narrow and device.type == "cuda" and torch.cuda.get_device_capability(device) < _WITH_E4M3:
        raise ValueError(
            f"a KV cache of 8-bit floats needs compute capability 8.9, {torch.cuda.get_device_name(device)} has less; "
            "take --kv-cache-dtype auto"
        )
    owners = buffers(config)
    for name, owner in owners.items():
        _check_alike(name, rows[name], owner, rows[owner])
    owned = {name: both for name, both in rows.items() if owners.get(name, name) == name}
    if device.type != "cpu":
        caches = {name: _kind(specs[name])(*(_zeros(one, device) for one in each)) for name, each in owned.items()}
    else:
        tensors = _on_host([one for each in owned.values() for one in each], is_idle)
        caches = {name: _kind(specs[name])(*(next(tensors) for _ in each)) for name, each in owned.items()}
    return {name: caches[owners.get(name, name)] for name in rows}


def _check_alike(name: str, rows: tuple[_Rows, ...], owner: str, owned: tuple[_Rows, ...]) -> None:
    """Checks that layers with one memory can share a tensor, because a Gaudi's graph does not write views in place."""
    if rows != owned:
        raise UnsupportedFeatureError(
            f"layers of different KV-cache groups whose keys and values differ in shape ({rows[0].shape} of {name}, "
            f"{owned[0].shape} of {owner}; take --disable-hybrid-kv-cache-manager)",
            "the model",
        )


def _zeros(rows: _Rows, device: torch.device) -> torch.Tensor:
    return torch.zeros(rows.shape, dtype=rows.dtype, device=device)


_PAGE = 4096


def _on_host(all_rows: Sequence[_Rows], is_idle: Callable[[], bool]) -> Iterator[torch.Tensor]:
    """Yields tensors with separate storages in one piece of memory, so that one thread provides its pages."""
    sizes = [-(-rows.nbytes // _PAGE) * _PAGE for rows in all_rows]
    pages, offset = zeroed_pages(sum(sizes), is_idle).numpy(), 0
    for rows, size in zip(all_rows, sizes, strict=True):
        if not rows.nbytes:
            yield _zeros(rows, torch.device("cpu"))
            continue
        storage = torch.frombuffer(pages, dtype=rows.dtype, count=rows.nbytes // rows.dtype.itemsize, offset=offset)
        # not a view: a compiled graph that writes it would see the base tensor
        yield torch.empty(0, dtype=rows.dtype).set_(storage.untyped_storage()).resize_(rows.shape)
        offset += size


def dummy_kv_cache(specs: Mapping[str, KVCacheSpec], device: torch.device) -> dict[str, LayerCache]:
    """Returns a cache of only the dummy block for each layer, in the layout of the real one."""
    rows = {name: _rows(name, spec, 1) for name, spec in specs.items()}
    return {name: _kind(specs[name])(*(_zeros(one, device) for one in each)) for name, each in rows.items()}


def no_kv_cache(names: Iterable[str], device: torch.device) -> dict[str, LayerCache]:
    """Returns the empty tensors that are bound to the layers while there is no cache."""
    return {name: KvPair(torch.empty(0, device=device), torch.empty(0, device=device)) for name in names}


def attention_layers(vllm_config: VllmConfig) -> dict[str, AttentionLayerBase]:
    """Returns the attention layers by name; they register themselves when the model is built."""
    context = vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in context.items() if isinstance(layer, AttentionLayerBase)}


def other_specs(vllm_config: VllmConfig) -> dict[str, KVCacheSpec]:
    """Returns what each layer without attention keeps, by its name: vLLM hands out no blocks for it."""
    layers = {name: one for name, one in attention_layers(vllm_config).items() if not has_attention(one)}
    specs = {name: one.get_kv_cache_spec(vllm_config) for name, one in layers.items()}
    return {name: spec for name, spec in specs.items() if spec is not None}


def kv_cache_specs(
    vllm_config: VllmConfig, *, choosing: bool = False, with_draft_model: bool = False
) -> dict[str, KVCacheSpec]:
    """Returns the cache spec of each layer; layers that read another layer's cache have none.

    choosing: whether a sparse method chooses blocks for layers that see whole contexts. It chooses among the blocks of
        one table, so windows keep all of their blocks if vLLM would otherwise make several groups of these layers.
    with_draft_model: whether there is a draft model, whose layers may have another shape than the model's. Such layers
        share no memory, so there is one table for all.
    """
    layers = attention_layers(vllm_config)
    own = {name: one for name, one in layers.items() if has_attention(one) and shared_with(one) is None}
    specs = {name: one.get_kv_cache_spec(vllm_config) for name, one in own.items()}
    found = {name: spec for name, spec in specs.items() if spec is not None}
    if not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        found = keep_split_chunks(found)
        if with_draft_model and len({_layer_shape(spec) for spec in found.values()}) > 1:
            why = "keys and values of the draft model have another shape than the model's"
        elif choosing and num_whole_groups(found) > 1:
            why = "more layers see whole contexts than windows, and a sparse method chooses among blocks of one table"
        else:
            return found
        whole = keep_whole_contexts(found, vllm_config.cache_config.block_size)
        if whole != found:
            logger.warning("One block table is kept for all layers, and windows keep all of their blocks: %s.", why)
        return whole
    return keep_whole_contexts(found, vllm_config.cache_config.block_size)


def _layer_shape(spec: KVCacheSpec) -> tuple[object, ...]:
    assert isinstance(spec, AttentionSpec), "only layers with keys and values are served"
    return spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.dtype


def shared_with(layer: AttentionLayerBase) -> str | None:
    """Returns the layer whose keys and values this one reads instead of its own; None if it has its own."""
    target: str | None = layer.kv_sharing_target_layer_name if isinstance(layer, Attention) else None
    return target


NO_CACHE: Any = torch.empty(0)
"""Bound to layers whose cache was given back."""


def bind_kv_caches(vllm_config: VllmConfig, caches: Mapping[str, LayerCache]) -> None:
    """Gives each layer its cache, which the layer passes on to its implementation unchanged."""
    layers = attention_layers(vllm_config)
    for name, cache in caches.items():
        layers[name].bind_kv_cache(cache)  # type: ignore[arg-type]  # vLLM's own layer stores it unread
    for layer in layers.values():
        if (target := shared_with(layer)) is not None:
            layer.bind_kv_cache(caches[target])  # type: ignore[arg-type]


logger = plugin_logger(__name__)

GIB = 1 << 30
# A CPU's memory is shared with all programs of the machine: take enough for a demo or a test, and more only on request.
CPU_DEFAULT = 4 * GIB


def kv_cache_budget(device: Device, vllm_config: VllmConfig, measure_steps: Callable[[], int], workers: int = 1) -> int:
    """Returns the bytes for the KV cache: `--kv-cache-memory-bytes` if given, otherwise the free memory of the device.

    On an accelerator the memory that steps need in addition to the cache is subtracted (`--gpu-memory-utilization`
    bounds the total). On a CPU the default is 4 GiB or half of the free memory, shared by all workers of a server on
    this machine.

    measure_steps: runs the largest steps and returns the bytes to keep for them.
    workers: number of workers of all engines of this server on this machine.
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
        budget = min(CPU_DEFAULT, free // 2) // workers
        if workers > 1:
            logger.info("KV cache: a share of the memory of this machine, which %d workers have together", workers)
    else:
        kept = measure_steps()
        budget = free - kept - int(total * (1 - vllm_config.cache_config.gpu_memory_utilization))
        logger.info("%.2f GiB are kept for steps and their graphs", kept / GIB)
    logger.info("KV cache: %.2f GiB of %.2f GiB free on %s", budget / GIB, free / GIB, device.name())
    return max(budget, 0)


def give_back_memory(device: Device) -> None:
    """Gives memory of objects that nothing refers to, which allocators keep for later tensors, back to the device, or
    to the host of a CPU.
    """
    # vLLM freezes the heap of an engine that has started, and objects that refer to each other outlived it there
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    device.empty_cache()
    if device.kind == "cpu" and has_folders("cpu"):
        from vllm_gaudi_ucm.ops.cpu.host_memory import give_back_freed_memory

        give_back_freed_memory()
