"""The doctor's rows on what was added from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_gaudi_ucm.cli.doctor.check import Check
from vllm_gaudi_ucm.cli.doctor.extensions import REGISTRIES, extension_checks, option_names, registry_rows
from vllm_gaudi_ucm.registry import Registry
from vllm_gaudi_ucm.sparse.registry import ENTRY_POINTS, SPARSE_METHODS


def rows() -> dict[str, Check]:
    return {check.name: check for check in extension_checks()}


def test_what_is_built_in() -> None:
    """One row for each registry, and one for what the tools add; all of them are fine."""
    found = rows()
    assert [registry.kind for registry in REGISTRIES] == [name for name in found if name != "bucket strategy trace"]
    assert "entry point of vllm-gaudi-ucm-tools" in found["bucket strategy trace"].found
    assert {check.status for check in found.values()} == {"ok"}
    assert (found["sparse method"].status, found["sparse method"].found) == ("ok", "built in: GSA, ESA, KVStar")
    assert "padding_aware" in found["bucket strategy"].found


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.kind)
def test_what_is_registered_appears(registry: Registry[Any]) -> None:
    """With its place, its origin and its options."""
    with registry.scope():
        registry.register("Mine", "vllm_gaudi_ucm.sparse.methods.gsa:GSA")
        check = rows()[f"{registry.kind} Mine"]
    assert check.status == "ok"
    assert check.found.startswith("vllm_gaudi_ucm.sparse.methods.gsa.GSA (registered in this process); options: ")
    assert "sparse_ratio" in check.found
    assert f"{registry.kind} Mine" not in rows()


def test_what_packages_name_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what cannot be had: a name that is taken, or a module that is not there."""
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    points = "Theirs = vllm_gaudi_ucm.sparse.methods.gsa:ESA\nGSA = nowhere:GSA\nBroken = nowhere:Thing\n"
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{points}")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {check.name: check for check in registry_rows(SPARSE_METHODS)}
    assert found["sparse method"].found == "built in: GSA, ESA, KVStar"
    theirs = found["sparse method Theirs"]
    assert theirs.status == "ok"
    assert theirs.found.startswith("vllm_gaudi_ucm.sparse.methods.gsa.ESA (entry point of theirs 1); options: ")
    taken, broken = found["sparse method GSA"], found["sparse method Broken"]
    assert (taken.status, broken.status) == ("warn", "warn")
    assert "nowhere.GSA (entry point of theirs 1), but 'GSA' stands for vllm_gaudi_ucm.sparse" in taken.found
    assert "nowhere.Thing cannot be loaded" in broken.found


def test_options_of_a_dataclass_are_its_fields() -> None:
    assert option_names(Check)[:3] == ["section", "name", "status"]
    assert option_names(rows) == []
