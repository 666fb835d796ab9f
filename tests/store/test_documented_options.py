"""docs/guides/stores.md has every option with its type, default and description, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_gaudi_ucm.options.errors import expected, section
from vllm_gaudi_ucm.options.values import show_bytes
from vllm_gaudi_ucm.store.factory import STORES, store_class

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "guides" / "stores.md"


def rows(kind: str) -> Iterator[str]:
    for name, field in store_class(kind).Options.model_fields.items():
        inner = section(field)
        for key, leaf in (
            [(f"{name}.{part}", leaf) for part, leaf in inner.model_fields.items()] if inner else [(name, field)]
        ):
            default = "none: required" if leaf.is_required() else leaf.default
            default = {None: "null", True: "true"}.get(default, default)
            if key == "capacity":
                default = show_bytes(leaf.default).replace(" ", "")
            if key != "kind":
                yield f"| `{key}` | {expected(leaf)} | `{default}` | {leaf.description} |"


@pytest.mark.parametrize("kind", STORES.names())
def test_options(kind: str) -> None:
    part = DOCUMENT.read_text().split(f"### {kind}\n")[1].split("\n#")[0]
    found = [line for line in part.splitlines() if line.startswith("| `")]
    assert found == list(rows(kind))
