"""The doctor's rows on sparse methods."""

from __future__ import annotations

from typing import Any

from vllm_gaudi_ucm.cli.checks.check import Check
from vllm_gaudi_ucm.cli.checks.configuration import configuration_checks
from vllm_gaudi_ucm.cli.checks.sparse import SECTION, sparse_checks
from vllm_gaudi_ucm.config import resolve_config


def rows(method: str | None, **sections: Any) -> dict[str, Check]:
    config = resolve_config({"ucm": {"ucm_sparse_method": method, "ucm_sparse_config": sections}})
    return {check.name: check for check in sparse_checks(config)}


def test_no_method() -> None:
    found = rows(None)
    assert list(found) == ["ucm.ucm_sparse_method"]
    assert (found["ucm.ucm_sparse_method"].status, found["ucm.ucm_sparse_method"].found) == (
        "info",
        "null: every request is dense",
    )
    assert "GSA, ESA, KVStar" in found["ucm.ucm_sparse_method"].expected


def test_method_with_its_options() -> None:
    """covers: C24. From which context on requests are sparse."""
    found = rows("GSA", GSA={"sparse_ratio": 0.25})
    assert found["ucm.ucm_sparse_method"].status == "ok"
    assert "sparse_ratio=0.25, local_window_sz=2" in found["GSA"].found
    contexts = found["contexts that are sparse"].found
    assert contexts.startswith("from 2,048 tokens (with --block-size 128)")
    assert contexts.endswith("3 blocks are always attended and 1 of 13 chosen")


def test_kvstar_over_its_base() -> None:
    found = rows("KVStar", KVStar={"base_method": "ESA"}, ESA={"min_tokens": 4096})
    assert 'base_method="ESA"' in found["KVStar"].found
    assert "min_tokens=4096" in found["KVStar"].found
    assert found["contexts that are sparse"].found.startswith("from 4,096 tokens")
    assert not [check for check in found.values() if check.status == "warn"]


def test_options_without_effect() -> None:
    """covers: C4"""
    assert rows(None, GSA={"min_blocks": 9})["ucm.ucm_sparse_config.GSA"].status == "warn"
    found = rows("GSA", ESA={"min_blocks": 9})["ucm.ucm_sparse_config.ESA"]
    assert (found.status, found.advice) == ("warn", "set ucm.ucm_sparse_method to ESA, or remove the section")


def test_part_of_the_report() -> None:
    found = [check for check in configuration_checks('{"ucm_sparse_method": "ESA"}') if check.section == SECTION]
    assert [check.name for check in found] == ["ucm.ucm_sparse_method", "ESA", "contexts that are sparse"]
    assert "ucm_sparse_method=null" in list(configuration_checks("{}"))[-1].found
