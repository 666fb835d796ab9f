"""Opens stores from their options."""

from __future__ import annotations

from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError
from vllm_gaudi_ucm.store.base import KvStore
from vllm_gaudi_ucm.store.file import FileMedium
from vllm_gaudi_ucm.store.folder import Folder
from vllm_gaudi_ucm.store.guarded import GuardedStore
from vllm_gaudi_ucm.store.medium import Medium
from vllm_gaudi_ucm.store.options import FileStoreOptions, MemoryStoreOptions, RedisStoreOptions, StoreOptions
from vllm_gaudi_ucm.store.redis import RedisMedium
from vllm_gaudi_ucm.store.shared_memory import SharedMemoryStore, can_pin


def open_store(options: StoreOptions, block_bytes: int, evicts: bool = True) -> KvStore:
    """A store of blocks of `block_bytes` bytes; its user closes it.

    Memory stores of one process with equal options and block size are one store, which is empty again when the last of
    its users has closed it: vLLM's scheduler and worker, where they share a process, see the same blocks. A server that
    does not answer is no error here: the store misses until it does. Raises ValueError (`UcmConfigError`) for a folder
    that cannot be used, or a capacity below one block.

    evicts: as for `open_medium`; stores that share memory do.
    """
    if isinstance(options, MemoryStoreOptions):
        return SharedMemoryStore(options, block_bytes)
    medium = open_medium(options, evicts=evicts)
    try:
        return GuardedStore(medium, block_bytes, options, can_pin=can_pin)
    except ValueError:
        medium.close()
        raise


def open_medium(options: FileStoreOptions | RedisStoreOptions, create: bool = True, evicts: bool = True) -> Medium:
    """What lies under such a store, for all block sizes and without protection. create: make the folder. evicts: see
    FileMedium; a server has a policy of its own.

    Raises ValueError (`UcmConfigError`) for a folder that cannot be used.
    """
    if isinstance(options, RedisStoreOptions):
        return RedisMedium(options)
    try:
        return FileMedium(Folder(options.path, create), options.capacity, options.fsync, evicts)
    except OSError as error:
        found = f"{options.path} ({error.strerror})"
        expected = "a folder that this user owns, or may make"
        raise UcmConfigError([Problem("store.path", found, expected)]) from error
