"""Texts that are on this machine anyway: Python's language reference, and descriptions of installed packages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions

LEAST_SENTENCE, MOST_SENTENCE = 40, 300
MOST_DESCRIPTION = 600


@dataclass(frozen=True)
class Package:
    """Holds fields of an installed package's metadata."""

    name: str
    version: str
    summary: str
    description: str


@cache
def sentences() -> tuple[str, ...]:
    """Returns sentences of the language reference (about 90,000 tokens), without code and headings."""
    from pydoc_data.topics import topics

    paragraphs = (re.sub(r"\s+", " ", part) for _, text in sorted(topics.items()) for part in text.split("\n\n"))
    found = dict.fromkeys(part for text in paragraphs for part in re.split(r"(?<=[.?!]) ", text.strip()))
    found = dict.fromkeys(part for part in found if part[:1].isupper() and part[-1:] in ".?!")
    return tuple(part for part in found if LEAST_SENTENCE <= len(part) <= MOST_SENTENCE)


@cache
def packages() -> tuple[Package, ...]:
    """Returns one package for each summary, by name. Texts depend on what is installed here."""
    found: dict[str, Package] = {}
    for one in distributions():
        name, summary = one.metadata["Name"], one.metadata["Summary"]
        if name and summary and len(summary) > 20:
            body = re.sub(r"[^ -~]+|\s+", " ", one.metadata.get_payload() or "")[:MOST_DESCRIPTION]
            found.setdefault(summary, Package(name, one.version, summary.rstrip("."), body))
    return tuple(sorted(found.values(), key=lambda package: package.name.lower()))
