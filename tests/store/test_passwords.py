"""The password in a Redis URL reaches nobody: no error, log, table, JSON, repr or traceback, right or wrong."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.store.blocks import block, key
from tests.store.redis_server import RedisServer, needs_redis
from vllm_gaudi_ucm.cli import main as cli
from vllm_gaudi_ucm.cli.doctor import doctor
from vllm_gaudi_ucm.cli.doctor.store import store_checks
from vllm_gaudi_ucm.config.ucm_config import resolve_config
from vllm_gaudi_ucm.connector.transfer_config import EXTRA_CONFIG, ConnectorOptions
from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError
from vllm_gaudi_ucm.options.values import shown_url
from vllm_gaudi_ucm.store.factory import open_medium, open_store, resolve_store_options
from vllm_gaudi_ucm.store.redis import RedisStoreOptions

PASSWORD = "hunter2"
RIGHT = f"redis://me:{PASSWORD}@127.0.0.1:1/3"
WRONG = [
    f"http://:{PASSWORD}@127.0.0.1",
    f"redis://:{PASSWORD}@",
    f"redis://:{PASSWORD}",
    f"redis://me:{PASSWORD}",
    f"redis:/me:{PASSWORD}@host",
    f"me:{PASSWORD}@host:6379",
    f":{PASSWORD}@host",
    f"redis://me:{PASSWORD}@host:port/0",
    f"redis://me:{PASSWORD}/x@host:6379/0",
    f"redis://me:12/{PASSWORD}@host:6379/0",
    f"redis://me:a@{PASSWORD}#b@host:6379/0",
    f"redis://me:a@b?{PASSWORD}@host:6379/0",
    f"redis://me:{PASSWORD}@[::1/0",
    f"redis://host:6379/0?password={PASSWORD}",
    f"redis://host:6379/0?db={PASSWORD}",
    f"redis://host:6379/{PASSWORD}",
    f"redis://me:x {PASSWORD}@host:port",
    f"redis://me:'x'\"{PASSWORD}@host:port",
    f"unix://me:{PASSWORD}@",
    f"unix:///run/redis?password={PASSWORD}",
]


def everything_of(error: BaseException) -> str:
    """What anybody could print of an error and of those behind it."""
    parts, seen = ["".join(traceback.format_exception(error))], [error]
    while seen:
        this = seen.pop()
        parts += [str(this), repr(this)]
        seen += [behind for behind in (this.__cause__, this.__context__) if behind is not None]
    return "\n".join(parts)


OPENERS: dict[str, Callable[[str], Any]] = {
    "store": lambda url: resolve_store_options({"kind": "redis", "url": url}),
    "list": lambda url: resolve_store_options({"kind": "redis", "url": [url]}),
    "instead of a mapping": resolve_store_options,
    "in a list": lambda url: resolve_store_options([url]),
    "as the kind": lambda url: resolve_store_options({"kind": url}),
    "connector": lambda url: ConnectorOptions.resolve({"store": {"kind": "redis", "url": url}}, EXTRA_CONFIG),
    "connector, flat": lambda url: ConnectorOptions.resolve({"store": url}, EXTRA_CONFIG),
    "memory mode": lambda url: resolve_config({"ucm": {"memory_mode": {"store": {"kind": "redis", "url": url}}}}),
    "memory mode, flat": lambda url: resolve_config({"ucm": {"memory_mode": url}}),
}


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("url", WRONG)
def test_errors(opener: str, url: str) -> None:
    flat = opener in ("in a list", "as the kind", "memory mode, flat")
    if flat and "@" not in url:
        pytest.skip("nothing there says that this is a URL")
    with pytest.raises(UcmConfigError) as error:
        OPENERS[opener](url)
    assert PASSWORD not in everything_of(error.value)
    assert all(PASSWORD not in problem.found for problem in error.value.problems)


@pytest.mark.parametrize("url", ["ftp://x", "redis://host:6379/0", "127.0.0.1:6379", "unix:///run/redis.sock?db=2"])
def test_what_holds_no_password_is_shown(url: str) -> None:
    assert shown_url(url) == repr(url)
    assert Problem("a", "/some/file: 3", "b").found == "/some/file: 3"


@pytest.mark.parametrize(
    "url", [RIGHT, f"rediss://:{PASSWORD}@h", f"unix://me:{PASSWORD}@/s?db=1", f"redis://:' {PASSWORD}@@h"]
)
def test_options(url: str) -> None:
    """They are printed by `config --check`, `doctor`, and whoever logs them; the client gets the true one."""
    options = RedisStoreOptions(url=url)
    assert options.url == url
    assert options.model_dump()["url"] == url
    connector = ConnectorOptions.resolve({"store": options}, EXTRA_CONFIG)
    config = resolve_config({"ucm": {"memory_mode": {"store": options.model_dump()}}})
    shown = [repr(options), str(options), options.model_dump_json(), repr(connector), connector.model_dump_json()]
    shown += [repr(config), json.dumps(config.to_dict())]
    for text in shown:
        assert PASSWORD not in text
        assert "***@" in text


def test_a_server_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        store = open_store(resolve_store_options({"kind": "redis", "url": RIGHT}), 4096)
        for _ in range(4):
            assert not store.save(key(1), block(1))
        assert store.verify() == (0, 0)
        store.close()
    text = caplog.text + "".join(map(repr, caplog.records)) + repr(vars(store))
    assert "redis://127.0.0.1:1/3" in text
    assert PASSWORD not in text


@pytest.fixture
def locked_server(tmp_path: Path) -> Iterator[RedisServer]:
    needs_redis()
    server = RedisServer(tmp_path)
    server.client().config_set("requirepass", "another")
    yield server
    server.kill()


def test_a_server_that_takes_another_password(locked_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    url = f"redis://:{PASSWORD}@127.0.0.1:{locked_server.port}/0"
    with caplog.at_level(logging.DEBUG):
        store = open_store(resolve_store_options({"kind": "redis", "url": url, "deadline": 20.0}), 4096)
        for _ in range(4):
            assert not store.save(key(1), block(1))
        store.close()
    assert PASSWORD not in caplog.text
    right = url.replace(PASSWORD, "another")
    store = open_store(resolve_store_options({"kind": "redis", "url": right, "deadline": 20.0}), 4096)
    assert store.save(key(1), block(1))
    store.close()


@pytest.mark.parametrize("url", [RIGHT, *WRONG])
@pytest.mark.parametrize("action", ["stat", "verify"])
@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_the_store_command(action: str, url: str, json_flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for place in (["--url", url], ["--store", json.dumps({"kind": "redis", "url": url})], ["--store", url]):
        assert cli.main(["store", action, *json_flag, *place]) == 2
        written = capsys.readouterr()
        assert PASSWORD not in written.out + written.err, place


def test_the_store_command_with_its_traceback() -> None:
    for url in (RIGHT, *WRONG):
        with pytest.raises((ValueError, OSError)) as error:
            cli.main(["--traceback", "store", "stat", "--url", url])
        assert PASSWORD not in everything_of(error.value)


@pytest.mark.parametrize("url", [RIGHT, *WRONG])
def test_the_config_command(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ucm.json"
    for store in ({"kind": "redis", "url": url}, {"kind": "redis", "url": url, "deadline": -1}, url):
        file.write_text(json.dumps({"ucm": {"memory_mode": {"store": store}}}))
        for json_flag in ([], ["--json"]):
            cli.main(["config", "--check", str(file), *json_flag])
            written = capsys.readouterr()
            assert PASSWORD not in written.out + written.err


@pytest.mark.parametrize("url", [RIGHT, *WRONG])
def test_the_doctor(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (json.dumps({"kind": "redis", "url": url}), url):
        assert PASSWORD not in "".join(map(repr, store_checks(text)))
    monkeypatch.setattr(doctor, "PluginChecks", lambda: (_ for _ in ()).throw(RuntimeError("not looked at here")))
    config = json.dumps({"memory_mode": {"store": {"kind": "redis", "url": url}}})
    assert PASSWORD not in repr(doctor.examine(config, None))


def test_the_medium_keeps_none() -> None:
    medium = open_medium(resolve_store_options({"kind": "redis", "url": RIGHT}))
    assert medium.place() == "redis store redis://127.0.0.1:1/3"
    assert PASSWORD not in repr(vars(medium))
    medium.close()
