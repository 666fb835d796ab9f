"""The drawings of docs/architecture.md show the walks as they are told there."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from scripts.draw_walks import FOLDER, PAGE, Walk, drawings, linked, svg, walks

TEXT = PAGE.read_text(encoding="utf-8")


def test_drawings_are_current() -> None:
    """Run `make drawings` where this fails."""
    there = {FOLDER / file.name: file.read_text(encoding="utf-8") for file in (PAGE.parent / FOLDER).glob("*.svg")}
    assert there == drawings(TEXT)
    assert linked(TEXT) == TEXT


@pytest.mark.parametrize("walk", walks(TEXT), ids=lambda walk: walk.title)
def test_a_drawing_has_every_place_of_its_walk(walk: Walk) -> None:
    root = ElementTree.fromstring(svg(walk))
    shown = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text")]
    for stop in walk.stops:
        assert str(stop.number) in shown
        assert all(any(name in text for text in shown) for _, name in stop.places)


def test_parts_of_a_walk() -> None:
    """Their lines are numbered through."""
    page = (
        "## The way of a test\n\nIn the scheduler:\n\n1. `ops/a.py` `one`: first.\n\nIn the worker:\n\n"
        "2. `ops/b.py` `two`: second,\n   and more.\n3. `ops/c.py` `three`, as said.\n\nThe end: it is here.\n"
    )
    (walk,) = walks(page)
    assert [(stop.number, stop.part, stop.text) for stop in walk.stops] == [
        (1, "In the scheduler", "first."),
        (2, "In the worker", "second, and more."),
        (3, "In the worker", "as said."),
    ]
    assert "In the worker" in svg(walk)


def test_forks_rooms_and_text_of_a_walk() -> None:
    page = (
        "## The way of a test\n\nWords.\n\n1. `ops/a/api.py` `one`: begins with `ops/b.py` `other`.\n"
        "2. `vllm_gaudi_ucm/batch/x.py` `Two`, or `vllm_gaudi_ucm/batch/y.py` `Three`\n   as [said](z.md): ends.\n"
    )
    (walk,) = walks(page)
    assert [(stop.room, stop.places, stop.text) for stop in walk.stops] == [
        ("ops", (("ops/a/api.py", "one"),), "begins with other."),
        ("batch", (("vllm_gaudi_ucm/batch/x.py", "Two"), ("vllm_gaudi_ucm/batch/y.py", "Three")), "ends."),
    ]
    assert linked(linked(page)).count("the-way-of-a-test.svg") == 1
