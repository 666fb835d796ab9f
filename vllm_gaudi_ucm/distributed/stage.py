"""A stage of a pipeline: some layers of the model, between the worker before and the worker behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from vllm_gaudi_ucm.vllm_api.distributed import get_pp_group

if TYPE_CHECKING:
    from vllm_gaudi_ucm.device import Device

StageTensors = dict[str, torch.Tensor]
"""The tensors that a stage passes to the next, by vLLM's names: hidden states, and in most models a residual; [rows,
width].
"""


class StageError(RuntimeError):
    """Raised if stages do not agree on the tensors between them."""


class _Sent(NamedTuple):
    """A tensor on its way, which must neither change nor be freed."""

    tensor: torch.Tensor
    work: dist.Work


class Stage:
    """This worker's place in the pipeline.

    Shapes are a function of the step, which every stage plans for itself, so nothing but the tensors is sent: neither
    shapes nor names. Both sides go through them in the order of their names. Each tensor-parallel rank of a stage talks
    to its like in the next one.

    Args:
        number: of this stage, from 0.
        count: of stages, at least 2.
        before, behind: ranks of the neighbours in the world; a stage at an end has the other end there.
        group: that carries the tensors.
    """

    def __init__(
        self, number: int, count: int, before: int, behind: int, group: dist.ProcessGroup, device: Device
    ) -> None:
        self.is_first = number == 0
        self.is_last = number == count - 1
        self.count = count
        self._before = before
        self._behind = behind
        self._group = group
        self._device = device
        self._sent: list[_Sent] = []

    @classmethod
    def of_engine(cls, device: Device) -> Stage | None:
        """The place in vLLM's pipeline group; None if one worker has all layers. To be called once that is there."""
        group = get_pp_group()
        if group.world_size == 1:
            return None
        before, behind = group.prev_rank, group.next_rank
        return cls(group.rank_in_group, group.world_size, before, behind, group.device_group, device)

    def receive(self, tensors: StageTensors) -> None:
        """Fills the tensors with those of the previous stage, which have the same names, shapes and dtypes."""
        # previous readers of them have been launched by then
        self._device.end_recipe()
        for name in sorted(tensors):
            dist.recv(tensors[name], self._before, self._group)

    def send(self, tensors: StageTensors) -> None:
        """Sends them to the stage behind, and returns at once: see `finish_sends`."""
        self.finish_sends()
        self._device.end_recipe()
        for name in sorted(tensors):
            tensor = tensors[name].contiguous()
            work = dist.isend(tensor, self._behind, self._group)
            assert work is not None, "this worker is in the group"
            self._sent.append(_Sent(tensor, work))

    def finish_sends(self) -> None:
        """Afterwards tensors that were sent may be written again: they have arrived, or the device keeps the order."""
        for sent in self._sent:
            sent.work.wait()
        self._sent.clear()

    def connect(self, handed: StageTensors, expected: StageTensors) -> None:
        """Sends the tensors of a step of a few rows, before any request: the first use makes a connection, which takes
        time and memory, and the memory must be measured.

        handed: tensors that this stage sends. expected: tensors that the next stage needs, with the same rows.

        Raises:
            StageError: names, shapes or dtypes differ from the expected ones.
        """
        found, wanted = ({name: (*one.shape, one.dtype) for name, one in each.items()} for each in (handed, expected))
        if not self.is_last and found != wanted:
            raise StageError(
                f"pipeline parallelism: the stage hands on {found}, expected {wanted}, which is what the model says of "
                "itself; serve it with --tensor-parallel-size instead"
            )
        if not self.is_first:
            self.receive({name: torch.empty_like(one) for name, one in expected.items()})
        if not self.is_last:
            self.send(handed)
            self.finish_sends()
