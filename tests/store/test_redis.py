"""The redis store against a real server: killed, frozen, full, shared, expiring."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.store.blocks import BLOCK_BYTES, block, holds, key, loaded
from tests.store.redis_server import RedisServer, needs_redis
from vllm_gaudi_ucm.cli import main as cli
from vllm_gaudi_ucm.options.errors import UcmConfigError
from vllm_gaudi_ucm.store.factory import open_medium, resolve_store_options
from vllm_gaudi_ucm.store.redis import RedisMedium


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Starts servers that the test may harm."""
    needs_redis()
    servers: list[RedisServer] = []

    def start(*options: str) -> RedisServer:
        servers.append(RedisServer(tmp_path, *options))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


def options(server: RedisServer, **more: Any) -> dict[str, Any]:
    return {"kind": "redis", "url": server.url, "deadline": 5.0, "breaker": {"failures": 2, "seconds": 0.3}, **more}


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_engines_share_a_server(redis_server: RedisServer, open_one: Any) -> None:
    one, two = (open_one(options(redis_server)) for _ in range(2))
    one.save(key(1), block(1))
    assert holds(two, range(3)) == [1]
    assert two.save(key(1), block(1))
    assert two.stats().saves == 0  # it was there


def test_a_killed_server_is_a_miss_until_it_is_back(own_server: Callable[..., RedisServer], open_one: Any) -> None:
    """covers: D4"""
    server = own_server()
    store = open_one(options(server))
    store.save(key(1), block(1))
    server.kill()
    for _ in range(4):
        assert loaded(store, 1) is None
        assert not store.save(key(2), block(2))
    assert store.stats().breaker in ("open", "half_open")
    assert store.stats().errors >= 2
    server.start()
    until(lambda: store.save(key(3), block(3)))
    assert store.stats().breaker == "closed"
    assert holds(store, range(5)) == [3]


def test_a_frozen_server_costs_the_deadline(own_server: Callable[..., RedisServer], open_one: Any) -> None:
    """covers: D4. Connected, and silent."""
    server = own_server()
    store = open_one(options(server, deadline=0.2))
    store.save(key(1), block(1))
    server.freeze()
    try:
        for _ in range(2):
            begin = time.monotonic()
            assert loaded(store, 1) is None
            assert time.monotonic() - begin < 10
        assert store.stats().timeouts + store.stats().errors == 2
        before = store.stats()
        assert store.lookup([key(1)]) == [False]  # the breaker is open: nobody is asked
        after = store.stats()
        assert (after.timeouts, after.errors) == (before.timeouts, before.errors)
    finally:
        server.thaw()
    until(lambda: loaded(store, 1) == block(1))


def test_no_server_at_the_start_is_no_error(own_server: Callable[..., RedisServer], open_one: Any) -> None:
    server = own_server()
    server.kill()
    store = open_one(options(server))
    assert store.lookup([key(1)]) == [False]
    server.start()
    until(lambda: store.save(key(1), block(1)))


def test_a_full_server_keeps_what_it_has(own_server: Callable[..., RedisServer], open_one: Any) -> None:
    server = own_server("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    size = 256 << 10
    store = open_one(options(server), size)
    saved = [number for number in range(16) if store.save(key(number), block(number, size))]
    assert 0 < len(saved) < 16
    stats = store.stats()
    assert (stats.errors, stats.breaker) == (16 - len(saved), "closed")
    assert all(loaded(store, number, size) == block(number, size) for number in saved)
    until(lambda: store.stats().capacity == 3 << 20)


def test_a_server_that_evicts_goes_on(own_server: Callable[..., RedisServer], open_one: Any) -> None:
    server = own_server("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
    size = 256 << 10
    store = open_one(options(server), size)
    assert all(store.save(key(number), block(number, size)) for number in range(16))
    found = [number for number in range(16) if loaded(store, number, size) == block(number, size)]
    assert found
    assert found[-1] == 15
    until(lambda: store.stats().blocks == len(found))


def test_corrupt_values_are_misses(redis_server: RedisServer, open_one: Any) -> None:
    """covers: D3"""
    store = open_one(options(redis_server))
    client = redis_server.client()
    for number in range(3):
        store.save(key(number), block(number))
    names = sorted(client.keys())
    client.setrange(names[0], 500, b"\x00" * 8)
    client.set(names[1], b"short")
    client.rename(names[2], b"kept")
    client.hset(names[2], "a", "b")  # a value of another type is refused by the server
    assert holds(store, []) == []
    assert [loaded(store, number) for number in range(3)] == [None] * 3
    stats = store.stats()
    assert (stats.corrupt, stats.errors, stats.hits) == (2, 1, 0)


def test_other_keys_of_the_database_stay(redis_server: RedisServer, open_one: Any) -> None:
    client = redis_server.client()
    client.set("mine", "1")
    client.set("gaudi-ucm:1:oddly", "2")
    store = open_one(options(redis_server))
    store.save(key(1), block(1))
    assert store.verify() == (1, 0)
    assert store.clear() == 1
    assert sorted(client.keys()) == [b"gaudi-ucm:1:oddly", b"mine"]


def test_ttl_counts_from_the_last_use(redis_server: RedisServer, open_one: Any) -> None:
    """Option ttl."""
    client = redis_server.client()
    store = open_one(options(redis_server, ttl=100.0))
    store.save(key(1), block(1))
    (name,) = client.keys()
    assert 90_000 < client.pttl(name) <= 100_000
    for use in (lambda: loaded(store, 1), lambda: store.save(key(1), block(1))):
        client.pexpire(name, 5000)
        use()
        assert client.pttl(name) > 90_000
    forever = open_one(options(redis_server))
    forever.save(key(2), block(2))
    assert sorted(client.ttl(n) < 0 for n in client.scan_iter()) == [False, True]


def test_databases_are_apart(redis_server: RedisServer, open_one: Any) -> None:
    """Option url."""
    other = open_one({**options(redis_server), "url": redis_server.url[:-1] + "1"})
    store = open_one(options(redis_server))
    store.save(key(1), block(1))
    assert loaded(other, 1) is None
    assert store.delete([key(1)]) == 1


def test_unix_socket(own_server: Callable[..., RedisServer], open_one: Any, tmp_path: Path) -> None:
    own_server("--unixsocket", str(tmp_path / "s"), "--unixsocketperm", "700")
    store = open_one({"kind": "redis", "url": f"unix://{tmp_path}/s?db=2"})
    assert store.save(key(1), block(1))
    assert loaded(store, 1) == block(1)


def test_lookups_of_several_batches(redis_server: RedisServer, open_one: Any) -> None:
    store = open_one(options(redis_server))
    store.save(key(700), block(700))
    assert [n for n, there in enumerate(store.lookup([key(n) for n in range(1500)])) if there] == [700]


def test_passwords_are_not_shown() -> None:
    medium = open_medium(resolve_store_options({"kind": "redis", "url": "redis://me:secret@127.0.0.1:7/3"}))
    assert medium.place() == "redis store redis://127.0.0.1:7/3"
    assert isinstance(medium, RedisMedium)


def test_the_client_package_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ValueError, match=r"package redis is missing; pip install 'vllm-gaudi-ucm\[redis\]'"):
        open_medium(resolve_store_options({"kind": "redis"}))


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_a_machine_without_a_server(monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[Exception]) -> None:
    """These tests are skipped there, but never silently where a change is being judged."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="redis-server is not on PATH"):
        needs_redis()


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1", "redis://", "127.0.0.1:6379", "redis://h?socket_timeout=60", "unix://"]
)
def test_wrong_urls(url: str) -> None:
    with pytest.raises(UcmConfigError, match=r"store\.url: found .*expected text \(redis://host:port"):
        resolve_store_options({"kind": "redis", "url": url})


def test_blocks_of_another_size_are_not_lookup_hits(redis_server: RedisServer, open_one: Any) -> None:
    store = open_one(options(redis_server))
    store.save(key(1), block(1))
    (name,) = redis_server.client().keys()
    redis_server.client().append(name, b"x")
    assert store.lookup([key(1)]) == [False]
    assert store.stats().bytes == BLOCK_BYTES


def test_verify_renews_no_time_to_live_and_no_age(own_server: Callable[..., RedisServer], open_one: Any) -> None:
    """Who only looks leaves to the server what it would have expired or evicted next."""
    server = own_server()
    client = server.client()
    store = open_one(options(server, ttl=1000.0))
    store.save(key(1), block(1))
    (name,) = client.keys()
    client.pexpire(name, 50_000)
    time.sleep(1.5)
    assert store.verify() == (1, 0)
    assert cli.main(["store", "verify", "--store", json.dumps(options(server, ttl=1000.0))]) == 0
    assert client.pttl(name) <= 48_500
    info = client.info("server")
    version = info.get("valkey_version") or info["redis_version"]
    if tuple(map(int, version.split(".")[:2])) >= (7, 2):  # older ones cannot read a value without marking it as used
        assert client.object("idletime", name) >= 1
        loaded(store, 1)
        assert client.object("idletime", name) == 0


def test_a_server_that_refuses_writes_still_loads(
    own_server: Callable[..., RedisServer], open_one: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """covers: F7. As a replica, or one that cannot persist: what it has is loaded though its time is not renewed."""
    server = own_server()
    store = open_one(options(server, ttl=1000.0))
    for number in range(3):
        store.save(key(number), block(number))
    server.client().config_set("min-replicas-to-write", "1")
    for _ in range(2):
        assert [loaded(store, number) == block(number) for number in range(3)] == [True] * 3
    for number in range(10, 14):
        assert not store.save(key(number), block(number))
    assert store.save(key(1), block(1))  # it is there
    stats = store.stats()
    assert (stats.breaker, stats.hits, stats.untouched, stats.errors) == ("closed", 6, 7, 4)
    assert len([entry for entry in caplog.records if "could not be renewed" in entry.getMessage()]) == 1
    server.client().config_set("min-replicas-to-write", "0")
    assert store.save(key(20), block(20))
    until(lambda: store.stats().blocks == 4)


def test_a_value_of_another_type_under_our_name(redis_server: RedisServer, open_one: Any, capsys: Any) -> None:
    """It is neither read, replaced nor counted as corrupt; the other keys of a call are answered."""
    store = open_one(options(redis_server, breaker={"failures": 1, "seconds": 100.0}))
    client = redis_server.client()
    for number in (1, 2):
        store.save(key(number), block(number))
    (name,) = [name for name in client.scan_iter() if name.endswith(key(1))]
    client.delete(name)
    client.hset(name, "a", "b")
    for _ in range(3):
        assert store.lookup([key(1), key(2)]) == [False, True]
        assert loaded(store, 1) is None
        assert not store.save(key(1), block(1))
        assert loaded(store, 2) == block(2)
    assert store.verify() == (1, 0)
    assert store.stats().breaker == "closed"
    assert client.hgetall(name) == {b"a": b"b"}
    assert cli.main(["store", "verify", "--url", redis_server.url]) == 0
    assert f"{name!r} (a value of another type)" in capsys.readouterr().out
