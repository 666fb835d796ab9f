"""The site has every page, and a page for each guide that a user looks for."""

from __future__ import annotations

import yaml

from tests.docs.commands import ROOT
from tests.docs.site import MADE, SiteLoader, listed

GUIDES = {
    "buckets",
    "sparse",
    "stores",
    "speculation",
    "static-shapes",
    "metrics",
    "kv-transfer",
}


def test_navigation_and_pages_are_the_same() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), SiteLoader)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    nav = list(listed(site["nav"]))
    assert sorted(nav) == sorted(pages | MADE)


def test_guides() -> None:
    assert {path.stem for path in (ROOT / "docs" / "guides").glob("*.md")} >= GUIDES


def test_the_site_is_built_strictly_before_a_change_is_taken() -> None:
    assert "stage make docs" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "mkdocs build --strict" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 125


def test_a_group_of_the_navigation_can_be_read_at_a_glance() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), SiteLoader)
    groups = {name: pages for entry in site["nav"] for name, pages in entry.items() if isinstance(pages, list)}
    assert list(groups) == ["Serve", "Long contexts", "KV reuse", "Tune", "Operate", "Inside"]
    assert {name: len(pages) for name, pages in groups.items() if len(pages) > 9} == {}
    assert "troubleshooting.md" in listed(groups["Operate"])


def test_the_site_has_its_own_style() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), SiteLoader)
    style = (ROOT / "docs" / site["extra_css"][0]).read_text(encoding="utf-8")
    # the theme alone makes each column of a table 100 pixels wide or more, and cuts long lines of code
    assert "min-width: 0" in style
    assert "pre-wrap" in style
