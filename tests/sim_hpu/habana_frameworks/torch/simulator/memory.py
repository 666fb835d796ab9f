"""Which tensors are on the card: their storages, which live on the CPU in truth, are remembered here.

A storage gets a serial number that is never used again. The weak reference that is kept with it also keeps the address
of its header from being given to another storage, so that an address tells a storage for sure.
"""

import itertools
import threading
import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_PURGE_EVERY = 4096


class CardMemory:
    """Storages of the card, of all threads."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self._held = 0
        self._serials = itertools.count()
        self._lock = threading.Lock()
        self._purge_at = _PURGE_EVERY

    def serial(self, tensor: torch.Tensor) -> int | None:
        """The number of the tensor's storage, None for a tensor of the host."""
        found = self._storages.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[1]

    def put(self, tensor: torch.Tensor) -> int:
        """Says that the tensor's storage is the card's; returns its number. Safe to repeat."""
        storage = tensor.untyped_storage()
        with self._lock:
            found = self._storages.get(storage._cdata)
            if found is not None:
                return found[1]
            if len(self._storages) >= self._purge_at:
                self._purge()
            serial = next(self._serials)
            self._storages[storage._cdata] = (StorageWeakRef(storage), serial, storage.nbytes())
            return serial

    def hold(self, owner: object, size: int) -> None:
        """Takes so many bytes for as long as `owner` lives: what a captured graph has beside the tensors it keeps."""
        self._hold(size)
        weakref.finalize(owner, self._hold, -size)

    def used(self) -> int:
        """Bytes of the storages that live, as large as they were made, and of what is held."""
        storages = list(self._storages.values())
        return self._held + sum(size for reference, _, size in storages if not reference.expired())

    def _hold(self, size: int) -> None:
        self._held += size

    def _purge(self) -> None:
        """Forgets storages that are gone. A new dictionary, because other threads read without the lock."""
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        self._purge_at = max(_PURGE_EVERY, 2 * len(self._storages))


memory = CardMemory()
