"""Which tensors are on the card: their storages, which live on the CPU in truth, are remembered here.

A storage gets a serial number that is never used again. The weak reference that is kept with it also keeps the address
of its header from being given to another storage, so that an address tells a storage for sure.
"""

import itertools
import threading
import weakref

from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.constraint import HpuConstraintError
from habana_frameworks.torch.simulator.duties import duties
from habana_frameworks.torch.simulator.number_formats import check_format, spoil_beyond_range

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_PURGE_EVERY = 4096
MEMORY = 32


class CardMemory:
    """Storages of the card, of all threads."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self._held = 0
        self._workspaces: dict[str, int] = {}
        self._serials = itertools.count()
        self._lock = threading.Lock()
        self._purge_at = _PURGE_EVERY
        # of all storages that are remembered, those that are gone included: an upper bound of what is in use
        self._remembered = 0
        self.is_started = False
        """Whether anything was ever put on the card."""
        self.peak = 0
        """The most that `used` or the upper bound at an allocation has been."""

    def serial(self, tensor: torch.Tensor) -> int | None:
        """The number of the tensor's storage, None for a tensor of the host."""
        found = self._storages.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[1]

    def put(self, tensor: torch.Tensor) -> int:
        """Says that the tensor's storage is the card's; returns its number. Safe to repeat.

        Raises HpuConstraintError for a number format that the card lacks, and where the memory does not suffice.
        """
        check_format(tensor.dtype)
        storage = tensor.untyped_storage()
        found = self._storages.get(storage._cdata)
        if found is not None:
            return found[1]
        spoil_beyond_range(tensor)
        self.is_started = True
        with self._lock:
            self._make_room(storage.nbytes())
            serial = next(self._serials)
            self._storages[storage._cdata] = (StorageWeakRef(storage), serial, storage.nbytes())
            self._remembered += storage.nbytes()
            return serial

    def hold(self, owner: object, size: int) -> None:
        """Takes so many bytes for as long as `owner` lives: what a captured graph has beside the tensors it keeps."""
        self._hold(size)
        weakref.finalize(owner, self._hold, -size)

    def first_execution(self, recipe: str, size: int) -> None:
        """A recipe runs: it takes its workspace the first time, and keeps it."""
        if not duties.on(MEMORY) or recipe in self._workspaces:
            return
        with self._lock:
            self._make_room(size)
            self._workspaces[recipe] = size

    def forget_workspaces(self) -> None:
        """As in a process that has compiled nothing yet."""
        with self._lock:
            self._workspaces.clear()

    def reset_peak(self) -> None:
        """The peak is what is in use now."""
        with self._lock:
            self._purge()
            self.peak = self._remembered + self._fixed()

    def used(self) -> int:
        """Bytes of the storages that live, as large as they were made, of workspaces, and of what is held."""
        storages = list(self._storages.values())
        return self._fixed() + sum(size for reference, _, size in storages if not reference.expired())

    def free(self) -> int:
        """Bytes of the pool that are not in use."""
        return max(0, card.free_bytes - self.used())

    def _fixed(self) -> int:
        return self._held + sum(self._workspaces.values())

    def _hold(self, size: int) -> None:
        self._held += size

    def _make_room(self, size: int) -> None:
        """Before so many bytes are taken: forgets storages that are gone where their number or size asks for it."""
        if len(self._storages) >= self._purge_at or self._remembered + self._fixed() + size > card.free_bytes:
            self._purge()
        in_use = self._remembered + self._fixed()
        if in_use + size > card.free_bytes and duties.on(MEMORY):
            raise HpuConstraintError(
                "memory",
                f"Allocation failed for size::{size} ({size >> 20})MB: {in_use} bytes of {card.free_bytes} are in use",
                MEMORY,
                "free tensors, or budget less for the KV cache: workspaces are taken at the first execution",
            )
        self.peak = max(self.peak, in_use + size)

    def _purge(self) -> None:
        """Forgets storages that are gone. A new dictionary, because other threads read without the lock."""
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        self._remembered = sum(size for _, _, size in self._storages.values())
        self._purge_at = max(_PURGE_EVERY, 2 * len(self._storages))


memory = CardMemory()
