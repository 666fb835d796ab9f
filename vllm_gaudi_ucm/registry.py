"""Names to things that can be added from outside: sparse methods, bucket strategies, implementations, stores.

A thing is registered as itself, or as `"package.module:name"`, which is imported when it is first asked for. What
packages name in a group of entry points is known, too. Standard library only, so that `ops` and `graphs` may use it.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Generic, TypeVar

T = TypeVar("T")


class RegistryError(ValueError):
    """A name that is not known or already taken, or a thing that cannot be imported."""


class Registry(Generic[T]):
    """What stands behind each name of one kind of thing.

    Args:
        kind: of the things, for errors, such as "sparse method".
        group: entry points that name more of them, as `NAME = "package.module:name"`.
        things: known from the start.
    """

    def __init__(self, kind: str, group: str | None = None, **things: T | str) -> None:
        self._kind = kind
        self._group = group
        self._things: dict[str, T | str] = dict(things)

    def register(self, name: str, thing: T | str) -> None:
        """Raises RegistryError where the name already stands for another thing."""
        found = self._things.setdefault(name, thing)
        if found != thing:
            raise RegistryError(
                f"{self._kind} {name!r}: found {_show(found)} registered already, expected a name that is free; "
                f"choose another name for {_show(thing)}"
            )

    @contextmanager
    def scope(self) -> Iterator[None]:
        """What is registered inside is forgotten at its end: for tests."""
        before = dict(self._things)
        try:
            yield
        finally:
            self._things = before

    def names(self) -> list[str]:
        """Every name, ours first."""
        return list(dict.fromkeys([*self._things, *(name for name, _ in self._named_by_packages())]))

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def get(self, name: str) -> T:
        """The thing behind a name, imported now if it is not yet. Raises RegistryError."""
        thing = self._things.get(name) or dict(self._named_by_packages()).get(name)
        if thing is None:
            raise RegistryError(self.unknown(name))
        if not isinstance(thing, str):
            return thing
        module, _, attribute = thing.partition(":")
        try:
            loaded: T = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            place = f"{self._kind} {name!r}: {_show(thing)}"
            raise RegistryError(f"{place} cannot be loaded ({error}); install or correct it") from error
        return loaded

    def place(self, name: str) -> str:
        """Where the thing comes from, for messages."""
        thing = self._things.get(name) or dict(self._named_by_packages()).get(name)
        return _show(thing)

    def unknown(self, name: str) -> str:
        """The error for a name that is not known, with the nearest one that is."""
        known = self.names()
        nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
        hint = f"; the nearest is {nearest[0]}" if nearest else ""
        return f"{self._kind}: found {name!r}, expected one of {', '.join(known)}{hint}"

    def _named_by_packages(self) -> Iterator[tuple[str, str]]:
        if self._group is not None:
            yield from ((point.name, point.value) for point in entry_points(group=self._group))


def _show(thing: object) -> str:
    return thing.replace(":", ".") if isinstance(thing, str) else repr(thing)
