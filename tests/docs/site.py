"""The navigation of the site."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

# Made when the site is built: scripts/docs_reference.py.
MADE = {"reference/configuration.md", "reference/cli.md", "contributing.md", "changelog.md"}


class SiteLoader(yaml.SafeLoader):
    """mkdocs' own tags name Python objects, which do not matter here."""


SiteLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def listed(nav: Any) -> Iterator[str]:
    """Every page of the navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from listed(entry)
