"""Answers of the platform about the memory of KV caches, and about the processors that move blocks of it."""


class PoolMemory:
    """The part of the platform that vLLM's KV-cache manager and its NIXL connector read."""

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def get_nixl_supported_devices(cls) -> dict[str, tuple[str, ...]]:
        """Returns where the blocks of a device may be read by another engine. A Gaudi's blocks are copied to the host,
        because NIXL is not known to register its memory. vLLM knows CPUs and GPUs.
        """
        return {"hpu": ("cpu",)}

    @classmethod
    def discover_numa_topology(cls) -> list[list[int]]:
        """Returns no processors. vLLM would bind the caller's thread to the last one of each node, with the threads
        that it starts later.
        """
        return []
