"""URLs of Redis servers: which ones are taken, and how those are shown, never with a password."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, parse_qs, urlsplit

_SCHEMES = ("redis", "rediss", "unix")
_DATABASE = re.compile(r"(/[0-9]*)?")


def check_url(url: str) -> None:
    """Raises ValueError, with nothing of the URL in it, unless it is that of a Redis server."""
    try:
        parts = urlsplit(url)
        is_known = parts.scheme in _SCHEMES and (_is_socket(parts) if parts.scheme == "unix" else _is_server(parts))
    except ValueError:
        is_known = False
    if not is_known:
        raise ValueError("not the URL of a Redis server")


def without_password(url: str) -> str:
    """A URL that `check_url` has passed, with *** in the place of user and password."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return parts._replace(netloc=f"***@{parts.netloc.rpartition('@')[2]}").geturl()


def place_of(url: str) -> str:
    """The server, port and database, for people; no user, no password."""
    parts = urlsplit(url)
    where = parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}{parts.path}"
    return f"{parts.scheme}://{where}"


def _is_server(parts: SplitResult) -> bool:
    # What follows a password with one of / ? # in it that is not written as %2F, %3F, %23 would be a host otherwise.
    port = parts.port  # raises ValueError
    return bool(parts.hostname) and port != 0 and bool(_DATABASE.fullmatch(parts.path)) and _ends_well(parts)


def _is_socket(parts: SplitResult) -> bool:
    return bool(parts.path) and _ends_well(parts)


def _ends_well(parts: SplitResult) -> bool:
    """Any other parameter of the client than the database, such as its time-outs, would take the place of ours."""
    query = parse_qs(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    return not parts.fragment and all(name == "db" and value[-1].isdigit() for name, value in query.items())
