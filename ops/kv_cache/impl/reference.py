"""KV-cache operations in plain torch, on any device; except for a check on the CPU it reads nothing on the host."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.kv_cache.implementation import KvCacheImplementation
from vllm_gaudi_ucm.ops.narrow_floats import put


class ReferenceKvCache(KvCacheImplementation):
    """The reference: any tensors, on any device."""

    def write(self, key: Tensor, value: Tensor, key_rows: Tensor, value_rows: Tensor, slots: Tensor) -> bool:
        write(key, key_rows, slots)
        write(value, value_rows, slots)
        return True

    def write_rows(self, tokens: Tensor, rows: Tensor, slots: Tensor) -> bool:
        write(tokens, rows, slots)
        return True

    def swap(self, sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Tensor, non_blocking: bool) -> bool:
        swap(sources, targets, pairs, non_blocking)
        return True


def write(tokens: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Writes tokens [n, kv_heads, dim] to rows [slots, kv_heads, dim] at slots [n]."""
    put(rows, 0, slots, tokens.to(rows.dtype))


def swap(sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Tensor, non_blocking: bool = False) -> None:
    """Copies blocks of validated `pairs`, int64 [n, 2] on the host, from sources to targets, both [blocks, ...]."""
    source_ids, target_ids = pairs[:, 0], pairs[:, 1]
    together = sources[0].device != targets[0].device or (stacked(sources) is not None and stacked(targets) is not None)
    if together:
        scatter(gather(sources, source_ids), targets, target_ids, non_blocking)
        return
    # on one device an extra launch costs less than a copy of all layers
    for source, target in zip(sources, targets, strict=True):
        scatter(gather([source], source_ids), [target], target_ids, non_blocking)


def gather(caches: Sequence[Tensor], ids: Tensor) -> Tensor:
    """[layers, n, ...] blocks of all caches, on their device; a view if they are consecutive on the host."""
    stack = stacked(caches)
    if stack is None:
        found = ids.to(caches[0].device)
        return torch.stack([cache.index_select(0, found) for cache in caches])
    if stack.device.type == "cpu" and _is_run(ids):
        return stack.narrow(1, int(ids[0]), len(ids))
    return stack.index_select(1, ids.to(stack.device))


def scatter(blocks: Tensor, caches: Sequence[Tensor], ids: Tensor, non_blocking: bool) -> None:
    """Writes blocks [layers, n, ...] of any device over those of the caches, in one transfer."""
    stack, device = stacked(caches), caches[0].device
    if stack is not None and device.type == "cpu" and _is_run(ids):
        stack.narrow(1, int(ids[0]), len(ids)).copy_(blocks, non_blocking=non_blocking)
        return
    # caches on the host are written at once, so the blocks must have arrived
    blocks, ids = blocks.to(device, non_blocking=non_blocking and device.type != "cpu"), ids.to(device)
    if stack is not None:
        put(stack, 1, ids, blocks)
        return
    for cache, found in zip(caches, blocks, strict=True):
        put(cache, 0, ids, found)


def stacked(caches: Sequence[Tensor]) -> Tensor | None:
    """The caches as one view [layers, blocks, ...]; None unless they are evenly spaced in one allocation."""
    first = caches[0]
    if len(caches) == 1:
        return first.unsqueeze(0)
    storage = first.untyped_storage().data_ptr()
    distance = caches[1].storage_offset() - first.storage_offset()
    for index, cache in enumerate(caches):
        offset = first.storage_offset() + index * distance
        if (
            cache.untyped_storage().data_ptr() != storage
            or cache.stride() != first.stride()
            or cache.storage_offset() != offset
        ):
            return None
    if distance <= 0:
        return None
    return first.as_strided((len(caches), *first.shape), (distance, *first.stride()), first.storage_offset())


def _is_run(ids: Tensor) -> bool:
    return bool(torch.equal(ids, torch.arange(int(ids[0]), int(ids[0]) + len(ids))))
