"""The indexer of models whose rows choose tokens by themselves (DSA): `vllm.model_executor.models.deepseek_v2`.

Internal: `Indexer`, whose projections we use, and the layer `SparseAttnIndexer` and cache that it makes.
"""

from typing import Any, Protocol

from torch import nn
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

__all__ = ["IndexerModules", "is_indexer_cache", "register_no_kernels"]


class IndexerModules(Protocol):
    """The parts of `Indexer` that we use."""

    n_head: int
    head_dim: int
    rope_dim: int
    wq_b: nn.Module
    wk_weights_proj: nn.Module
    k_norm: nn.Module


class _NoKernels(SparseAttnIndexer):
    """Takes the place of the kernels, which only run on some GPUs. Nothing calls it."""

    def __init__(self, *args: Any, **others: Any) -> None:
        nn.Module.__init__(self)


def register_no_kernels() -> None:
    """Makes models that are built afterwards in this process do without vLLM's kernels of the indexer.

    Reason: `SparseAttnIndexer` raises an error if DeepGEMM is not installed, and registers Triton kernels.
    Remove when: a model makes it only if its own attention layers run.
    """
    name = SparseAttnIndexer.__name__
    if name not in op_registry_oot:
        SparseAttnIndexer.register_oot(_NoKernels)


def is_indexer_cache(layer: object) -> bool:
    """Returns whether a layer is the cache that an indexer makes for vLLM's kernels, in 8-bit codes.

    Reason: `Indexer` makes it, although a layer of attention may keep the keys itself. The class is known by its name,
    because its module has all models of the family.
    Remove when: a layer of attention may bring the cache of its indexer.
    """
    return type(layer).__name__ == "DeepseekV32IndexerCache"
