"""The connector's prefetch options and those of GSA's section."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_gaudi_ucm.config.ucm_config import connector_prefetch, idle_options, resolve_config
from vllm_gaudi_ucm.options.errors import expected
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.sparse.methods.gsa import GsaOptions

SECTION = {"prefetch_workers": 8, "prefetch_ahead": 5, "prefetch_cache_size": 77}


def over(method: str | None, **sections: Any) -> PrefetchOptions:
    config = resolve_config({"ucm": {"ucm_sparse_method": method, "ucm_sparse_config": sections}})
    return connector_prefetch(PrefetchOptions(prefetch_ahead=1, deadline=2.0), config)


@pytest.mark.parametrize(
    ("method", "sections"),
    [("GSA", {"GSA": SECTION}), ("KVStar", {"GSA": SECTION}), ("KVStar", {"KVStar": SECTION})],
)
def test_what_the_connector_says_stands_over_gsa(method: str, sections: dict[str, Any]) -> None:
    """covers: C4"""
    found = over(method, **sections)
    assert (found.prefetch_workers, found.prefetch_ahead, found.prefetch_cache_size) == (8, 1, 77)
    assert (found.max_pending_prefetch, found.deadline) == (64, 2.0)


@pytest.mark.parametrize(
    ("method", "sections"),
    [
        (None, {"GSA": SECTION}),
        ("ESA", {"GSA": SECTION}),
        ("KVStar", {"GSA": SECTION, "KVStar": {"base_method": "ESA"}}),
    ],
)
def test_the_section_of_a_method_that_does_not_select_counts_for_nothing(
    method: str | None, sections: dict[str, Any]
) -> None:
    assert over(method, **sections) == PrefetchOptions(prefetch_ahead=1, deadline=2.0)
    config = resolve_config({"ucm": {"ucm_sparse_method": method, "ucm_sparse_config": sections}})
    assert idle_options(config) == []


def test_both_have_the_same_defaults_and_descriptions() -> None:
    shared = [name for name in PrefetchOptions.model_fields if name in GsaOptions.model_fields]
    assert len(shared) == 5
    for name in shared:
        own, section = PrefetchOptions.model_fields[name], GsaOptions.model_fields[name]
        assert (own.default, own.description, expected(own)) == (
            section.default,
            section.description,
            expected(section),
        )
