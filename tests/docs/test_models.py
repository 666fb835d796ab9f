"""The table of model families: each cell is a test that exists, or a refusal that happens."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from vllm.model_executor.models.registry import ModelRegistry

from scripts.support_matrix import DEVICES, DOCS, REFUSED, cells, load, page
from tests.docs.commands import ROOT
from tests.engine.tiny_models import FAMILIES
from vllm_gaudi_ucm.platform.picture_features import FAMILIES as PICTURES

TABLE = load()


def proofs() -> Iterator[str]:
    for family in TABLE["families"]:
        for device in DEVICES:
            yield from (cell for cell in cells(TABLE, family, device).values() if not cell.startswith(REFUSED))


def test_the_page_is_that_of_the_table() -> None:
    """`python scripts/support_matrix.py` writes it anew."""
    assert (DOCS / "models.md").read_text(encoding="utf-8") == page(TABLE)


def test_every_cell_names_a_test_or_a_script(request: pytest.FixtureRequest) -> None:
    """With its parameter, if this run has the test: it may be one of a room, or one without slow tests."""
    collected = {item.nodeid for item in request.session.items}
    tests = {name.partition("[")[0] for name in collected}
    for proof in sorted(set(proofs())):
        path, _, test = proof.partition("::")
        if not test:
            assert (ROOT / path).is_file(), proof
        elif f"tests/{proof}".partition("[")[0] in tests and "[" in test:
            assert f"tests/{proof}" in collected, proof
        else:
            tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
            names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            assert test.partition("[")[0] in names, proof


def test_features_and_devices_are_known() -> None:
    for name, family in TABLE["families"].items():
        assert set(family) <= {"title", "architectures", "like", "refused", "for_validated", *DEVICES}, name
        assert family.get("like", name) in TABLE["families"]
        assert set(family["architectures"]) <= set(ModelRegistry.get_supported_archs()), name
        for device in DEVICES:
            assert set(cells(TABLE, name, device)) <= set(TABLE["features"]), name


def test_families_that_tests_serve_have_a_row() -> None:
    assert set(FAMILIES) <= set(TABLE["families"])


@pytest.mark.parametrize("family", [name for name in TABLE["families"] if "refused" in TABLE["families"][name]])
def test_a_refusal_says_what_to_do_instead(family: str) -> None:
    for feature, cell in TABLE["families"][family]["refused"].items():
        assert cell.startswith(REFUSED), feature
        assert any(word in cell for word in ("take ", "leave ")), (feature, cell)


def test_validated_configurations_have_a_family_or_none() -> None:
    """Pictures that the page calls refused are refused, and classes that it names are vLLM's."""
    assert len(TABLE["validated"]) == len({one["model"] for one in TABLE["validated"]}) == 56
    for one in TABLE["validated"]:
        assert one.get("family", "llama") in TABLE["families"], one
        refused = one.get("pictures")
        assert refused not in PICTURES, one
        assert refused is None or refused in ModelRegistry.get_supported_archs(), one
