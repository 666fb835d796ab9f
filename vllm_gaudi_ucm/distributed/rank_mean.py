"""Means over the ranks that share out a model's heads."""

from __future__ import annotations

import torch

from vllm_gaudi_ucm.vllm_api.distributed import tensor_model_parallel_all_reduce


class RankMean:
    """The mean of the ranks' tensors, which is the same on all of them, to the last bit.

    One all-reduce in float32, as after vLLM's row-parallel layers: it may stand inside a graph. Every rank calls it
    with the same shape, in the same order.

    Args:
        size: ranks of the tensor-parallel group.
    """

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, own: torch.Tensor) -> torch.Tensor:
        """float32, of the shape of `own`, which stays as it is: the collective overwrites its input."""
        return tensor_model_parallel_all_reduce(own.float() / self._size)
