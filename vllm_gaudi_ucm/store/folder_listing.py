"""Keeps an index in step with a folder that several engines change, by listing the parts that have changed."""

from __future__ import annotations

import threading
import time

from vllm_gaudi_ucm.store.folder import Folder
from vllm_gaudi_ucm.store.folder_index import FolderIndex

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
        self._mtimes: dict[str, int] = {}  # of each leaf when it was listed, in ns; 0: not relied on

    def refresh(self) -> None:
        """Lists the parts of the folder that have changed since they were last listed."""
        with self._lock:
            moment, known = self._index.moment, self._index.leaves()
        begin = time.time_ns()
        held = self._folder.hold()
        leaves = {} if held is None else dict(held.leaves())
        changed = {leaf for leaf in leaves.keys() | self._mtimes.keys() if leaves.get(leaf) != self._mtimes.get(leaf)}
        changed.update(leaf for leaf in known if leaf not in leaves)  # removed with what was saved since the last look
        for leaf in changed:
            found = held.records(leaf) if held is not None and leaf in leaves else []
            with self._lock:
                self._index.replace(leaf, found, moment)
            self._mtimes.pop(leaf, None)
            if leaf in leaves:
                self._mtimes[leaf] = leaves[leaf] if leaves[leaf] < begin - _SETTLED_NS else 0
        if changed:
            with self._lock:
                self._index.sort()
