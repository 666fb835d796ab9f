"""The pages that are made from the code: every option and command, in tables that a page holds."""

from __future__ import annotations

import io
import re
import runpy
import sys
import types

import pytest
from pydantic import BaseModel

from tests.docs.commands import ROOT
from vllm_gaudi_ucm.cli.main import commands
from vllm_gaudi_ucm.config.ucm_config import describe
from vllm_gaudi_ucm.connector.transfer_config import EXTRA_CONFIG, ConnectorOptions
from vllm_gaudi_ucm.options.errors import section
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.store.factory import STORES, store_class


class Page(io.StringIO):
    """Keeps its text when it is closed."""

    text = ""

    def close(self) -> None:
        self.text = self.getvalue()
        super().close()


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> dict[str, Page]:
    """What mkdocs would get."""
    made: dict[str, Page] = {}
    module = types.ModuleType("mkdocs_gen_files")
    module.open = lambda name, mode: made.setdefault(name, Page())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mkdocs_gen_files", module)
    runpy.run_path(str(ROOT / "scripts/docs_reference.py"))
    return made


def test_every_option_stands_in_the_table_of_its_section(pages: dict[str, Page]) -> None:
    """By its last name, which no table breaks: keys of 42 characters were broken in mid-word."""
    text = pages["reference/configuration.md"].text
    parts = re.split(r"^## `(.*)`$", text, flags=re.MULTILINE)
    tables = dict(zip(parts[1::2], parts[2::2], strict=True))
    for row in describe():
        section, _, name = row.key.rpartition(".")
        assert f"\n| `{name}` | {row.type} | `{row.default}` |" in tables[section]
    names = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    assert max(map(len, names)) <= 24
    assert "white-space: nowrap" in text


def test_options_of_connector_prefetch_and_stores_are_tables_too(pages: dict[str, Page]) -> None:
    text = pages["reference/configuration.md"].text
    parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
    tables = dict(zip(parts[1::2], parts[2::2], strict=True))
    models: dict[str, type[BaseModel]] = {f"Store `{kind}`": store_class(kind).Options for kind in STORES.names()}
    models |= {f"`{EXTRA_CONFIG}`": ConnectorOptions, f"`{EXTRA_CONFIG}.prefetch`": PrefetchOptions}
    for title, model in models.items():
        for name, field in model.model_fields.items():
            if section(field) is None and name != "kind":
                row = re.search(rf"^\| `(?:store\.)?{name}` \| (.*) \|$", tables[title], re.MULTILINE)
                assert row, (title, name)
                assert row[1].endswith(f"| {field.description}"), name


def test_every_command_has_its_help(pages: dict[str, Page]) -> None:
    assert all(f"## gaudi-ucm {name}\n" in pages["reference/cli.md"].text for name in commands())
