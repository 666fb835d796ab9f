"""Options of the stores: defaults, sizes as text, and every mistake named by its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_gaudi_ucm.memory_mode.options import MemoryModeOptions
from vllm_gaudi_ucm.options.errors import UcmConfigError
from vllm_gaudi_ucm.options.values import parse_bytes, show_bytes
from vllm_gaudi_ucm.store.factory import resolve_store_options
from vllm_gaudi_ucm.store.file import FileStoreOptions
from vllm_gaudi_ucm.store.memory import MemoryStoreOptions


def test_defaults() -> None:
    memory = resolve_store_options({"kind": "memory"})
    assert memory == MemoryStoreOptions(capacity=4 << 30, pin="auto")
    file = resolve_store_options({"kind": "file", "path": "~/kv"})
    assert isinstance(file, FileStoreOptions)
    assert file.path == Path.home() / "kv"
    assert (file.capacity, file.deadline, file.fsync, file.breaker.failures) == (32 << 30, 0.5, True, 3)
    assert resolve_store_options({"kind": "redis"}).model_dump()["url"] == "redis://127.0.0.1:6379/0"
    assert resolve_store_options(file) is file


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4GiB", 4 << 30), ("1.5 kb", 1500), ("7", 7), ("2 MB", 2_000_000), ("1tib", 1 << 40), ("3B", 3), (12, 12)],
)
def test_sizes(text: Any, expected: int) -> None:
    assert parse_bytes(text) == expected
    assert resolve_store_options({"kind": "memory", "capacity": text}).capacity == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1020 << 10, "1,020 KiB"),
        (1536, "1.5 KiB"),
        (4 << 30, "4 GiB"),
        (3 << 40, "3 TiB"),
        (5 << 50, "5,120 TiB"),
    ],
)
def test_sizes_as_shown(count: int, text: str) -> None:
    assert show_bytes(count) == text


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "store: found 3, expected a mapping with the key kind"),
        ({}, 'store.kind: found no value, expected "memory" or "file" or "redis"'),
        ({"kind": "files"}, "store.kind: found 'files', expected file (the nearest kind of store)"),
        ({"kind": ["file"]}, "store.kind: found ['file'], expected"),
        ({"kind": "file"}, "store.path: found"),
        ({"kind": "memory", "capacity": "4 pounds"}, "store.capacity: found '4 pounds', expected integer, at least 1"),
        ({"kind": "memory", "capacity": 0}, "store.capacity: found 0, expected integer, at least 1"),
        ({"kind": "memory", "path": "/x"}, "store.path: found an unknown key"),
        ({"kind": "memory", "pin": "yes"}, "store.pin: found 'yes'"),
        ({"kind": "file", "path": "/x", "deadline": "1"}, "store.deadline: found '1', expected number, above 0"),
        ({"kind": "file", "path": "/x", "deadline": 0}, "store.deadline: found 0"),
        (
            {"kind": "redis", "deadline": 1e300},
            "store.deadline: found 1e+300, expected number, above 0 and at most 3600",
        ),
        ({"kind": "redis", "ttl": 1e300}, "store.ttl: found 1e+300, expected number, above 0 and at most 4294967295"),
        ({"kind": "file", "path": "/x", "io_threads": 65}, "store.io_threads: found 65, expected integer, 1 to 64"),
        ({"kind": "file", "path": "/x", "fsync": 1}, "store.fsync: found 1, expected true or false"),
        ({"kind": "redis", "ttl": -1.0}, "store.ttl: found -1.0"),
        ({"kind": "redis", "breaker": {"failures": 0}}, "store.breaker.failures: found 0"),
        (
            {"kind": "redis", "breaker": {"second": 1.0}},
            "store.breaker.second: found an unknown key, expected store.break",
        ),
    ],
)
def test_mistakes(value: Any, message: str) -> None:
    """covers: C4, C19"""
    with pytest.raises(UcmConfigError) as error:
        resolve_store_options(value)
    assert message in str(error.value)


def test_every_mistake_is_listed_under_the_given_key() -> None:
    with pytest.raises(UcmConfigError) as error:
        resolve_store_options({"kind": "file", "path": "/x", "deadline": 0, "capacity": "x", "odd": 1}, "extra.store")
    assert {problem.key for problem in error.value.problems} == {
        f"extra.store.{n}" for n in ("deadline", "capacity", "odd")
    }


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_options_from_a_file(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"store.{suffix}"
    file.write_text(json.dumps({"store": {"kind": "memory", "capacity": "1MiB"}}))
    assert resolve_store_options(str(file)) == MemoryStoreOptions(capacity=1 << 20)


def test_as_a_field_of_other_options() -> None:
    outer = MemoryModeOptions.model_validate({"store": {"kind": "memory", "capacity": "1MiB"}})
    assert outer.store == MemoryStoreOptions(capacity=1 << 20)
    assert MemoryModeOptions.model_validate(outer.model_dump(mode="json")) == outer
