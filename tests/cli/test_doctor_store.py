"""The doctor's rows on a store: the round trip of each kind, and what will bound it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.store.conftest import redis_server, redis_session
from tests.store.redis_server import RedisServer
from vllm_gaudi_ucm.cli.doctor import doctor
from vllm_gaudi_ucm.cli.doctor.check import Check
from vllm_gaudi_ucm.cli.doctor.store import store_checks

__all__ = ["redis_server", "redis_session"]


def rows(**options: Any) -> dict[str, Check]:
    return {check.name: check for check in store_checks(json.dumps(options))}


def test_without_a_store() -> None:
    assert list(store_checks(None)) == []


def test_file(tmp_path: Path) -> None:
    found = rows(kind="file", path=str(tmp_path / "s"), capacity="2MiB", deadline=20.0)
    trip = found["file store, round trip of 1 MiB"]
    assert (trip.status, [part.split()[0] for part in trip.found.split(", ")]) == (
        "ok",
        ["save", "lookup", "load", "delete"],
    )
    assert found["disk"].status == "ok"
    assert found["disk"].found.endswith(" free, 0 B in the store")
    assert list((tmp_path / "s").rglob("*.kv")) == []


def test_a_capacity_beyond_the_disk(tmp_path: Path) -> None:
    disk = rows(kind="file", path=str(tmp_path / "s"), capacity="900TiB", deadline=20.0)["disk"]
    assert (disk.status, disk.expected) == ("warn", "room for store.capacity, 900 TiB")
    assert "lower store.capacity" in disk.advice


def test_memory() -> None:
    assert rows(kind="memory", pin=False)["memory store, round trip of 1 MiB"].status == "ok"


def test_redis(redis_server: RedisServer) -> None:
    client = redis_server.client()
    found = rows(kind="redis", url=redis_server.url, deadline=20.0)
    assert found["redis store, round trip of 1 MiB"].status == "ok"
    memory = found["server's memory"]
    assert (memory.status, memory.found) == ("warn", "maxmemory unlimited, maxmemory-policy noeviction")
    assert "allkeys-lru" in memory.advice
    client.config_set("maxmemory", "100mb")
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        assert rows(kind="redis", url=redis_server.url, deadline=20.0)["server's memory"].status == "ok"
    finally:
        client.config_set("maxmemory", "0")
        client.config_set("maxmemory-policy", "noeviction")
    assert client.dbsize() == 0


def test_no_server() -> None:
    found = rows(kind="redis", url="redis://127.0.0.1:1/0")
    (trip,) = found.values()
    assert trip.status == "fail"
    assert trip.found.startswith("save failed (2 errors, 0 time-outs")
    assert "redis-cli" in trip.advice


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"kind": "file"}, "store.path"),
        ({"kind": "redis", "deadline": 0}, "store.deadline"),
        ({"kind": "x"}, "store.kind"),
    ],
)
def test_mistakes(options: dict[str, Any], key: str) -> None:
    found = rows(**options)
    assert found[key].status == "fail"


def test_a_capacity_below_a_block_is_a_row(tmp_path: Path) -> None:
    (row,) = rows(kind="file", path=str(tmp_path / "s"), capacity=1).values()
    assert (row.status, row.name) == ("fail", "file")
    assert "store.capacity: found 1 bytes" in row.found


def test_the_doctor_takes_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PluginChecks", lambda: (_ for _ in ()).throw(RuntimeError("not looked at here")))
    options = json.dumps({"kind": "file", "path": str(tmp_path / "s"), "capacity": "2MiB", "deadline": 20.0})
    examination = doctor.examine(None, options)
    assert [check.status for check in examination.checks if check.section == "store"] == ["ok", "ok"]
