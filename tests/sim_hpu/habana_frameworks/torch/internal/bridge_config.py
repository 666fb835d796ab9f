"""Settings of the bridge that can be changed while it runs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_KNOWN = ("PT_COMPILE_ONLY_MODE", "PT_ENABLE_INT64_SUPPORT")
_settings: dict[str, Any] = {}
_lock = threading.Lock()


@contextmanager
def env_setting(name: str, value: Any) -> Iterator[None]:
    """Sets a setting of the whole process for a while. Raises KeyError for one that cannot be set.

    An exception inside leaves it set, as in the bridge, which has no `finally` here either (duty 23).
    """
    if name not in _KNOWN:
        raise KeyError(f"{name} is no setting of the stand-in, expected one of {_KNOWN} (duty 23)")
    before = _set(name, value)
    yield
    _set(name, before)


def _set(name: str, value: Any) -> Any:
    with _lock:
        before = _settings.get(name)
        _settings[name] = value
    return before


def compile_only() -> bool:
    """Whether recipes are compiled but not run."""
    return bool(_settings.get("PT_COMPILE_ONLY_MODE"))


def reset_settings() -> None:
    """As in a process that has just started."""
    with _lock:
        _settings.clear()
