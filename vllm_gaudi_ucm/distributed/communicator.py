"""The communicator of vLLM's layers for collectives between cards: NCCL, HCCL or gloo, through torch.distributed.

Source: vLLM's `DeviceCommunicatorBase`; `HpuCommunicator` of vllm-gaudi for the needs of lazy mode.
"""

import torch

from vllm_gaudi_ucm.device import get_device
from vllm_gaudi_ucm.vllm_api.distributed import DeviceCommunicatorBase


class Communicator(DeviceCommunicatorBase):
    """Collectives in place and by concatenation, which graphs can hold: a CUDA graph, or a compiled region.

    The device group is of the platform's `dist_backend`.
    """


class LazyCommunicator(Communicator):
    """The communicator on Gaudi in lazy mode: launches accumulated operators before a collective reads them."""

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """The sum over the group, in `input_`."""
        get_device("hpu").end_recipe()
        return super().all_reduce(input_)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The inputs of all ranks, one after the other in `dim`."""
        get_device("hpu").end_recipe()
        return super().all_gather(input_, dim)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """This rank's part, in `dim`, of the sum over the group."""
        get_device("hpu").end_recipe()
        return super().reduce_scatter(input_, dim)
