"""The medium of the redis store: one value per record in a Redis or Valkey server, which bounds itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from vllm_gaudi_ucm.store.medium import REFUSED, FullError, Medium, StoredBlock, Usage
from vllm_gaudi_ucm.store.options import RedisStoreOptions
from vllm_gaudi_ucm.store.record import HEADER_BYTES

PREFIX = b"gaudi-ucm:1:"
_KEY_BYTES = 32
_BATCH = 512
_READ_BYTES = 1 << 18
"""Bytes asked of the socket at once. With the client's own 64 KiB blocks of 1 MiB came at 743 MiB/s instead of 1541."""
_OUT_OF_MEMORY = "OOM"


class RedisMedium(Medium):
    """Values `gaudi-ucm:1:<bytes of a block>:<key>` in one database of a server. Opening does not connect."""

    kind = "redis"
    upkeep_seconds = 1.0
    batch_bytes = 1 << 20  # the client takes and clears new memory for the answers to a call: more is slower

    def __init__(self, options: RedisStoreOptions) -> None:
        redis = _client_package()
        self.errors = (OSError, redis.RedisError)
        self._refused: type[Exception] = redis.ResponseError
        self._url = options.url
        self._ttl_ms = None if options.ttl is None else max(1, int(options.ttl * 1000))
        self._keys = 0  # of the database, as last heard; what this process adds or removes is counted at once
        self._maxmemory: int | None = None
        # No retries: the deadline is short, and the circuit breaker decides what happens after a failure.
        self._client: Any = redis.Redis.from_url(
            options.url,
            socket_timeout=options.deadline,
            socket_connect_timeout=options.deadline,
            socket_read_size=_READ_BYTES,
            retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),
        )

    def place(self) -> str:
        parts = urlsplit(self._url)
        where = parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}{parts.path}"
        return f"redis store {parts.scheme}://{where}"

    def lookup(self, keys: Sequence[bytes], block_bytes: int) -> list[bool]:
        found = []
        for batch in _batches(keys):
            with self._client.pipeline(transaction=False) as pipeline:
                for key in batch:
                    pipeline.strlen(_name(key, block_bytes))
                found += [size == HEADER_BYTES + block_bytes for size in pipeline.execute()]
        return found

    def keep(self, key: bytes, block_bytes: int) -> bool:
        name = _name(key, block_bytes)
        if self._client.strlen(name) != HEADER_BYTES + block_bytes:
            return False
        return self._ttl_ms is None or bool(self._client.pexpire(name, self._ttl_ms))

    def read(self, key: bytes, block_bytes: int, record: memoryview) -> int | None:
        return _fill(record, self._get(self._client, key, block_bytes))

    def _get(self, client: Any, key: bytes, block_bytes: int) -> Any:
        name = _name(key, block_bytes)
        return client.get(name) if self._ttl_ms is None else client.getex(name, px=self._ttl_ms)

    def read_many(self, keys: Sequence[bytes], block_bytes: int, records: Sequence[memoryview]) -> Iterator[int | None]:
        """In one round trip."""
        with self._client.pipeline(transaction=False) as pipeline:
            for key in keys:
                self._get(pipeline, key, block_bytes)
            values = pipeline.execute(raise_on_error=False)
        for value, record in zip(values, records, strict=True):
            if isinstance(value, self._refused):
                yield REFUSED
            elif isinstance(value, Exception):
                raise value
            else:
                yield _fill(record, value)

    def write(self, key: bytes, record: memoryview) -> bool:
        try:
            self._client.set(_name(key, len(record) - HEADER_BYTES), record, px=self._ttl_ms)
        except self._refused as error:
            if _OUT_OF_MEMORY in str(error) or type(error).__name__ == "OutOfMemoryError":
                raise FullError(f"the server has reached its maxmemory and may not evict ({error})") from error
            raise
        self._keys += 1
        return True

    def delete(self, blocks: Sequence[StoredBlock]) -> int:
        names = [_name(block.key, block.block_bytes) for block in blocks]
        removed = sum(self._client.unlink(*batch) for batch in _batches(names))
        self._keys -= removed
        return removed

    def blocks(self, block_bytes: int | None = None) -> Iterator[StoredBlock]:
        pattern = PREFIX + (b"*" if block_bytes is None else b"%d:*" % block_bytes)
        seen = set()  # a scan may give a key twice
        for name in self._client.scan_iter(match=pattern, count=_BATCH):
            size, _, key = name.removeprefix(PREFIX).partition(b":")
            block = StoredBlock(key, int(size)) if size.isdigit() and len(key) == _KEY_BYTES else None
            if block is not None and block not in seen:
                seen.add(block)
                yield block

    def usage(self, block_bytes: int) -> Usage:
        """Counts every key of the database, without looking at their names."""
        keys = max(0, self._keys)
        return Usage(keys, keys * block_bytes, self._maxmemory)

    def upkeep(self) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            keys, info = pipeline.dbsize().info("memory").execute()
        self._keys, self._maxmemory = keys, info.get("maxmemory") or None

    def memory_policy(self) -> tuple[int, str]:
        """The server's `maxmemory` in bytes (0: no bound) and what it does when that is reached."""
        info = self._client.info("memory")
        return int(info.get("maxmemory", 0)), str(info.get("maxmemory_policy", "unknown"))

    def check_integrity(self) -> None:
        """The server keeps the books."""

    def close(self) -> None:
        self._client.close()


def _name(key: bytes, block_bytes: int) -> bytes:
    return b"%s%d:%s" % (PREFIX, block_bytes, key)


def _fill(record: memoryview, value: bytes | None) -> int | None:
    """What `Medium.read` returns for a value as the server has it."""
    if value is None:
        return None
    if len(value) == len(record):
        record[:] = value
    return len(value)


def _batches(items: Sequence[bytes]) -> Iterator[list[bytes]]:
    rest = iter(items)
    while batch := list(itertools.islice(rest, _BATCH)):
        yield batch


def _client_package() -> Any:
    try:
        import redis
        import redis.backoff
        import redis.retry
    except ModuleNotFoundError as error:
        advice = "pip install 'vllm-gaudi-ucm[redis]' brings it"
        raise ValueError(f"store.kind redis: the Python package redis is missing; {advice}") from error
    return redis
