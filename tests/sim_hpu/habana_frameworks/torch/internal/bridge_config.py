"""Settings of the bridge that can be changed while it runs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_KNOWN = ("PT_COMPILE_ONLY_MODE",)
_settings: dict[str, Any] = {}
_lock = threading.Lock()


@contextmanager
def env_setting(name: str, value: Any) -> Iterator[None]:
    """Sets a setting of the whole process for a while. Raises KeyError for one that the stand-in does not know."""
    if name not in _KNOWN:
        raise KeyError(f"{name} is no setting of the stand-in, expected one of {_KNOWN}")
    with _lock:
        before = _settings.get(name)
        _settings[name] = value
    try:
        yield
    finally:
        with _lock:
            _settings[name] = before


def compile_only() -> bool:
    """Whether recipes are compiled but not run."""
    return bool(_settings.get("PT_COMPILE_ONLY_MODE"))
