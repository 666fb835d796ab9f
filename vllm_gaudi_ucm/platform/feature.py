"""A feature that an engine refuses: a row of the tables in `features` and `speculation_features`."""

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

ConfigT = TypeVar("ConfigT")


class Asked(NamedTuple):
    """A feature, and the flag or model that asks for it."""

    feature: str
    asked_by: str


class Feature(NamedTuple, Generic[ConfigT]):
    """A row of the table.

    Args:
        name: of the feature; `{found}` is the value that asks for it.
        asked_by: the flag, or `{model}`; `{found}` as in `name`.
        why: the reason, and what to do instead if there is something; for docs.
        found: the value in a configuration that asks for the feature; false if it does not.
    """

    name: str
    asked_by: str
    why: str
    found: Callable[[ConfigT], object]

    def asked(self, config: ConfigT, model: str = "") -> Asked | None:
        """The feature and the flag that asks for it, for the error; None if the configuration does not ask for it."""
        found = self.found(config)
        if not found:
            return None
        return Asked(self.name.format(found=found), self.asked_by.format(found=found, model=f"model {model}"))


def where(holds: Callable[[ConfigT], bool], found: Callable[[ConfigT], object]) -> Callable[[ConfigT], object]:
    """Returns a row's `found` that asks for nothing unless a condition holds."""
    return lambda config: holds(config) and found(config)


def unless(found: str, supported: Sequence[str]) -> str | None:
    """Returns the value unless it is one of the supported ones."""
    return None if found in supported else found
