"""Writes a release's notes: the section of CHANGELOG.md that has its version.

usage: python scripts/release_notes.py VERSION [--changelog CHANGELOG.md] --output dist/release-notes.md
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from packaging.version import Version

_HEADING = re.compile(r"^## (?P<title>\S+).*$", re.MULTILINE)
# a link to a file of the repository, which is broken on a release's page
_FILE_LINK = re.compile(r"\[(?P<text>[^]]+)\]\((?![a-z]+:)(?P<file>[^)#]+)[^)]*\)")


class NoNotesError(RuntimeError):
    """Raised if a version has no notes; the message tells what was found, and what to do."""


def notes_of(version: str, changelog: Path) -> str:
    """The text of a version's section, without its heading `## VERSION` or `## VERSION (date)`.

    Links to files of the repository become the names of these files.

    Raises NoNotesError if no tag has the version, or if its section is missing or empty.
    """
    if Version(version).is_devrelease or Version(version).local:
        raise NoNotesError(
            f"found version {version}, expected that of a tag; commit all changes, and tag the commit, such as v1.2.3"
        )
    text = changelog.read_text(encoding="utf-8")
    headings = list(_HEADING.finditer(text))
    ends = [heading.start() for heading in headings[1:]] + [len(text)]
    sections = {
        heading["title"].strip("[]"): text[heading.end() : end].strip()
        for heading, end in zip(headings, ends, strict=True)
    }
    if not sections.get(version):
        there = "an empty one" if version in sections else ", ".join(sections) or "no sections"
        raise NoNotesError(
            f"{changelog}: found {there}, expected a section '## {version}' with the changes of this release; "
            f"rename 'Unreleased' to '{version} (YYYY-MM-DD)', commit, and tag the commit v{version}"
        )
    return _FILE_LINK.sub(r"\g<text> (\g<file>)", sections[version]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version")
    parser.add_argument("--changelog", type=Path, default=Path("CHANGELOG.md"))
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        notes = notes_of(arguments.version, arguments.changelog)
    except (NoNotesError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(notes, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
