"""Which process of a test run (`pytest --numprocesses`) gets which tests, and in what order."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadScopeScheduling

# Their tests share what takes long to start: a server, a child process on the simulated card.
SHARED_ROOMS = ("server", "sim")
# Each takes minutes: handed out before their rooms, so that none of them is what the others wait for in the end.
LONG_FILES = ("tests/ops/test_interpreter.py", "tests/ops/test_hopper.py", "tests/first_hour/test_probes.py")
# Handed out first, shared rooms before others: who gets the last one works on alone, so that must be short.
LONG_ROOMS = ("server", "sim", "engine", "first_hour", "examples", "cli", "ops", "prefetch", "vllm_api")


class RoomScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Keeps the tests of a file in one process, and those of a shared room; in the order of their collection."""

    def __init__(self, config: Any, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        name = room(file)
        return name if name in SHARED_ROOMS else file


def room(nodeid: str) -> str:
    """Folder of a test below `tests`, of its id."""
    return nodeid.removeprefix("tests/").partition("/")[0]


def rank(nodeid: str) -> int:
    """Tests of low rank come first: those of shared rooms, of long files, of long rooms, all others."""
    name, shared = room(nodeid), len(SHARED_ROOMS)
    if nodeid.partition("::")[0] in LONG_FILES:
        return shared
    place = LONG_ROOMS.index(name) if name in LONG_ROOMS else len(LONG_ROOMS)
    return place if place < shared else place + 1
