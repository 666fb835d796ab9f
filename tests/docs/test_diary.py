"""diary/: what was tried is outside the site, so these tests check its links in place of mkdocs."""

from __future__ import annotations

import re

from tests.docs.commands import ROOT

PAGES = sorted((ROOT / "diary").glob("*.md"))
LINK = re.compile(r"\]\(([^)#:]+\.(?:md|png|svg))(?:#[^)]*)?\)")


def test_links_of_the_diary_lead_to_files() -> None:
    links = [(page, link) for page in PAGES for link in LINK.findall(page.read_text(encoding="utf-8"))]
    assert len(links) > 10
    assert [f"{page.name}: {link}" for page, link in links if not (page.parent / link).is_file()] == []


def test_pages_that_the_site_names_exist() -> None:
    named = {
        name
        for page in [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
        for name in re.findall(r"`(diary/[\w-]+\.md)`", page.read_text(encoding="utf-8"))
    }
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "diary" / "index.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES if page.name != "index.md" and f"]({page.name})" not in index] == []
