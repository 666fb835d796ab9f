"""A store of your own: options, class and name in one file. It keeps KV blocks in an SQLite file.

    make model                                   # the demo model, once
    python examples/own_store.py

The engine computes a prompt once; afterwards its blocks come from the store, also after a restart. An installed package
names its stores in the entry point group `vllm_gaudi_ucm.stores`. If calls can hang, subclass `MediumStore`
(vllm_gaudi_ucm/store/guarded.py), which adds a deadline, a circuit breaker and checksums.
"""

import argparse
import sqlite3
import threading
import time
import zlib
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from vllm_gaudi_ucm.store.base import ConfiguredStore, StoreOptions, StoreStats
from vllm_gaudi_ucm.store.factory import STORES

MODEL = ".cache/models/smollm2-135m-instruct"
BLOCK_SIZE = 16
PROMPT = "Sea, wind and sand are all that there is to see here. " * 20 + "Once upon a time"


class SqliteOptions(StoreOptions):
    """The options under `store` in the connector's configuration."""

    kind: Literal["sqlite"] = Field(default="sqlite", description="Blocks in an SQLite file.")
    path: str = Field(description="The file.")


class SqliteStore(ConfiguredStore):
    """A table of blocks. An error of SQLite is a miss: a store never raises into a step."""

    Options: ClassVar[type[StoreOptions]] = SqliteOptions

    def __init__(self, options: SqliteOptions) -> None:
        self._lock = threading.Lock()
        self._database = sqlite3.connect(options.path, check_same_thread=False, isolation_level=None)
        self._run("CREATE TABLE IF NOT EXISTS blocks (key BLOB PRIMARY KEY, block BLOB, checksum INTEGER)")

    @classmethod
    def open(cls, options: Any, block_bytes: int, evicts: bool = True) -> "SqliteStore":
        return cls(options)

    def _run(self, statement: str, *values: Any) -> list[Any] | None:
        with self._lock:
            try:
                return self._database.execute(statement, values).fetchall()
            except sqlite3.Error:
                return None

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        return [bool(self._run("SELECT 1 FROM blocks WHERE key = ?", key)) for key in keys]

    def load(self, key: bytes, into: memoryview) -> bool:
        for block, checksum in self._run("SELECT block, checksum FROM blocks WHERE key = ?", key) or ():
            if len(block) == into.nbytes and zlib.crc32(block) == checksum:
                into[:] = block
                return True
        return False

    def save(self, key: bytes, block: memoryview) -> bool:
        data = bytes(block)
        return self._run("INSERT OR IGNORE INTO blocks VALUES (?, ?, ?)", key, data, zlib.crc32(data)) is not None

    def delete(self, keys: Sequence[bytes]) -> int:
        return sum(bool(self._run("DELETE FROM blocks WHERE key = ? RETURNING 1", key)) for key in keys)

    def clear(self) -> int:
        return len(self._run("DELETE FROM blocks RETURNING 1") or ())

    def verify(self) -> tuple[int, int]:
        rows = self._run("SELECT key, block, checksum FROM blocks") or ()
        corrupt = [key for key, block, checksum in rows if zlib.crc32(block) != checksum]
        return len(rows) - len(corrupt), self.delete(corrupt)

    def stats(self) -> StoreStats:
        ((blocks, size),) = self._run("SELECT count(*), ifnull(sum(length(block)), 0) FROM blocks") or ((0, 0),)
        return StoreStats(kind="sqlite", blocks=blocks, bytes=size)

    def close(self) -> None:
        self._database.close()


STORES.register("sqlite", SqliteStore)


def main(model: str, path: str) -> None:
    """Answers the same prompt twice, and prints how many of its tokens came from the store."""
    connector = {"kv_connector": "UcmConnector", "kv_connector_module_path": "vllm_gaudi_ucm.connector"}
    extra = {"store": {"kind": "sqlite", "path": path}, "save_patience": 0}
    llm = LLM(
        model,
        dtype="float32",
        block_size=BLOCK_SIZE,
        max_model_len=1024,
        kv_cache_memory_bytes=256 << 20,
        kv_transfer_config=KVTransferConfig(**connector, kv_role="kv_both", kv_connector_extra_config=extra),
    )
    store = SqliteStore(SqliteOptions(path=path))
    deadline = time.monotonic() + 30
    for turn in ("first", "again"):
        (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8))
        print(f"{turn}: {output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens were stored")
        # the connector stores blocks while the engine runs
        while store.stats().blocks < len(output.prompt_token_ids) // BLOCK_SIZE and time.monotonic() < deadline:
            time.sleep(0.1)
        llm.reset_prefix_cache()  # otherwise the device's own cache would have them


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Keeps KV blocks in an SQLite file.")
    parser.add_argument("--model", default=MODEL, help="folder of a model (default: the demo model)")
    parser.add_argument("--path", default="blocks.sqlite", help="default: %(default)s")
    arguments = parser.parse_args()
    main(arguments.model, arguments.path)
