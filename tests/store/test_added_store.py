"""A store of somebody else's package: one file and an entry point; our code does not know it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_gaudi_ucm.cli import main as cli
from vllm_gaudi_ucm.cli.doctor.store import store_checks
from vllm_gaudi_ucm.config.ucm_config import describe_section, markdown_table, resolve_config
from vllm_gaudi_ucm.connector.transfer_config import EXTRA_CONFIG, ConnectorOptions
from vllm_gaudi_ucm.options.errors import UcmConfigError
from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.prefetch.tasks import PrefetchOutcome
from vllm_gaudi_ucm.registry import RegistryError
from vllm_gaudi_ucm.store.factory import STORES, open_store, resolve_store_options, store_class

BLOCK_BYTES = 64
SOURCE = '''
from typing import Annotated, Literal

from pydantic import Field

from vllm_gaudi_ucm.store.base import ConfiguredStore, Finding, StoreOptions, StoreStats


class ShelfOptions(StoreOptions):
    """A dictionary."""

    kind: Literal["shelf"] = Field(default="shelf", description="Blocks in a dictionary.")
    boards: Annotated[int, Field(ge=1)] = Field(default=3, description="Boards of the shelf.")


class ShelfStore(ConfiguredStore):
    Options = ShelfOptions

    def __init__(self, options):
        self.options = options
        self.blocks = {}

    @classmethod
    def open(cls, options, block_bytes, evicts=True):
        return cls(options)

    @classmethod
    def findings(cls, options):
        yield Finding("boards", options.boards > 1, f"{options.boards} boards", "more than one", "add a board")

    def lookup(self, keys):
        return [key in self.blocks for key in keys]

    def load(self, key, into):
        if key in self.blocks:
            into[:] = self.blocks[key]
        return key in self.blocks

    def save(self, key, block):
        self.blocks[key] = bytes(block)
        return True

    def delete(self, keys):
        return sum(self.blocks.pop(key, None) is not None for key in keys)

    def clear(self):
        return self.delete(list(self.blocks))

    def verify(self):
        return len(self.blocks), 0

    def stats(self):
        return StoreStats(kind="shelf", blocks=len(self.blocks))

    def close(self):
        pass
'''


@pytest.fixture(autouse=True)
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package, as pip would install it."""
    (tmp_path / "their_shelf.py").write_text(SOURCE)
    info = tmp_path / "shelf-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm_gaudi_ucm.stores]\nshelf = their_shelf:ShelfStore\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("their_shelf", None)


def test_its_kind_configures_connector_and_memory_mode() -> None:
    given = {"kind": "shelf", "boards": 5}
    connector = ConnectorOptions.resolve({"store": given}, EXTRA_CONFIG)
    assert connector.model_dump()["store"] == given
    config = resolve_config({"ucm": {"memory_mode": {"store": given}}})
    assert config.memory_mode.store == connector.store
    assert resolve_config({"ucm": config.to_dict()}) == config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "shelf", "boards": 0}, "store.boards: found 0, expected integer, at least 1"),
        ({"kind": "shelf", "board": 2}, "store.board: found an unknown key, expected store.boards"),
        ({"kind": "shelve"}, "store.kind: found 'shelve', expected shelf (the nearest kind of store)"),
        ({}, 'store.kind: found no value, expected "memory" or "file" or "redis" or "tiered" or "shelf"'),
    ],
)
def test_mistakes_name_its_options(given: dict[str, object], message: str) -> None:
    with pytest.raises(UcmConfigError) as error:
        resolve_store_options(given)
    assert message in str(error.value)


def test_the_prefetch_engine_loads_from_it() -> None:
    store = open_store(resolve_store_options({"kind": "shelf"}), BLOCK_BYTES)
    keys = [bytes([index]) * 32 for index in range(3)]
    for index, key in enumerate(keys[:2]):
        store.save(key, memoryview(bytes([index + 1]) * BLOCK_BYTES))
    engine = PrefetchEngine(store, BLOCK_BYTES, PrefetchOptions(prefetch_workers=1))
    engine.start()
    arrived: dict[int, bytes] = {}

    def deliver(index: int, block: memoryview) -> None:
        arrived[index] = bytes(block)

    handle = engine.submit_prefetch("request", keys, deliver=deliver)
    assert handle.wait(60) is PrefetchOutcome.FAILED
    assert handle.failed == {2}
    assert arrived == {0: b"\x01" * BLOCK_BYTES, 1: b"\x02" * BLOCK_BYTES}
    engine.stop()


def test_doctor_shows_it() -> None:
    trip, boards = store_checks(json.dumps({"kind": "shelf", "boards": 1}))
    assert (trip.name, trip.status) == ("shelf store, round trip of 1 MiB", "ok")
    assert (boards.name, boards.status, boards.advice) == ("boards", "warn", "add a board")


def test_the_command_says_which_stores_it_can_look_into(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["store", "stat", "--store", '{"kind": "shelf"}']) == 2
    assert "store.kind: found 'shelf', expected file or redis" in capsys.readouterr().err


def test_its_options_are_a_table_of_the_reference() -> None:
    table = markdown_table(describe_section(store_class("shelf").Options, "store"))
    assert "| `store.boards` | integer, at least 1 | `3` | Boards of the shelf. |" in table


@pytest.mark.parametrize("thing", ["nowhere:Store", "pathlib:Path"])
def test_a_store_that_cannot_be_loaded_is_named(thing: str) -> None:
    with STORES.scope():
        STORES.register("broken", thing)
        with pytest.raises(RegistryError, match="store 'broken': "):
            store_class("broken")
        with pytest.raises(UcmConfigError, match=r"store\.kind: found 'broken', expected a store that can be loaded"):
            resolve_store_options({"kind": "broken"})


def test_a_name_is_enough_to_know_the_stores() -> None:
    """No store is imported before it is configured."""
    assert STORES.names() == ["memory", "file", "redis", "tiered", "shelf"]
    assert "their_shelf" not in sys.modules
