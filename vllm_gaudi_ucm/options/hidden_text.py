"""What a user has written, for messages: without the passwords that it may hold."""

import re
from typing import Any

_SERVER = r"(?:\w+:/{0,2})?(?:[\w.-]+(?::[0-9]*)?(?:/[0-9]*)?)?(?:\?db=[0-9]*)?"
_SOCKET = r"unix://(?:/[\w.-]*)*(?:\?db=[0-9]*)?"
_HARMLESS = re.compile(f"{_SERVER}|{_SOCKET}", re.ASCII)
_BEFORE_HOST = re.compile(r":.*@", re.DOTALL)


def hide_passwords(text: str) -> str:
    """The text without what may stand between a user's name and a host in any URL that it holds; rather too little."""
    return _BEFORE_HOST.sub(":***@", text)


def may_hold_password(text: str) -> bool:
    """Whether it looks like a URL more than like the path of a file."""
    return "://" in text or hide_passwords(text) != text


def shown_url(value: Any) -> str:
    """What was given in the place of a URL: as it is only where nothing in it can be a password."""
    if not isinstance(value, str):
        return f"a value of type {type(value).__name__}"
    return repr(value) if _HARMLESS.fullmatch(value) else "text that is not shown, as it may hold a password"
