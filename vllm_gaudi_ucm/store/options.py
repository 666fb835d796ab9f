"""Options of the stores, by kind: the value of `store` in the connector's options and of `gaudi-ucm store --store`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import SplitResult, parse_qs, urlsplit

from pydantic import Field, ValidationError, field_serializer, field_validator

from vllm_gaudi_ucm.options.errors import NOTE, URL, Problem, UcmConfigError, problems, shown, unknown_key
from vllm_gaudi_ucm.options.files import read_config_file
from vllm_gaudi_ucm.options.section import Section
from vllm_gaudi_ucm.options.values import BYTES_NOTE, ByteSize, may_hold_password, shown_url

_SCHEMES = ("redis", "rediss", "unix")
_DATABASE = re.compile(r"(/[0-9]*)?")


def check_url(url: str) -> None:
    """Raises ValueError, with nothing of the URL in it, unless it is that of a Redis server."""
    try:
        parts = urlsplit(url)
        is_known = parts.scheme in _SCHEMES and (_is_socket(parts) if parts.scheme == "unix" else _is_server(parts))
    except ValueError:
        is_known = False
    if not is_known:
        raise ValueError("not the URL of a Redis server")


def without_password(url: str) -> str:
    """A URL that `check_url` has passed, with *** in the place of user and password."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return parts._replace(netloc=f"***@{parts.netloc.rpartition('@')[2]}").geturl()


def place_of(url: str) -> str:
    """The server, port and database, for people; no user, no password."""
    parts = urlsplit(url)
    where = parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}{parts.path}"
    return f"{parts.scheme}://{where}"


def _is_server(parts: SplitResult) -> bool:
    # What follows a password with one of / ? # in it that is not written as %2F, %3F, %23 would be a host otherwise.
    port = parts.port  # raises ValueError
    return bool(parts.hostname) and port != 0 and bool(_DATABASE.fullmatch(parts.path)) and _ends_well(parts)


def _is_socket(parts: SplitResult) -> bool:
    return bool(parts.path) and _ends_well(parts)


def _ends_well(parts: SplitResult) -> bool:
    """Any other parameter of the client than the database, such as its time-outs, would take the place of ours."""
    query = parse_qs(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    return not parts.fragment and all(name == "db" and value[-1].isdigit() for name, value in query.items())


_BYTES: dict[str, Any] = {NOTE: BYTES_NOTE}
_URL: dict[str, Any] = {
    NOTE: "redis://host:port/database, rediss://host:port/database, or unix:///path?db=database",
    URL: True,
}


class BreakerOptions(Section):
    """When a store that keeps failing is left alone."""

    failures: Annotated[int, Field(ge=1)] = Field(
        default=3, description="Failures and time-outs in a row after which the store is not asked any more."
    )
    seconds: Annotated[float, Field(gt=0)] = Field(
        default=10.0, description="Time until one call tries it again; if that fails, the time begins anew."
    )


class MemoryStoreOptions(Section):
    """Host memory of the engine's process: ends with it."""

    kind: Literal["memory"] = Field(default="memory", description="Blocks in host memory.")
    capacity: ByteSize = Field(
        default=4 << 30,
        description="Most bytes of blocks; the least recently used leave first. Taken from the system as they fill.",
        json_schema_extra=_BYTES,
    )
    pin: Literal["auto"] | bool = Field(
        default="auto", description="Page-locked memory. `auto`: where torch finds a CUDA device or a Gaudi."
    )


class _OutsideOptions(Section):
    """Of a store whose medium can be slow or gone."""

    deadline: Annotated[float, Field(gt=0)] = Field(
        default=0.5,
        description="Seconds that a call may take; after them it is a miss, or a block that is not saved.",
    )
    io_threads: Annotated[int, Field(ge=1, le=64)] = Field(
        default=4, description="Threads that talk to the medium: most calls at once, also where it is stuck."
    )
    breaker: BreakerOptions = Field(default=BreakerOptions(), description="Circuit breaker.")


class FileStoreOptions(_OutsideOptions):
    """Files in a folder, best on a local NVMe; several engines may use one folder."""

    kind: Literal["file"] = Field(default="file", description="Blocks in files.")
    path: Path = Field(
        strict=False,
        description="Folder, made with mode 0700 unless it exists.",
        json_schema_extra={NOTE: "here of a folder"},
    )
    capacity: ByteSize = Field(
        default=32 << 30,
        description="Most bytes of blocks in the folder; the least recently used leave first.",
        json_schema_extra=_BYTES,
    )
    fsync: bool = Field(
        default=True,
        description="Wait until a block is on the disk before it counts as saved. Without it a power cut can lose "
        "blocks that were saved; what is damaged is found by its checksum either way.",
    )

    @field_validator("path")
    @classmethod
    def _whole_path(cls, value: Path) -> Path:
        return value.expanduser().absolute()


class RedisStoreOptions(_OutsideOptions):
    """A Redis or Valkey server, which several engines and machines may share; it bounds itself (maxmemory)."""

    kind: Literal["redis"] = Field(default="redis", description="Blocks in a Redis or Valkey server.")
    url: str = Field(default="redis://127.0.0.1:6379/0", description="The server.", json_schema_extra=_URL)
    ttl: Annotated[float, Field(gt=0)] | None = Field(
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


StoreOptions = Annotated[MemoryStoreOptions | FileStoreOptions | RedisStoreOptions, Field(discriminator="kind")]
"""What `resolve_store_options` returns; as a field of a pydantic model it takes the same mappings."""

KINDS: dict[str, type[MemoryStoreOptions] | type[FileStoreOptions] | type[RedisStoreOptions]] = {
    "memory": MemoryStoreOptions,
    "file": FileStoreOptions,
    "redis": RedisStoreOptions,
}


def resolve_store_options(value: Any, key: str = "store") -> MemoryStoreOptions | FileStoreOptions | RedisStoreOptions:
    """The options in a mapping with the key `kind`, or in the YAML or JSON file at a path, or options as they are.

    Raises `UcmConfigError` that lists every problem by its full name under `key`.
    """
    if isinstance(value, MemoryStoreOptions | FileStoreOptions | RedisStoreOptions):
        return value
    if isinstance(value, str) and may_hold_password(value) and not os.path.isfile(value):
        expected = "a mapping such as {kind: redis, url: ...}, or the path of a file with one"
        raise UcmConfigError([Problem(key, shown_url(value), expected)])
    if isinstance(value, str | Path):
        value = read_config_file(Path(value), key)
    kinds = " or ".join(f'"{kind}"' for kind in KINDS)
    if not isinstance(value, Mapping):
        raise UcmConfigError([Problem(key, shown(value), f"a mapping with the key kind ({kinds}), or a file's path")])
    if "kind" not in value:
        raise UcmConfigError([Problem(f"{key}.kind", "no value", kinds)])
    kind = value["kind"]
    if not isinstance(kind, str) or kind not in KINDS:
        nearest = unknown_key(str(kind), "", list(KINDS)).expected.replace("valid key", "kind of store")
        raise UcmConfigError([Problem(f"{key}.kind", repr(kind), nearest)])
    model = KINDS[kind]
    try:
        return model.model_validate(dict(value))
    except ValidationError as error:
        raise UcmConfigError(list(problems(error, model, key))) from None
