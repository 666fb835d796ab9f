"""Keeps an index in step with a folder that several engines change, by listing the parts that have changed."""

from __future__ import annotations

import threading
import time

from vllm_gaudi_ucm.store.folder import Folder
from vllm_gaudi_ucm.store.folder_index import FolderIndex
from vllm_gaudi_ucm.store.medium import StoredBlock

_SETTLED_NS = 100_000_000
"""A folder's mtime may miss a change that follows within one tick of the clock: younger ones are not relied on."""


class FolderListing:
    """What each part of the folder held when it was last listed. One thread at a time may refresh it.

    lock: held around every use of `index`, and never while the disk is asked.
    """

    def __init__(self, folder: Folder, index: FolderIndex, lock: threading.Lock) -> None:
        self._folder = folder
        self._index = index
        self._lock = lock
        self._leaves: dict[str, tuple[int, list[StoredBlock]]] = {}  # mtime in ns (0: not relied on), blocks

    def refresh(self) -> None:
        """Lists the parts of the folder that have changed since they were last listed."""
        with self._lock:
            moment = self._index.moment
        begin = time.time_ns()
        leaves = dict(self._folder.leaves())
        changed = [
            leaf for leaf in leaves.keys() | self._leaves.keys() if leaves.get(leaf) != self._leaves.get(leaf, (0,))[0]
        ]
        for leaf in changed:
            found = list(self._folder.records(leaf)) if leaf in leaves else []
            _, known = self._leaves.pop(leaf, (0, []))
            with self._lock:
                self._index.replace(known, found, moment)
            if leaf in leaves:
                mtime = leaves[leaf] if leaves[leaf] < begin - _SETTLED_NS else 0
                self._leaves[leaf] = mtime, [block for block, _ in found]
        if changed:
            with self._lock:
                self._index.sort()
