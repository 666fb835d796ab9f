"""The device protocol: all that code outside this folder may use of a device."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch


class Memory(NamedTuple):
    """Memory of a device, in bytes."""

    free: int
    total: int


class Fence(Protocol):
    """A point after everything that one thread had launched on a device."""

    def wait(self) -> None:
        """Makes what this thread launches from now on run after the fence; the host does not wait."""

    def query(self) -> bool:
        """True if the device has passed the fence, in any thread; raises the error of a device that has failed."""


class Device(Protocol):
    """One device of this process. Methods act on the current device of the process (torch's `set_device`).

    By default it runs every operator at once, compiles no recipes, and captures graphs of a thread of its own.
    """

    @property
    def kind(self) -> str:
        """`cpu`, `cuda` or `hpu`: torch's name of the device type."""

    @property
    def dist_backend(self) -> str:
        """The torch.distributed backend between such devices."""

    def take_device(self, index: int) -> None:
        """Makes one of the visible devices the device of this process, before any other use.

        index: index of this worker among the workers on this machine. Makes collectives between such devices known to
            torch, too.
        """

    def torch_device(self) -> "torch.device":
        """The torch device tensors are made on."""

    def name(self) -> str:
        """Its common name, such as the CPU model or `GAUDI3`."""

    def synchronize(self) -> None:
        """Returns when everything launched so far has finished."""

    def empty_cache(self) -> None:
        """Returns memory that torch holds but does not use to the device."""

    def memory(self) -> Memory:
        """Free and total memory that this process may count on."""

    def seed_all(self, seed: int) -> None:
        """Seeds torch's generators of the host and of every such device."""

    def enter_thread(self) -> None:
        """Makes the device of the process current in the calling thread."""

    def fence(self) -> Fence:
        """A fence after everything that this thread has launched so far."""

    def beside_computation(self, after: Fence) -> AbstractContextManager[None]:
        """A context in which this thread's launches run concurrently with the computation, after the fence.

        At its end all of it has finished, also after an error, so that its buffers can be used again.
        """

    def end_recipe(self) -> None:
        """Launches accumulated operators as one recipe; does nothing on a device that does not accumulate."""
        return

    def compilations(self) -> int:
        """Recipes that the device has compiled since the first call; 0 for a device that compiles none."""
        return 0

    def capturing(self) -> AbstractContextManager[None]:
        """A context for capturing or compiling graphs: no other thread launches concurrent work in it."""
        return nullcontext()

    def compile_only(self) -> AbstractContextManager[bool]:
        """A context in which recipes are compiled but not executed: results inside are garbage, including caches.

        Yields False on a device that cannot do this, where everything is executed.
        """
        return nullcontext(False)

    @property
    def pins_host_memory(self) -> bool:
        """True if copies from pinned host memory run while the host works."""
