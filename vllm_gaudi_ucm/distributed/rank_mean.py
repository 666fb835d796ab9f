"""Means over the ranks that share out a model's heads."""

import torch

from vllm_gaudi_ucm.vllm_api.distributed import tensor_model_parallel_all_reduce


class RankMean:
    """The mean of the ranks' tensors, identical on all ranks to the last bit.

    One all-reduce in float32, as after vLLM's row-parallel layers: it may be part of a graph. Every rank calls it with
    the same shapes, in the same order.

    Args:
        size: ranks of the tensor-parallel group.
    """

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, own: torch.Tensor) -> torch.Tensor:
        """Returns the mean in float32, of the shape of `own`, which is copied: the collective overwrites its input."""
        return tensor_model_parallel_all_reduce(own.float() / self._size)
