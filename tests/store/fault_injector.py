"""Errors from the system's calls, one at a time: every call that a store makes of its medium can be made to fail."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHANGING = ["write", "pwrite", "utime", "rename", "unlink", "mkdir", "fchmod"]
CALLS: dict[Any, list[str]] = {
    os: ["open", "close", "stat", "fstat", "scandir", "listdir", "preadv", "read", "fsync", *CHANGING],
    fcntl: ["flock"],
}


class FaultInjector:
    """Inside `failing(at)` call number `at` of the system's raises `error`; `seen` names the calls that were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        self._monkeypatch = monkeypatch
        self._code = code
        self.seen: list[str] = []

    @contextmanager
    def failing(self, at: int | None) -> Iterator[None]:
        self.seen = []
        with self._monkeypatch.context() as patch:
            for module, names in CALLS.items():
                for name in names:
                    patch.setattr(module, name, self._failing(name, getattr(module, name), at))
            yield

    def _failing(self, name: str, call: Callable[..., Any], at: int | None) -> Callable[..., Any]:
        def failing(*arguments: Any, **named: Any) -> Any:
            self.seen.append(name)
            if len(self.seen) - 1 != at:
                return None if name == "fsync" else call(*arguments, **named)  # a real one takes milliseconds
            if name == "close":  # the descriptor is closed, whatever the system says of it
                call(*arguments, **named)
            raise OSError(self._code, os.strerror(self._code))

        return failing


@contextmanager
def read_only(monkeypatch: pytest.MonkeyPatch, code: int) -> Iterator[None]:
    """As a file system that became read-only: every call that would change it fails."""

    def refusing(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    open_file = os.open

    def opening(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        return refusing() if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else open_file(path, flags, *rest, **named)

    with monkeypatch.context() as patch:
        for name in CHANGING:
            patch.setattr(os, name, refusing)
        patch.setattr(os, "open", opening)
        yield
