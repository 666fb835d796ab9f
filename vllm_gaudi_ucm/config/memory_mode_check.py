"""Refuses memory mode where the sparse method cannot work with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError
from vllm_gaudi_ucm.sparse.methods.kvstar.options import KVStarOptions
from vllm_gaudi_ucm.sparse.options import BlockOptions

if TYPE_CHECKING:
    from vllm_gaudi_ucm.kv_offload.options import MemoryModeOptions
    from vllm_gaudi_ucm.sparse.sections import SparseConfig


def check_memory_mode(
    memory_mode: MemoryModeOptions, method: str | None, sparse_config: SparseConfig, key: str
) -> None:
    """Raises `UcmConfigError` for memory mode without a method that chooses blocks, or with room for fewer than it
    attends to."""
    if method is None:
        raise UcmConfigError([Problem(f"{key}.enabled", "true", "false without ucm.ucm_sparse_method")])
    options = sparse_config.options(method)
    if isinstance(options, KVStarOptions):
        options = options.base_options()
    if not isinstance(options, BlockOptions):
        wanted = f"false with {method!r}, which does not choose blocks by their scores"
        raise UcmConfigError([Problem(f"{key}.enabled", "true", wanted)])
    if memory_mode.resident_ratio < options.sparse_ratio:
        wanted = f"at least the method's sparse_ratio {options.sparse_ratio}"
        raise UcmConfigError([Problem(f"{key}.resident_ratio", str(memory_mode.resident_ratio), wanted)])
