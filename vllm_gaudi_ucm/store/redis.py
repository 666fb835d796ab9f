"""The store `redis`: one value per record in a Redis or Valkey server, which bounds itself."""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal
from urllib.parse import SplitResult, parse_qs, urlsplit

from pydantic import Field, field_serializer, field_validator

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.options.errors import NOTE, URL
from vllm_gaudi_ucm.options.values import show_bytes
from vllm_gaudi_ucm.store.base import HEADER_BYTES, Finding
from vllm_gaudi_ucm.store.guarded import MediumStore
from vllm_gaudi_ucm.store.medium import REFUSED, FullError, Medium, MediumOptions, RefusedError, StoredBlock, Usage

_SCHEMES = ("redis", "rediss", "unix")
_DATABASE = re.compile(r"(/[0-9]*)?")


def check_url(url: str) -> None:
    """Raises ValueError, without quoting the URL, unless it is the URL of a Redis server."""
    try:
        parts = urlsplit(url)
        is_known = parts.scheme in _SCHEMES and (_is_socket(parts) if parts.scheme == "unix" else _is_server(parts))
    except ValueError:
        is_known = False
    if not is_known:
        raise ValueError("not the URL of a Redis server")


def without_password(url: str) -> str:
    """Returns a URL that `check_url` has passed, with *** instead of user and password."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return parts._replace(netloc=f"***@{parts.netloc.rpartition('@')[2]}").geturl()


def place_of(url: str) -> str:
    """Returns server, port and database, for messages; without user and password."""
    parts = urlsplit(url)
    where = parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}{parts.path}"
    return f"{parts.scheme}://{where}"


def _is_server(parts: SplitResult) -> bool:
    # Otherwise, the text after an unescaped / ? # in a password would be taken for a host.
    port = parts.port  # raises ValueError
    return bool(parts.hostname) and port != 0 and bool(_DATABASE.fullmatch(parts.path)) and _ends_well(parts)


def _is_socket(parts: SplitResult) -> bool:
    return bool(parts.path) and _ends_well(parts)


def _ends_well(parts: SplitResult) -> bool:
    """True if the query names a database at most: other client parameters, such as time-outs, would override ours."""
    query = parse_qs(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    return not parts.fragment and all(name == "db" and value[-1].isdigit() for name, value in query.items())


_URL: dict[str, Any] = {
    NOTE: "redis://host:port/database, rediss://host:port/database, or unix:///path?db=database",
    URL: True,
}


class RedisStoreOptions(MediumOptions):
    """A Redis or Valkey server, which several engines and machines may share; it bounds itself (maxmemory)."""

    kind: Literal["redis"] = Field(default="redis", description="Blocks in a Redis or Valkey server.")
    url: str = Field(default="redis://127.0.0.1:6379/0", description="The server.", json_schema_extra=_URL)
    # milliseconds are 64 bits there
    ttl: Annotated[float, Field(gt=0, le=4294967295)] | None = Field(
        default=None, description="Seconds after its last save or load at which a block expires; null: never."
    )

    @field_validator("url")
    @classmethod
    def _known_url(cls, value: str) -> str:
        check_url(value)
        return value

    @field_serializer("url", when_used="json")
    def _shown_url(self, value: str) -> str:
        return without_password(value)

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, without_password(value) if name == "url" else value


PREFIX = b"gaudi-ucm:1:"
_KEY_BYTES = 32
_BATCH = 512
_MOST_STRANGERS = 1000
_READ_BYTES = 1 << 18
"""Bytes asked of the socket at once. With the client's own 64 KiB blocks of 1 MiB came at 743 MiB/s instead of 1541."""
_OUT_OF_MEMORY = "OOM"
_OF_ANOTHER_TYPE = "WRONGTYPE"
logger = plugin_logger(__name__)


class RedisMedium(Medium):
    """Values `gaudi-ucm:1:<bytes of a block>:<key>` in one database of a server. Opening it does not connect."""

    kind = "redis"
    upkeep_seconds = 1.0
    batch_bytes = 1 << 20  # the client takes and clears new memory for the answers to a call: larger calls are slower

    def __init__(self, options: RedisStoreOptions) -> None:
        redis = _client_package()
        self.errors = (OSError, redis.RedisError)
        self._refused: type[Exception] = redis.ResponseError
        self._place = f"redis store {place_of(options.url)}"
        self._ttl_ms = None if options.ttl is None else max(1, int(options.ttl * 1000))
        self._keys = 0  # of the database, as last reported; this process's own changes are counted at once
        self._maxmemory: int | None = None
        self._strangers: dict[bytes, str] = {}
        # No retries: the deadline is short, and the circuit breaker decides what happens after a failure.
        how: dict[str, Any] = {
            "socket_timeout": options.deadline,
            "socket_connect_timeout": options.deadline,
            "socket_read_size": _READ_BYTES,
            "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0),
        }
        self._client: Any = redis.Redis.from_url(options.url, **how)
        # connections of its own: blocks that they read do not become newer
        self._looker: Any = redis.Redis.from_url(options.url, redis_connect_func=self._connect_to_look, **how)

    def place(self) -> str:
        return self._place

    def lookup(self, keys: Sequence[bytes], block_bytes: int) -> list[bool]:
        found = []
        for names in _batches([_name(key, block_bytes) for key in keys]):
            with self._client.pipeline(transaction=False) as pipeline:
                for name in names:
                    pipeline.strlen(name)
                sizes = zip(pipeline.execute(raise_on_error=False), names, strict=True)
            found += [self._answer(size, name) == HEADER_BYTES + block_bytes for size, name in sizes]
        return found

    def keep(self, key: bytes, block_bytes: int) -> bool:
        name = _name(key, block_bytes)
        with self._client.pipeline(transaction=False) as pipeline:
            pipeline.strlen(name)
            size = self._answer(pipeline.execute(raise_on_error=False)[0], name)
        if size == REFUSED:
            raise RefusedError(f"the value of {name!r} is no block")
        if size != HEADER_BYTES + block_bytes or self._ttl_ms is None:
            return bool(size == HEADER_BYTES + block_bytes)
        with self._client.pipeline(transaction=False) as pipeline:
            pipeline.pexpire(name, self._ttl_ms)
            return self._touched(pipeline.execute(raise_on_error=False)[0])

    def read(self, key: bytes, block_bytes: int, record: memoryview) -> int | None:
        return next(self.read_many([key], block_bytes, [record]))

    def peek(self, key: bytes, block_bytes: int, record: memoryview) -> int | None:
        name = _name(key, block_bytes)
        with self._looker.pipeline(transaction=False) as pipeline:
            pipeline.get(name)
            value = self._answer(pipeline.execute(raise_on_error=False)[0], name)
        return REFUSED if value == REFUSED else _fill(record, value)

    def read_many(self, keys: Sequence[bytes], block_bytes: int, records: Sequence[memoryview]) -> Iterator[int | None]:
        """Reads in one round trip; the time to live is renewed apart: a server that refuses writes still answers."""
        names = [_name(key, block_bytes) for key in keys]
        with self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.get(name)
            if self._ttl_ms is not None:
                for name in names:
                    pipeline.pexpire(name, self._ttl_ms)
            answers = pipeline.execute(raise_on_error=False)
        for index, (name, record) in enumerate(zip(names, records, strict=True)):
            value = self._answer(answers[index], name, refusals=True)
            if value is not None and value != REFUSED and self._ttl_ms is not None:
                self._touched(answers[len(names) + index])
            yield REFUSED if value == REFUSED else _fill(record, value)

    def write(self, key: bytes, record: memoryview) -> bool:
        try:
            self._client.set(_name(key, len(record) - HEADER_BYTES), record, px=self._ttl_ms)
        except self._refused as error:
            if _OUT_OF_MEMORY in str(error) or type(error).__name__ == "OutOfMemoryError":
                raise FullError(f"the server has reached its maxmemory and may not evict ({error})") from error
            raise FullError(f"the server refuses to write: {error}") from error
        self._keys += 1
        return True

    def delete(self, blocks: Sequence[StoredBlock]) -> int:
        names, removed = [_name(block.key, block.block_bytes) for block in blocks], 0
        for batch in _batches(names):
            gone = self._client.unlink(*batch)
            self._keys -= gone
            removed += gone
        return removed

    def strangers(self) -> list[str]:
        return [f"{name!r} ({error})" for name, error in self._strangers.items()]

    def blocks(self, block_bytes: int | None = None) -> Iterator[StoredBlock]:
        pattern = PREFIX + (b"*" if block_bytes is None else b"%d:*" % block_bytes)
        seen = set()  # a scan may return a key twice
        for name in self._client.scan_iter(match=pattern, count=_BATCH):
            size, _, key = name.removeprefix(PREFIX).partition(b":")
            block = StoredBlock(key, int(size)) if size.isdigit() and len(key) == _KEY_BYTES else None
            if block is not None and block not in seen:
                seen.add(block)
                yield block

    def usage(self, block_bytes: int) -> Usage:
        """Counts every key of the database, whatever its name."""
        keys = max(0, self._keys)
        return Usage(keys, keys * block_bytes, self._maxmemory)

    def upkeep(self) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            keys, info = pipeline.dbsize().info("memory").execute()
        self._keys, self._maxmemory = keys, info.get("maxmemory") or None

    def memory_policy(self) -> tuple[int, str]:
        """Returns the server's `maxmemory` in bytes (0: unbounded) and its eviction policy."""
        info = self._client.info("memory")
        return int(info.get("maxmemory", 0)), str(info.get("maxmemory_policy", "unknown"))

    def check_integrity(self) -> None:
        """Does nothing: the server keeps the counts."""

    def close(self) -> None:
        self._client.close()
        self._looker.close()

    def _answer(self, answer: Any, name: bytes, refusals: bool = False) -> Any:
        """Returns an answer of the server; REFUSED for a value of another type, which no store wrote. Raises other
        errors.

        refusals: return REFUSED for everything that the server refuses.
        """
        if not isinstance(answer, Exception):
            return answer
        is_stranger = isinstance(answer, self._refused) and str(answer).startswith(_OF_ANOTHER_TYPE)
        if is_stranger and len(self._strangers) < _MOST_STRANGERS:
            self._strangers[name] = "a value of another type"
        if is_stranger or (refusals and isinstance(answer, self._refused)):
            return REFUSED
        raise answer

    def _touched(self, answer: Any) -> bool:
        """True if the value whose time to live was renewed still exists."""
        if isinstance(answer, self._refused):
            self.untouched += 1
            if self.untouched == 1:
                what = "a block's time to live could not be renewed (logged once)"
                logger.warning("%s: %s: %s", self._place, what, answer)
            return True
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    def _connect_to_look(self, connection: Any) -> None:
        """Makes reads of this connection not count as uses, if the server supports that (version 7.2 and later)."""
        connection.on_connect()
        connection.send_command("CLIENT", "NO-TOUCH", "ON")
        with suppress(self._refused):
            connection.read_response()


def _name(key: bytes, block_bytes: int) -> bytes:
    return b"%s%d:%s" % (PREFIX, block_bytes, key)


def _fill(record: memoryview, value: bytes | None) -> int | None:
    """Returns the result of `Medium.read` for a value of the server."""
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
        advice = "pip install 'vllm-gaudi-ucm[redis]'"
        raise ValueError(f"store.kind redis: the Python package redis is missing; {advice}") from error
    return redis


class RedisStore(MediumStore):
    """Blocks in a Redis or Valkey server. A server that does not answer is no error: the store misses until then."""

    Options = RedisStoreOptions
    advice = "check that the server runs at store.url and answers: redis-cli -u URL ping"

    @classmethod
    def open_medium(cls, options: RedisStoreOptions, create: bool = True, evicts: bool = True) -> RedisMedium:
        """Opens the medium. Ignores create and evicts: nothing is created, and the server has its own policy."""
        return RedisMedium(options)

    @classmethod
    def findings(cls, options: RedisStoreOptions) -> Iterator[Finding]:
        medium = cls.open_medium(options)
        try:
            bound, policy = medium.memory_policy()
        except medium.errors:
            return  # the round trip has failed, too, and reports it
        finally:
            medium.close()
        is_good = bool(bound) and policy != "noeviction"
        found = f"maxmemory {show_bytes(bound) if bound else 'unlimited'}, maxmemory-policy {policy}"
        advice = "redis-cli config set maxmemory 16gb; redis-cli config set maxmemory-policy allkeys-lru"
        yield Finding("server's memory", is_good, found, "a bound, and a policy that evicts", "" if is_good else advice)
