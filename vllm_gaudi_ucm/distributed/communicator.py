"""The communicator of vLLM's layers for collectives between cards: NCCL, HCCL or gloo, through torch.distributed.

Source: vLLM's `DeviceCommunicatorBase`; `HpuCommunicator` of vllm-gaudi for the needs of lazy mode.
"""

from typing import Any

import torch

from vllm_gaudi_ucm.device import get_device
from vllm_gaudi_ucm.distributed.ranks import Ranks
from vllm_gaudi_ucm.distributed.small_sums import SmallSums, small_sums
from vllm_gaudi_ucm.vllm_api.distributed import DeviceCommunicatorBase, symmetric_memory_is_wanted


class Communicator(DeviceCommunicatorBase):
    """Collectives in place and by concatenation, which graphs can hold: a CUDA graph, or a compiled region.

    The device group is of the platform's `dist_backend`.
    """


class CudaCommunicator(Communicator):
    """The communicator on GPUs: small sums of the ranks that share out a layer go through memory that they share."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._small_sums: SmallSums | None = None
        if self.unique_name.split(":")[0] == "tp" and symmetric_memory_is_wanted() and self.device_group is not None:
            ranks = Ranks(self.rank_in_group, self.world_size, group=self.cpu_group)
            self._small_sums = small_sums(self.device, self.device_group, ranks)

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """The sum over the group, in `input_` or in a new tensor."""
        found = None if self._small_sums is None else self._small_sums(input_)
        return super().all_reduce(input_) if found is None else found


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
