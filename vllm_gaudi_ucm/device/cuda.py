"""An NVIDIA GPU as a device: the reference device if there is one."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vllm_gaudi_ucm.device.base import Device, Fence, Memory

_own = threading.local()
_taken = 0
"""The index among the visible GPUs of the one that this process drives."""


class CudaDevice(Device):
    """The current CUDA device of this process."""

    kind = "cuda"
    dist_backend = "nccl"
    pins_host_memory = True

    def take_device(self, index: int) -> None:
        """The GPU with that index among the visible ones.

        Raises ValueError if there are fewer.
        """
        global _taken
        count = torch.cuda.device_count()
        if index >= count:
            raise ValueError(
                f"worker {index + 1} of this machine needs a GPU of its own, {count} are visible; "
                "lower --tensor-parallel-size or --pipeline-parallel-size, or show more in CUDA_VISIBLE_DEVICES"
            )
        _taken = index
        torch.cuda.set_device(index)

    def torch_device(self) -> torch.device:
        return torch.device("cuda", _taken)

    def name(self) -> str:
        return torch.cuda.get_device_name()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        """Returns the caching allocator's unused segments."""
        torch.cuda.empty_cache()

    def memory(self) -> Memory:
        """The driver's figures: other processes' use counts as not free."""
        return Memory(*torch.cuda.mem_get_info())

    def seed_all(self, seed: int) -> None:
        """`torch.manual_seed` seeds the host and every CUDA device."""
        torch.manual_seed(seed)

    def enter_thread(self) -> None:
        """A new thread begins with GPU 0."""
        torch.cuda.set_device(_taken)

    def fence(self) -> Fence:
        """An event in the thread's current stream."""
        event = torch.cuda.Event()
        event.record()
        return event

    @contextmanager
    def beside_computation(self, after: Fence) -> Iterator[None]:
        """On a stream of the thread's own."""
        stream = getattr(_own, "stream", None)
        if stream is None:
            stream = _own.stream = torch.cuda.Stream()
        try:
            with torch.cuda.stream(stream):
                after.wait()
                yield
        finally:
            stream.synchronize()
