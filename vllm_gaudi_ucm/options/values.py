"""Types of option values: byte sizes, names out of a registry, texts that no log shows."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from vllm_gaudi_ucm.registry import Registry

_UNITS = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", start=1)
    for unit, base in ((f"{letter}b", 1000), (f"{letter}ib", 1024))
}
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(value: Any) -> Any:
    """Parses text such as `4GiB` or `500 MB` into bytes; returns other values as they are. Raises ValueError."""
    if not isinstance(value, str):
        return value
    match = _TEXT.fullmatch(value)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"found {value!r}, expected bytes, or text such as 4GiB or 500MB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def show_bytes(count: float) -> str:
    """`1.5 GiB`: three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{_three_digits(count)} {unit}"
        count /= 1024
    return f"{_three_digits(count)} TiB"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


ByteSize = Annotated[int, Field(ge=1), BeforeValidator(parse_bytes)]
"""The type of an option; its `expected` needs the note `BYTES_NOTE`."""
BYTES_NOTE = "bytes, or text such as 4GiB"


class NameOf:
    """Like `Annotated[str, NameOf(registry, "auto")]`: a name of the registry, or one of the others."""

    def __init__(self, registry: Registry[Any], *others: str) -> None:
        self._registry = registry
        self._others = others

    def names(self) -> list[str]:
        return [*self._others, *self._registry.names()]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: str) -> str:
        if value not in self.names():
            raise ValueError(f"expected one of {', '.join(self.names())}")
        return value


_SERVER = r"(?:\w+:/{0,2})?(?:[\w.-]+(?::[0-9]*)?(?:/[0-9]*)?)?(?:\?db=[0-9]*)?"
_SOCKET = r"unix://(?:/[\w.-]*)*(?:\?db=[0-9]*)?"
_HARMLESS = re.compile(f"{_SERVER}|{_SOCKET}", re.ASCII)
_BEFORE_HOST = re.compile(r":.*@", re.DOTALL)


def hide_passwords(text: str) -> str:
    """Returns the text without possible passwords in URLs; it hides too much rather than too little."""
    return _BEFORE_HOST.sub(":***@", text)


def may_hold_password(text: str) -> bool:
    """True if it looks like a URL more than like the path of a file."""
    return "://" in text or hide_passwords(text) != text


def shown_url(value: Any) -> str:
    """Returns the text of a URL, hidden if any of it may be a password."""
    if not isinstance(value, str):
        return f"a value of type {type(value).__name__}"
    return repr(value) if _HARMLESS.fullmatch(value) else "text that is not shown, as it may hold a password"
