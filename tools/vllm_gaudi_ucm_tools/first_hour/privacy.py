"""Removes from a report data that identifies the machine: names, folders, addresses, secrets."""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import re
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm_gaudi_ucm import envs

SHORTEST_NAME = 2  # a host called `a` would take every a out of the report
SHORTEST_SECRET = 6
# Words that a report needs, and that are users' or hosts' names in containers: they tell nothing.
COMMON = frozenset({"root", "user", "ubuntu", "localhost", "docker", "gaudi", "vllm", "cpu", "cuda", "hpu", "test"})

_NUMBERS = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])")
_COLONS = re.compile(r"(?<![\w:.])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?:%\w+)?(?![\w:])")
_HARDWARE = re.compile(r"\b(?:[0-9a-fA-F]{2}[:-]){5}[0-9a-fA-F]{2}\b")
_IDENTITY = re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_HOME = re.compile(r"/(?:home|Users)/[^/\s\"',:;]+")
_URL_USER = re.compile(r"(?<=://)[^/\s@]+@")
_MAIL = re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b")


class Scrubber:
    """Replaces private parts of texts.

    Args:
        folders: path to its replacement, such as `{Path("/srv/model"): "<model>"}`.
        versions: texts that look like addresses but are not.
    """

    def __init__(self, folders: Mapping[Path, str] | None = None, versions: Iterable[str] = ()) -> None:
        self._versions = frozenset(versions)
        terms = {str(path): name for path, name in {**_own_folders(), **(folders or {})}.items()}
        terms |= {str(Path(path).resolve()): name for path, name in terms.items()}
        terms |= dict.fromkeys((one for one in envs.secrets() if len(one) >= SHORTEST_SECRET), "<secret>")
        terms = {term: name for term, name in terms.items() if term not in ("", "/", ".")}
        # the longest first: a folder before its parents
        self._terms = sorted(terms.items(), key=lambda item: -len(item[0]))
        self._names = [(_word(name), called) for name, called in _own_names().items()]

    def text(self, text: str) -> str:
        """Returns the text without private data."""
        for term, called in self._terms:
            text = text.replace(term, called)
        text = _URL_USER.sub("<user>@", text)
        text = _MAIL.sub("<address>", text)
        text = _HOME.sub("<home>", text)
        for pattern, called in self._names:
            text = pattern.sub(called, text)
        text = _IDENTITY.sub("<identity>", text)
        text = _HARDWARE.sub("<hardware address>", text)
        text = _NUMBERS.sub(self._address, text)
        return _COLONS.sub(self._address, text)

    def value(self, value: Any) -> Any:
        """The same of all texts in a plain value, keys of objects included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value

    def _address(self, match: re.Match[str]) -> str:
        found = match[0]
        if found in self._versions:
            return found
        try:
            ipaddress.ip_address(found.partition("%")[0])
        except ValueError:
            return found
        return "<ip address>"


def _word(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", re.IGNORECASE)


def _own_folders() -> dict[Path, str]:
    return {
        Path.home(): "<home>",
        Path.cwd(): "<working folder>",
        Path(sys.prefix): "<environment>",
        Path(tempfile.gettempdir()): "<temporary>",
    }


def _own_names() -> dict[str, str]:
    """Returns the names of this host and this user, if they are specific."""
    host = socket.gethostname()
    names = {host: "<host>", host.partition(".")[0]: "<host>"}
    with contextlib.suppress(OSError, KeyError):  # a container without an entry for its user
        names[getpass.getuser()] = "<user>"
    return {name: called for name, called in names.items() if len(name) >= SHORTEST_NAME and name.lower() not in COMMON}
