"""The forms for issues are what GitHub takes, and ask for commands that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.docs.commands import ROOT
from vllm_gaudi_ucm.cli.main import build_parser, commands

FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


def test_there_is_a_form_for_each_kind() -> None:
    assert [path.stem for path in FORMS] == ["bug", "feature", "performance"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_form(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= set(form)
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids)
    assert all(field["type"] in ("textarea", "input") and field["attributes"]["label"] for field in form["body"])
    assert any(field["validations"]["required"] for field in form["body"] if "validations" in field)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_commands_of_a_form_exist(path: Path) -> None:
    for found in re.findall(r"`gaudi-ucm ([^`]+)`", path.read_text(encoding="utf-8")):
        words = found.split()
        assert words[0] in commands()
        build_parser(words).parse_args(words)
