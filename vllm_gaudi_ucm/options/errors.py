"""What is wrong with a configuration, in words that name the key, what was found, and what was expected."""

import difflib
from dataclasses import dataclass

from vllm_gaudi_ucm.options.hidden_text import hide_passwords


@dataclass(frozen=True)
class Problem:
    """One key with a value that cannot be used. found: without the passwords of URLs."""

    key: str
    found: str
    expected: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "found", hide_passwords(self.found))

    def __str__(self) -> str:
        return f"{self.key}: found {self.found}, expected {self.expected}"


class UcmConfigError(ValueError):
    """The configuration cannot be used; `problems` holds every reason."""

    def __init__(self, problems: list[Problem], source: str = "") -> None:
        self.problems = problems
        self.source = source = hide_passwords(source)
        super().__init__(
            "; ".join([f"configuration of vllm-gaudi-ucm{source}: {problems[0]}", *map(str, problems[1:])])
        )

    @classmethod
    def malformed(cls, source: str, what: str, key: str = "ucm") -> "UcmConfigError":
        """Text for `key` that is neither YAML nor JSON: `what` says where and why."""
        return cls([Problem(key, f"malformed {source} ({what})", "YAML, or JSON in a *.json file")])

    def __reduce__(self) -> tuple[type["UcmConfigError"], tuple[list[Problem], str]]:
        # vLLM hands errors from the engine's process to the front: the default would call us with the message.
        return type(self), (self.problems, self.source)


MOST_SHOWN = 200
"""Characters of a value in a message."""


def shown(value: object) -> str:
    """A value as Python writes it, cut where it is long; passwords are hidden before a cut can part them."""
    text = hide_passwords(repr(value))
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text):,} characters)"


def unknown_key(key: str, section: str, valid: list[str]) -> Problem:
    """A key that does not exist in a section, with the nearest one that does."""
    prefix = f"{section}." if section else ""
    by_lower_case = {name.lower(): name for name in valid}
    nearest = difflib.get_close_matches(key.lower(), by_lower_case, n=1, cutoff=0.6)
    if nearest:
        hint = f"{prefix}{by_lower_case[nearest[0]]} (the nearest valid key)"
    else:
        hint = " or ".join(f"{prefix}{name}" for name in sorted(valid))
    return Problem(f"{prefix}{key[:MOST_SHOWN]}", "an unknown key", hint)
