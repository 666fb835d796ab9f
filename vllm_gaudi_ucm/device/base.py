"""The device protocol: all that code outside this folder may ask of a device."""

from contextlib import AbstractContextManager
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
    """One device of this process. Methods act on the current device of the process (torch's `set_device`)."""

    @property
    def kind(self) -> str:
        """`cpu`, `cuda` or `hpu`: torch's name of the device type."""

    @property
    def dist_backend(self) -> str:
        """The torch.distributed backend between such devices."""

    def take(self, index: int) -> None:
        """Makes one of the visible devices that of this process, before anything else is asked of it.

        index: of this worker among those on this machine. Makes collectives between such devices known to torch, too.
        """

    def torch_device(self) -> "torch.device":
        """The torch device tensors are made on."""

    def name(self) -> str:
        """What a person calls it, such as the CPU model or `GAUDI3`."""

    def synchronize(self) -> None:
        """Returns when everything launched so far has finished."""

    def empty_cache(self) -> None:
        """Gives memory that torch holds but does not use back to the device."""

    def memory(self) -> Memory:
        """Free and total memory that this process may count on."""

    def seed_all(self, seed: int) -> None:
        """Seeds torch's generators of the host and of every such device."""

    def enter_thread(self) -> None:
        """Makes the device of the process current in the calling thread."""

    def fence(self) -> Fence:
        """A fence after everything that this thread has launched so far."""

    def beside_computation(self, after: Fence) -> AbstractContextManager[None]:
        """A context in which what this thread launches runs beside the computation, after the fence.

        At its end all of it has finished, also after an error, so that its buffers can be used again.
        """

    def end_recipe(self) -> None:
        """Launches what the device has accumulated as one recipe; does nothing on a device that accumulates nothing."""

    def compilations(self) -> int:
        """Recipes that the device has compiled since the first call; 0 for a device that compiles none."""

    def capturing(self) -> AbstractContextManager[None]:
        """Entered where graphs are captured or compiled: no other thread launches beside the computation meanwhile."""

    def compile_only(self) -> AbstractContextManager[bool]:
        """Inside, recipes are compiled and not executed: whatever is computed there is garbage, caches included.

        False from a device that cannot, where everything is executed.
        """

    @property
    def pins_host_memory(self) -> bool:
        """True if copies from pinned host memory run beside the host's own work."""
