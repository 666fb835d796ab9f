"""Draws the numbered walks of docs/architecture.md: one SVG file each, for light and dark, in docs/images/walks.

    python scripts/draw_walks.py            # writes the files, and links each below the heading of its walk

A walk is a section `## The way of ...` with numbered lines that begin with `file` `name` pairs. Subsections `### ...`
are alternatives, drawn as columns. `make drawings` runs this; tests/docs/test_walks.py fails if a drawing is older than
its walk. Standard library only.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
FOLDER = Path("images") / "walks"  # below docs/

_SECTION = re.compile(r"^## (The way of .+?)$\n(.*?)(?=^## |\Z)", re.M | re.S)
# a numbered line with its continuation, the line before some of them, such as "In the scheduler:", or a subsection
_ITEM = re.compile(r"^(?:\d+\. (.*(?:\n(?!\d+\. |\n).*)*)|([A-Z][^`\n]*):\n(?=\n\d+\. )|### (.+))", re.M)
_PAIR = re.compile(r"`([\w/]+\.py)` `([\w.]+)`")
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")

# pixels
WIDTH, MARGIN, ROOM, GAP, PAD = 880, 16, 128, 18, 12
LINE = 17  # of the text
PLACE = 36  # a name, and its file
CHARACTER = 6.6  # of the text, on average
HUES = (212, 32, 150, 275, 350, 190, 55, 120, 310, 240)

STYLE = """
  .page { fill: #ffffff; stroke: #d0d7de }
  .box { fill: #ffffff; stroke: #57606a }
  .name { fill: #1f2328; font: 600 14px ui-sans-serif, system-ui, sans-serif }
  .file { fill: #57606a; font: 11px ui-monospace, monospace }
  .text { fill: #1f2328; font: 12.5px ui-sans-serif, system-ui, sans-serif }
  .part { fill: #1f2328; font: italic 14px ui-sans-serif, system-ui, sans-serif }
  .room { fill: #1f2328; font: 600 13px ui-sans-serif, system-ui, sans-serif }
  .number { fill: #57606a; font: 600 12px ui-sans-serif, system-ui, sans-serif; text-anchor: middle }
  .arrow { stroke: #57606a; stroke-width: 1.6; fill: none }
  .head { fill: #57606a }
"""
DARK = """
    .page { fill: #0d1117; stroke: #30363d }
    .box { fill: #161b22; stroke: #8b949e }
    .name, .text, .part, .room { fill: #e6edf3 }
    .file, .number { fill: #9da7b3 }
    .arrow { stroke: #9da7b3 }
    .head { fill: #9da7b3 }
"""


@dataclass(frozen=True)
class Stop:
    """A numbered line. places: (file, name). text: the description.

    part: the part of the walk, such as "In the scheduler"; empty in a walk of one part.
    way: the alternative, such as "In a bucket"; empty in a walk of one way.
    is_choice: one of its places is entered, not all of them.
    """

    number: int
    places: tuple[tuple[str, str], ...]
    text: str
    part: str = ""
    way: str = ""
    is_choice: bool = False

    @property
    def room(self) -> str:
        parts = self.places[0][0].split("/")
        return parts[1] if parts[0] == "vllm_gaudi_ucm" and len(parts) > 2 else parts[0]


@dataclass(frozen=True)
class Walk:
    """A section with numbered lines."""

    title: str
    stops: tuple[Stop, ...]

    @property
    def file(self) -> Path:
        """The file of the drawing, relative to docs/."""
        return FOLDER / (re.sub(r"\W+", "-", self.title.lower()) + ".svg")

    @property
    def link(self) -> str:
        """The line of the page that shows the drawing."""
        return f"![{self.title}, as a drawing of the list below]({self.file.as_posix()})"


def walks(page: str) -> list[Walk]:
    """The walks of the page's text."""
    found = []
    for title, body in _SECTION.findall(page):
        stops: list[Stop] = []
        part = way = ""
        number = 0
        for item, heading, subsection in _ITEM.findall(body):
            part = heading or part
            if subsection:
                way, part, number = subsection, "", 0
            if item:
                number += 1
                stops.append(_stop(number, item, part, way))
        found.append(Walk(title, tuple(stop for stop in stops if stop.places)))
    return [walk for walk in found if walk.stops]


def _stop(number: int, item: str, part: str, way: str) -> Stop:
    head, colon, text = item.partition(": ")
    places = _PAIR.findall(head)
    if not colon or not places:
        places, text = _PAIR.findall(item)[:1], _PAIR.sub("", item, count=1)
    text = _LINK.sub(r"\1", _PAIR.sub(r"\2", text)).replace("`", "").replace("**", "")
    is_choice = re.search(r"\bor `", head) is not None
    return Stop(number, tuple(places), " ".join(text.split()).strip(" ,"), part, way, is_choice)


def svg(walk: Walk) -> str:
    """The drawing: a column for each alternative, with a band for each stretch in one room, and a box for each stop."""
    rooms = list(dict.fromkeys(stop.room for stop in walk.stops))
    ways = list(dict.fromkeys(stop.way for stop in walk.stops))
    room = (WIDTH - 2 * MARGIN - (len(ways) - 1) * GAP) // len(ways)
    shapes: list[str] = []
    bottom = 0
    for index, way in enumerate(ways):
        column = Column(MARGIN + index * (room + GAP), room, ROOM if len(ways) == 1 else 0)
        drawn, end = column.draw([stop for stop in walk.stops if stop.way == way], rooms)
        shapes += drawn
        bottom = max(bottom, end)
    height = bottom + MARGIN
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    page = _rectangle("page", 0.5, 0.5, WIDTH - 1, height - 1, 10)
    return "\n".join(
        [head, f"<title>{escape(walk.title)}</title>", _style(len(rooms)), page, *shapes, "</svg>", ""],
    )


@dataclass(frozen=True)
class Column:
    """A column of stops. beside: pixels left of the boxes for a room's name; 0: the name is above them."""

    left: int
    width: int
    beside: int

    def draw(self, stops: Sequence[Stop], rooms: Sequence[str]) -> tuple[list[str], int]:
        """Draws the column; returns the shapes, and where they end."""
        shapes: list[str] = []
        top = MARGIN
        end: int | None = None  # where the last stop's arrow begins
        shown = ""
        for (heading, room), group in groupby(stops, key=lambda stop: (stop.part or stop.way, stop.room)):
            inside = list(group)
            if heading != shown:
                shapes.append(_words("part", self.left + PAD, top + 18, heading))
                top += 30
                shown = heading
            above = 0 if self.beside else LINE
            bottom = top + above + sum(self._height(stop) + GAP for stop in inside)
            shapes.append(_rectangle(f"r{rooms.index(room)}", self.left, top, self.width, bottom - top, 8))
            shapes.append(_words("room", self.left + PAD, top + (26 if self.beside else 18), room))
            top += above
            for stop in inside:
                begin = top + GAP // 2
                if end is not None:
                    shapes.append(_arrow(self.left + (2 * ROOM + 40 if self.beside else self.width // 2), end, begin))
                shapes += self._box(stop, begin)
                end = begin + self._height(stop)
                top = end + GAP - GAP // 2
            top += GAP // 2
        return shapes, top - GAP // 2

    def _lines(self, stop: Stop) -> list[str]:
        return textwrap.wrap(stop.text, int((self.width - self.beside - 4 * PAD) / CHARACTER))

    def _height(self, stop: Stop) -> int:
        places = 1 if self.beside else len(stop.places)
        return 10 + PLACE * places + LINE * len(self._lines(stop)) + (PAD // 2 if stop.text else 0)

    def _box(self, stop: Stop, top: int) -> list[str]:
        """A box with the places of a stop: in a row, or below each other in a narrow column."""
        left = self.left + (self.beside or PAD)
        width = self.width - (self.beside or PAD) - PAD
        shapes = [_rectangle("box", left, top, width, self._height(stop), 6)]
        shapes.append(_words("number", left - 16 if self.beside else left + width - 16, top + 22, str(stop.number)))
        share = (width - 2 * PAD) // len(stop.places)
        joint = "or" if stop.is_choice else "and"
        for index, (file, name) in enumerate(stop.places):
            x, y = (left + PAD + index * share, top) if self.beside else (left + PAD, top + index * PLACE)
            shapes.append(_words("name", x, y + 20, name if index == 0 else f"{joint} {name}"))
            shapes.append(_words("file", x, y + 36, file.removeprefix("vllm_gaudi_ucm/")))
        text = top + 18 + PLACE * (1 if self.beside else len(stop.places))
        for index, line in enumerate(self._lines(stop)):
            shapes.append(_words("text", left + PAD, text + LINE * index, line))
        return shapes


def _style(rooms: int) -> str:
    hues = [HUES[index % len(HUES)] for index in range(rooms)]
    light = "".join(f"  .r{index} {{ fill: hsl({hue}, 60%, 92%) }}\n" for index, hue in enumerate(hues))
    dark = "".join(f"    .r{index} {{ fill: hsl({hue}, 28%, 21%) }}\n" for index, hue in enumerate(hues))
    return f"<style>{STYLE}{light}  @media (prefers-color-scheme: dark) {{{DARK}{dark}  }}\n</style>"


def _rectangle(kind: str, x: float, y: float, width: float, height: float, radius: int) -> str:
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}"/>'


def _words(kind: str, x: int, y: int, words: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(words)}</text>'


def _arrow(x: int, begin: int, end: int) -> str:
    head = f'<path class="head" d="M{x - 5} {end - 7} L{x + 5} {end - 7} L{x} {end} Z"/>'
    return f'<path class="arrow" d="M{x} {begin} V{end - 7}"/>{head}'


def drawings(page: str) -> dict[Path, str]:
    """Returns every file, relative to docs/, with its content."""
    return {walk.file: svg(walk) for walk in walks(page)}


def linked(page: str) -> str:
    """The page, with the drawing of each walk below its heading."""
    for walk in walks(page):
        if walk.link not in page:
            page = page.replace(f"## {walk.title}\n", f"## {walk.title}\n\n{walk.link}\n", 1)
    return page


def main() -> None:
    """Writes outdated files, and removes files of walks that no longer exist."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(linked(page), encoding="utf-8")
    current = drawings(page)
    folder = PAGE.parent / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in current.items():
        (PAGE.parent / file).write_text(text, encoding="utf-8")
    for stale in set(folder.glob("*.svg")) - {PAGE.parent / file for file in current}:
        stale.unlink()


if __name__ == "__main__":
    main()
