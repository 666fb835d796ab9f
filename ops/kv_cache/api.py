"""Operations on the KV cache: writing the new keys and values of a step, and copying blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.kv_cache.implementation import KV_CACHE
from vllm_gaudi_ucm.ops.registry import AUTO


def write_kv(key: Tensor, value: Tensor, key_rows: Tensor, value_rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Writes one key and one value per row, cast to the cache's dtype, in place; returns the caches to read from.

    While compiling, read these and not the arguments: if a graph uses the old name again, a Gaudi copies the whole
    cache, because it writes in place only tensors without another user (gaudi-pytorch-bridge,
    pass_reinplace_index_copy_ops). So while compiling, the caches must be tensors with a storage of their own, not
    views.

    key: [rows, kv_heads, dim]; value: [rows, kv_heads, value_dim].
    key_rows: [slots, kv_heads, dim], a token of a block each; value_rows likewise with value_dim. Any strides.
    slots: int64 [rows], slot = block * block_size + offset, never negative. Pads write to slots of the dummy block;
        these may repeat, and what the dummy block then holds is unspecified.
    Returns (key_rows, value_rows).
    Raises ValueError if shapes, dtypes or devices do not match (not while compiling).
    """
    if not torch.compiler.is_compiling():
        _validate("key", key, key_rows, slots)
        _validate("value", value, value_rows, slots)
        chosen = KV_CACHE.choose(AUTO, slots.device.type)
        if chosen.write(key, value, key_rows, value_rows, slots):
            return key_rows, value_rows
    _REFERENCE.write(key, value, key_rows, value_rows, slots)
    return key_rows, value_rows


def write_rows(tokens: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """`write_kv` for a cache of one tensor, whose keys hold the values (multi-head latent attention).

    tokens: [rows, 1, dim]; rows: [slots, 1, dim]. Returns rows, to read from; raises like `write_kv`.
    """
    if not torch.compiler.is_compiling():
        _validate("key", tokens, rows, slots)
        if KV_CACHE.choose(AUTO, slots.device.type).write_rows(tokens, rows, slots):
            return rows
    _REFERENCE.write_rows(tokens, rows, slots)
    return rows


_REFERENCE = KV_CACHE.make("reference")


def _validate(name: str, tokens: Tensor, cache: Tensor, slots: Tensor) -> None:
    if cache.dim() != 3 or tokens.dim() != 3 or tokens.shape[1:] != cache.shape[1:]:
        raise ValueError(
            f"write_kv: {name} has shape {tuple(tokens.shape)}, expected [rows, kv_heads, dim] "
            f"for a cache [slots, kv_heads, dim] of shape {tuple(cache.shape)}"
        )
    if slots.dtype != torch.int64 or slots.shape != tokens.shape[:1]:
        raise ValueError(
            f"write_kv: slots are {slots.dtype} {tuple(slots.shape)}, expected torch.int64 {tuple(tokens.shape[:1])}"
        )
    if not tokens.device == cache.device == slots.device:
        raise ValueError(
            f"write_kv: {name} is on {tokens.device}, its cache on {cache.device}, slots on {slots.device}; "
            "expected one device"
        )


def copy_blocks(caches: Sequence[Tensor], source_ids: Tensor, target_ids: Tensor) -> None:
    """Copies block `source_ids[i]` to block `target_ids[i]` within each cache.

    caches: the keys or values of each layer, or both in turn: [blocks, ...] of any strides, of one shape, dtype,
        device.
    source_ids, target_ids: int64 [n] on the host. No block is a target twice, or a target and a source.
    Raises ValueError if the arguments do not match, IndexError for a block outside of the caches.
    """
    pairs = torch.stack([source_ids, target_ids], 1) if source_ids.shape == target_ids.shape else source_ids
    both = set(source_ids.tolist()) & set(target_ids.tolist())
    if both:
        raise ValueError(f"copy_blocks: found blocks {sorted(both)} as source and as target, expected either")
    _swap("copy_blocks", caches, caches, pairs, non_blocking=False)


def swap_blocks(
    sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Tensor, *, non_blocking: bool = False
) -> None:
    """Copies blocks of `sources` to blocks of `targets`: different tensors, possibly on another device.

    Between two devices, the blocks of all layers are one transfer if the blocks on the host are evenly spaced.

    sources, targets: the keys or values of each layer, or both in turn: [blocks, ...] of any strides; the shape of a
        block and the dtype agree.
    pairs: int64 [n, 2] on the host, (block of the source, block of the target); no block is a target twice.
    non_blocking: a copy between a device and pinned host memory may still run when this returns: the caller waits for
        the current stream before it reads the target on the host, or changes the source there.
    Raises ValueError if the arguments do not match, IndexError for a block outside of a cache.
    """
    _swap("swap_blocks", sources, targets, pairs, non_blocking)


def _swap(
    operation: str, sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Tensor, non_blocking: bool
) -> None:
    _validate_blocks(operation, sources, targets, pairs)
    if not len(pairs):
        return
    # A copy: `contiguous` keeps the odd strides of a single pair, and a Gaudi compiles a recipe for each stride.
    pairs = pairs.clone(memory_format=torch.contiguous_format)
    chosen = KV_CACHE.choose(AUTO, sources[0].device.type)
    if not chosen.swap(sources, targets, pairs, non_blocking):
        _REFERENCE.swap(sources, targets, pairs, non_blocking)


def _validate_blocks(operation: str, sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Tensor) -> None:
    if not sources or len(sources) != len(targets):
        raise ValueError(
            f"{operation}: {len(sources)} sources and {len(targets)} targets, expected one of each per layer"
        )
    source, target = sources[0], targets[0]
    for name, caches, first in (("source", sources, source), ("target", targets, target)):
        for cache in caches:
            if cache.shape != first.shape or cache.dtype != first.dtype or cache.device != first.device:
                raise ValueError(
                    f"{operation}: {name}s are {_kind(first)} and {_kind(cache)}, expected the same of each layer"
                )
    if source.dim() < 2 or source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        raise ValueError(
            f"{operation}: sources are {_kind(source)}, targets {_kind(target)}, expected blocks of one shape and dtype"
        )
    if pairs.dtype != torch.int64 or pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.device.type != "cpu":
        raise ValueError(f"{operation}: block ids are {_kind(pairs)}, expected pairs of torch.int64 on the CPU")
    if not len(pairs):
        return
    least, most = pairs.amin(0).tolist(), pairs.amax(0).tolist()
    for column, (name, cache) in enumerate((("source", source), ("target", target))):
        if least[column] < 0 or most[column] >= cache.shape[0]:
            raise IndexError(
                f"{operation}: {name} blocks {least[column]} to {most[column]}, expected 0 to {cache.shape[0] - 1}"
            )
    if len(pairs) > 1 and len(pairs[:, 1].unique()) < len(pairs):
        raise ValueError(f"{operation}: a block is a target twice, expected each once")


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
