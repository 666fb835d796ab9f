"""The drawings of docs/architecture.md show the walks as they are told there."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from scripts.draw_walks import FOLDER, PAGE, Walk, drawings, linked, svg, walks

SVG = "{http://www.w3.org/2000/svg}"
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


def test_subsections_are_alternatives_beside_each_other() -> None:
    page = (
        "## The way of a test\n\nWords.\n\n### At once\n\n1. `ops/a.py` `one`: begins.\n2. `ops/b.py` `two`: ends.\n\n"
        "More words.\n\n### Later\n\n1. `ops/a.py` `one`, `ops/c.py` `three`: waits.\n"
    )
    (walk,) = walks(page)
    assert [(stop.number, stop.way) for stop in walk.stops] == [(1, "At once"), (2, "At once"), (1, "Later")]
    root = ElementTree.fromstring(svg(walk))
    at = {node.text: (int(node.get("x", "0")), int(node.get("y", "0"))) for node in root.iter(f"{SVG}text")}
    assert at["At once"][1] == at["Later"][1]
    assert at["two"][0] < at["Later"][0] < at["and three"][0] + 1
    # an arrow from the first to the second stop, and none from one alternative to the other
    assert len([node for node in root.iter(f"{SVG}path") if node.get("class") == "arrow"]) == 1


def test_places_are_joined_as_in_the_text() -> None:
    page = (
        "## The way of a test\n\n1. `ops/a.py` `one`, `ops/b.py` `two`: all.\n"
        "2. `ops/a.py` `one`, or `ops/c.py` `three`: one.\n"
    )
    (walk,) = walks(page)
    drawn = svg(walk)
    assert ">and two<" in drawn
    assert ">or three<" in drawn


def test_the_ways_of_a_step_are_two_columns() -> None:
    walk = next(walk for walk in walks(TEXT) if walk.title == "The way of a step")
    assert list(dict.fromkeys(stop.way for stop in walk.stops)) == ["At its true shape", "In a bucket"]
    assert "or RequestTable" not in svg(walk)
