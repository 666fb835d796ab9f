"""Commands of the documentation: fenced blocks of README.md, CONTRIBUTING.md and docs/, with what they need."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NEEDS = ("gaudi", "cuda", "network", "minutes")
SHELLS = ("bash", "sh", "shell", "console")
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.S | re.M)
_MARK = re.compile(r"<!-- needs: ([a-z, ]+) -->\n\Z")
_ASSIGNMENT = re.compile(r"[A-Z_]+=")


@dataclass(frozen=True)
class Block:
    """A block of commands. needs: what a test has not got, of `NEEDS`; without any the commands run in a test."""

    page: str
    line: int
    needs: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """What a reader finds commands in."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The blocks of commands of a page, in order. Raises ValueError for a mark that means nothing."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        language, body = match.groups()
        if language not in SHELLS:
            continue
        mark = _MARK.search(text[: match.start()])
        needs = tuple(word.strip() for word in mark[1].split(",")) if mark else ()
        place = str(page.relative_to(ROOT)), text.count("\n", 0, match.start()) + 1
        if wrong := [word for word in needs if word not in NEEDS]:
            raise ValueError(f"{place}: needs {wrong}, expected some of {NEEDS}")
        found.append(Block(*place, needs, tuple(_commands(body, language == "console"))))
    return found


def _commands(body: str, console: bool) -> list[tuple[str, ...]]:
    """The words of each command, without comments and without variables set before it."""
    lines = [line[2:] for line in body.splitlines() if line.startswith("$ ")] if console else body.splitlines()
    commands = []
    pending = ""
    for line in lines:
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quotation that goes on in the next line
            pending += "\n"
            continue
        pending = ""
        while words and _ASSIGNMENT.match(words[0]):
            words.pop(0)
        if words:
            commands.append(tuple(words))
    assert not pending, f"a command without an end: {pending}"
    return commands


def make_targets() -> set[str]:
    """What `make` knows."""
    return set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
