"""A person can read the site: few pages, and none of them long."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.docs.commands import ROOT
from tests.docs.site import MADE, SiteLoader, listed

PAGES = 29
WORDS = 1200
# Longer than they should be. A page that becomes short enough leaves this list; no page joins it.
LONG = {
    "architecture.md",
}
# Written by a script, or out of docstrings.
GENERATED = {*MADE, "conformance.md", "models.md"}
NO_PROSE = re.compile(r"^```.*?^```|^\|.*?$|<!--.*?-->", re.S | re.M)


def written() -> list[str]:
    """The pages of the navigation that people write."""
    site = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), SiteLoader)
    return [page for page in listed(site["nav"]) if page not in GENERATED and not page.startswith("reference/")]


def words(page: str) -> int:
    """Words of a page's prose: without code, tables and the targets of links."""
    text = NO_PROSE.sub("", (ROOT / "docs" / page).read_text(encoding="utf-8"))
    return len(re.findall(r"[A-Za-z0-9`]\S*", re.sub(r"\]\([^)]*\)", "]", text)))


def test_the_site_has_few_pages() -> None:
    assert len(written()) <= PAGES


@pytest.mark.parametrize("page", written())
def test_a_page_can_be_read_in_five_minutes(page: str) -> None:
    if page in LONG:
        assert words(page) > WORDS, f"{page} is short enough: take it out of LONG"
    else:
        assert words(page) <= WORDS
