"""The store's keys of one request's blocks, made as its tokens grow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from vllm_gaudi_ucm.store.block_key import chain_keys

if TYPE_CHECKING:
    from vllm.v1.request import Request


class RequestKeys:
    """Keys of the full blocks, each made once.

    Args:
        request: whose tokens only grow.
        namespace: digest of all else that the KV depends on.
        block_size: tokens per block.
    """

    def __init__(self, request: Request, namespace: bytes, block_size: int) -> None:
        self._request = request
        self._namespace = namespace
        self._block_size = block_size
        self._keys: list[bytes] = []
        self._next_feature = 0

    @property
    def known(self) -> list[bytes]:
        """Those that were asked for so far."""
        return self._keys

    def first(self, blocks: int) -> list[bytes]:
        """Keys of the first so many blocks.

        Raises ValueError where there is no key: an extra key of the request is not plain data, or the request has
        fewer full blocks.
        """
        known, size = len(self._keys), self._block_size
        if known < blocks:
            extras: list[tuple[Any, ...] | None] = []
            for block in range(known, blocks):
                extra, self._next_feature = generate_block_hash_extra_keys(
                    self._request, block * size, (block + 1) * size, self._next_feature
                )
                extras.append(extra)
            parent = self._keys[-1] if self._keys else None
            tokens = self._request.all_token_ids[known * size : blocks * size]
            self._keys += chain_keys(self._namespace, parent, tokens, size, extras)
        return self._keys[:blocks]
