"""Names of things that can be added from outside: sparse methods, bucket strategies, implementations, stores.

A thing is registered as an object, or as `"package.module:name"`, which is imported on first use. Installed packages
add theirs by entry points. Standard library only, so that `ops` and `graphs` may use it.
"""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class RegistryError(ValueError):
    """A name that is unknown or taken, or a thing that cannot be imported."""


class RegistryEntry(NamedTuple):
    """One thing of a registry, which need not be imported yet.

    place: the module and name behind it. origin: what registered it, for messages. built_in: it was registered by this
        package.
    hidden: its name is taken by another thing, so `get` does not find it.
    """

    name: str
    place: str
    origin: str
    built_in: bool = False
    hidden: bool = False


class Registry(Generic[T]):
    """The things of one kind, by name.

    Args:
        kind: what they are, such as "sparse method"; for errors.
        group: entry point group in which packages name theirs, as `NAME = "package.module:name"`.
        things: the built-in ones.
    """

    def __init__(self, kind: str, group: str | None = None, **things: T | str) -> None:
        self.kind = kind
        self._group = group
        self._things: dict[str, T | str] = dict(things)
        self._built_in = frozenset(things)

    def register(self, name: str, thing: T | str) -> None:
        """Registers a thing. Raises RegistryError if the name is taken by another thing."""
        found = self._things.setdefault(name, thing)
        if found != thing:
            raise RegistryError(
                f"{self.kind} {name!r}: found {_show(found)} registered already, expected a name that is free; "
                f"choose another name for {_show(thing)}"
            )

    @contextmanager
    def scope(self) -> Iterator[None]:
        """A context that forgets at its end the things registered inside, for tests."""
        before = dict(self._things)
        try:
            yield
        finally:
            self._things = before

    def names(self) -> list[str]:
        """Every name, ours first."""
        return list(dict.fromkeys([*self._things, *(point.name for point in self._entry_points())]))

    def entries(self) -> Iterator[RegistryEntry]:
        """Returns every thing and its origin, ours first, without importing any."""
        for name, thing in self._things.items():
            built_in = name in self._built_in
            yield RegistryEntry(name, _show(thing), "built in" if built_in else "registered in this process", built_in)
        taken = set(self._things)
        for point in self._entry_points():
            package = f" of {point.dist.name} {point.dist.version}" if point.dist is not None else ""
            yield RegistryEntry(point.name, _show(point.value), f"entry point{package}", hidden=point.name in taken)
            taken.add(point.name)

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def get(self, name: str) -> T:
        """The thing behind a name, imported now if it is not yet. Raises RegistryError."""
        thing = self._find(name)
        if thing is None:
            raise RegistryError(self.unknown(name))
        if not isinstance(thing, str):
            return thing
        module, _, attribute = thing.partition(":")
        try:
            loaded: T = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            place = f"{self.kind} {name!r}: {_show(thing)}"
            raise RegistryError(f"{place} cannot be loaded ({error}); install or correct it") from error
        return loaded

    def place(self, name: str) -> str:
        """Returns the origin of a thing, for messages."""
        thing = self._find(name)
        return _show(thing)

    def unknown(self, name: str) -> str:
        """The error for a name that is not known, with the nearest one that is."""
        known = self.names()
        nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
        hint = f"; the nearest is {nearest[0]}" if nearest else ""
        return f"{self.kind}: found {name!r}, expected one of {', '.join(known)}{hint}"

    def _find(self, name: str) -> T | str | None:
        if name in self._things:
            return self._things[name]
        return next((point.value for point in self._entry_points() if point.name == name), None)

    def _entry_points(self) -> Iterator[EntryPoint]:
        if self._group is not None:
            yield from _installed(self._group, tuple(sys.path))


@cache
def is_installed(module: str) -> bool:
    """True if a module is there to be imported, without importing it: the folders of a device may be left out."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def those_installed(**places: str) -> dict[str, str]:
    """The places, `"package.module:name"`, whose modules are there."""
    return {name: place for name, place in places.items() if is_installed(place.partition(":")[0])}


@lru_cache(maxsize=16)
def _installed(group: str, path: tuple[str, ...]) -> EntryPoints:
    """Returns the entry points of all packages on `path`, which is `sys.path`; cached, because it takes 20 ms."""
    return entry_points(group=group)


def _show(thing: object) -> str:
    return thing.replace(":", ".") if isinstance(thing, str) else repr(thing)
