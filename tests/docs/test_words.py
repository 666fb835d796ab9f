"""Prose of the documentation and help of the command line use the words of docs/reference/glossary.md."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.commands import ROOT, pages
from vllm_gaudi_ucm.cli.main import build_parser, commands
from vllm_gaudi_ucm.config.ucm_config import describe

# a word that is not used -> the word of the glossary, or of plain English
INSTEAD = {
    r"residency|resident": "on the device; offloaded for those that are not",
    r"tails?(?! block)": "prompt remainder, or tail block",
    r"causal reach|(?:a|an|its|the|least) reach|reaches with": "max prompt tiles",
    r"ladders?|rungs?": "size levels",
    r"surplus": "reduced profit",
    r"bids?": "dual prices",
    r"weighers?": "softmax weights",
    r"unsplit": "without a shared part",
    r"hopeless": "what is meant",
    r"nobody|whoever": "no caller, no request: what does not",
    r"so many that|such a one|that which": "a shorter sentence",
}
# The same, only for CONTRIBUTING.md and the pages of docs/.
ON_PAGES = {
    r"besides?": "with, in addition to, compared with, during",
    r"those of|that of": "the noun again, or a possessive",
    r"no part of": "not, with the verb",
    r"in place of": "instead of",
}
# A table of README.md and the walks of architecture.md stay as they are; the others have rows from code and reports.
EXCEPT = {"README.md", "architecture.md", "support.md", "conformance.md"}
# Identifiers and commands keep their names.
CODE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|^\s*!?\[.*?\]: .*$", re.S | re.M)
IN_HELP = {word: instead for word, instead in INSTEAD.items() if not word.startswith(("tail", "causal"))}


def wrong_words(text: str, instead: dict[str, str]) -> list[str]:
    """Each as `...what was found...: what to write`."""
    found = []
    for word, better in instead.items():
        for match in re.finditer(rf"\b(?:{word})\b", text, re.I):
            around = text[max(0, match.start() - 30) : match.end() + 20]
            found.append(f"...{' '.join(around.split())}...: {better}")
    return found


@pytest.mark.parametrize(
    "page",
    [page for page in pages() if page.name != "glossary.md"],
    ids=lambda page: page.name,
)
def test_prose(page: Path) -> None:
    text = CODE.sub(lambda match: " " if "\n" not in match[0] else "\n", page.read_text(encoding="utf-8"))
    assert wrong_words(text, INSTEAD if page.name in EXCEPT else INSTEAD | ON_PAGES) == []


def helps(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Every help text of a parser and of its commands."""
    yield parser.description or ""
    for action in parser._actions:
        yield action.help or ""
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from helps(inner)


@pytest.mark.parametrize("command", commands())
def test_help(command: str) -> None:
    text = "\n".join(helps(build_parser([command])))
    assert wrong_words(CODE.sub(" ", text), IN_HELP) == []


def test_descriptions_of_options() -> None:
    text = "\n".join(row.description for row in describe())
    assert wrong_words(CODE.sub(" ", text), IN_HELP) == []


def test_words_of_the_glossary_are_the_ones_to_use() -> None:
    glossary = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    for word in ("prompt remainder", "tail block", "max prompt tiles", "size levels", "token range", "offloaded"):
        assert word in glossary
