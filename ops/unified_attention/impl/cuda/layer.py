"""The tensors of one layer as the CUDA kernels take them: sizes, strides, tile sizes, and the cases not covered."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LARGEST_HEAD = 512
LARGEST_COPIED = 256  # elements of a head that the copy engine loads at once
LARGEST_GROUP = 64  # query heads per kv head


@dataclass(frozen=True)
class Layer:
    """Tensors as in `unified_attention`; scale and cap (0: none) of scores: times log2(e); sinks, slopes: fp32 [heads];
    positions: int64 [rows], with slopes."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    out: Tensor
    scale: float
    cap: float = 0.0
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    positions: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.query.shape[0]

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.key_cache.shape[2]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def value_dim(self) -> int:
        return self.value_cache.shape[3]

    @property
    def wide(self) -> bool:
        """True if arithmetic is fp32: if the inputs are, or if the dtypes of query and cache differ.

        8-bit floats are exact in either half precision.
        """
        cached = self.key_cache.dtype
        return self.query.dtype == torch.float32 or cached not in (self.query.dtype, torch.float8_e4m3fn)

    @property
    def huge(self) -> bool:
        """True if heads are large enough for tiles of few rows to fill the registers."""
        return max(self.query.shape[2], self.value_dim) > LARGEST_COPIED

    def sizes(self) -> dict[str, Any]:
        """Compile-time arguments that all kernels over keys take."""
        import triton.language as tl
        from triton import knobs

        # Triton's interpreter (3.9) has no matrix product of bf16
        interpreted_bf16 = knobs.runtime.interpret and self.query.dtype == torch.bfloat16
        types = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
        return {
            "HEADS": self.heads,
            "GROUP": self.group,
            "DIM": self.query.shape[2],
            "VALUE_DIM": self.value_dim,
            "BLOCK_D": power_of_two(self.query.shape[2]),
            "BLOCK_V": power_of_two(self.value_dim),
            "COMPUTE": types[torch.float32 if self.wide or interpreted_bf16 else self.query.dtype],
            "PRECISION": "ieee",
            "CAP": self.cap,
        }

    def cache_strides(self) -> tuple[int, ...]:
        return (*self.key_cache.stride()[:3], *self.value_cache.stride()[:3])

    def by_slot(self) -> Layer | None:
        """Returns the layer with caches of blocks of one token; None if blocks are not adjacent in memory."""
        caches = []
        for cache in (self.key_cache, self.value_cache):
            if cache.stride(0) != cache.shape[1] * cache.stride(1):
                return None
            caches.append(cache.flatten(0, 1)[:, None])
        return replace(self, key_cache=caches[0], value_cache=caches[1])

    def tokens_per_tile(self, stage: int) -> int:
        """Keys per step of a loop that holds `stage` bytes of keys and values."""
        token = (power_of_two(self.query.shape[2]) + power_of_two(self.value_dim)) * (4 if self.wide else 2)
        return max(16, 1 << (stage // token).bit_length() - 1)


def why_not(layer: Layer) -> str | None:
    """Returns why the kernels do not cover this layer; None if they do."""
    dim = max(layer.query.shape[2], layer.value_dim)
    tensors = (layer.query, layer.key, layer.value, layer.key_cache, layer.value_cache, layer.out)
    if dim > LARGEST_HEAD:
        return f"heads of {dim}, expected at most {LARGEST_HEAD}"
    if layer.group > LARGEST_GROUP:
        return f"{layer.group} query heads per kv head, expected at most {LARGEST_GROUP}"
    if any(tensor.stride(-1) != 1 for tensor in tensors):
        return "heads that are strided in memory"
    if layer.scale <= 0 or not math.isfinite(layer.scale):
        return f"scale {layer.scale / math.log2(math.e)}, expected a positive number"
    return None


def power_of_two(size: int) -> int:
    """Returns the smallest power of two that is at least `size` and at least 16, as matrix products need."""
    return max(16, 1 << (size - 1).bit_length())


def lists_size(count: int) -> int:
    """A power of two for this many lists. It is the same for most steps, because each value compiles another kernel."""
    return max(1024, power_of_two(count))


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a GPU; for a CPU, where kernels are interpreted, a small number that
    still divides the work.
    """
    if device.type != "cuda":
        return 5
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache(maxsize=16)
def has_copy_engine(device: torch.device) -> bool:
    """True if the GPU can copy tiles by descriptor (Hopper and later); and for the interpreter."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (9, 0)


ALIGNMENT = 16  # bytes; alignment of the first element and of every stride


def describe_tokens(tokens: Tensor, block_n: int) -> TensorDescriptor | None:
    """Describes tiles [block_n, dim] of [rows, kv_heads * dim]; tokens: [rows, kv_heads, dim]. None if impossible."""
    rows, heads, dim = tokens.shape
    if not _fits(tokens) or tokens.stride(1) != dim:
        return None
    return TensorDescriptor(tokens, [rows, heads * dim], [tokens.stride(0), 1], [block_n, dim])


def describe_cache(cache: Tensor, block_n: int) -> TensorDescriptor | None:
    """Describes tiles [1, 1, block_n, dim] of [blocks, kv_heads, block_size, dim]; cache: [blocks, block_size,
    kv_heads, dim].

    None if impossible, or if a tile would span more than one block.
    """
    if not _fits(cache) or cache.shape[1] % block_n:
        return None
    by_head = cache.transpose(1, 2)
    return TensorDescriptor(cache, list(by_head.shape), list(by_head.stride()), [1, 1, block_n, cache.shape[3]])


def _fits(tensor: Tensor) -> bool:
    dim, size = tensor.shape[-1], tensor.element_size()
    return (
        has_copy_engine(tensor.device)
        and dim == power_of_two(dim)
        and dim <= LARGEST_COPIED
        and tensor.data_ptr() % ALIGNMENT == 0
        and all(stride * size % ALIGNMENT == 0 for stride in tensor.stride()[:-1])
    )
