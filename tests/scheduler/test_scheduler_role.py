"""What is said at start: from which context on requests are sparse, or that none ever is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.scheduler import scheduler_of
from vllm_gaudi_ucm.config.ucm_config import resolve_config
from vllm_gaudi_ucm.scheduler.setup import logger, scheduler_role
from vllm_gaudi_ucm.sparse.factory import UcmSparseFactory
from vllm_gaudi_ucm.sparse.registry import SPARSE_METHODS, SparseMethodError


class Lines(logging.Handler):
    """Keeps what is logged, whether vLLM's logger propagates or not."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append((record.levelname, record.getMessage()))


@pytest.fixture
def lines() -> Iterator[Lines]:
    found, level = Lines(), logger.level
    logger.addHandler(found)
    logger.setLevel(logging.INFO)
    yield found
    logger.setLevel(level)
    logger.removeHandler(found)


def role(max_model_len: int, method: str | None = "GSA", **options: Any) -> Any:
    config = {"ucm_sparse_method": method, "ucm_sparse_config": {"GSA": options}}
    return scheduler_role(resolve_config({"ucm": config}), 128, max_model_len)


def test_no_method() -> None:
    assert role(4096, method=None) is None


def test_shortest_context(lines: Lines) -> None:
    role(4096)
    assert lines.messages == [("INFO", "Sparse method GSA: contexts of 2048 tokens and more can be sparse.")]


@pytest.mark.parametrize(("sparse_steps", "said"), [("auto", True), ("always", False)])
def test_it_is_said_where_choosing_pays(lines: Lines, tmp_path: Path, sparse_steps: str, said: bool) -> None:
    """A tiny model's contexts are never sparse by cost, although they are long enough."""
    options = {"min_tokens": 20, "sparse_steps": sparse_steps}
    scheduler_of(tmp_path, {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": options}})
    texts = [text for _, text in lines.messages]
    assert any("tokens and more can be sparse" in text for text in texts)
    assert any("estimated to be faster: here never, up to --max-model-len" in text for text in texts) is said


@pytest.mark.parametrize("options", [{}, {"min_tokens": 1, "local_window_sz": 20}])
def test_requests_that_can_never_be_sparse(lines: Lines, options: dict[str, Any]) -> None:
    """covers: C24. Sparse that never starts is said."""
    role(2000, **options)
    assert [level for level, _ in lines.messages] == ["INFO", "WARNING"]
    assert "no request will be sparse" in lines.messages[1][1]


@pytest.mark.parametrize("over", ["Frugal", "KVStar"])
def test_method_that_changes_slots_is_refused(over: str) -> None:
    """covers: C21. Nothing would ask it."""
    with SPARSE_METHODS.scope():
        UcmSparseFactory.register_sparse_method("Frugal", "tests.sparse.third_party", "Frugal")
        sections = {"KVStar": {"base_method": "Frugal"}}
        config = resolve_config({"ucm": {"ucm_sparse_method": over, "ucm_sparse_config": sections}})
        with pytest.raises(SparseMethodError, match=r"Frugal\.estimate_num_slots_sparsed changes the slots"):
            scheduler_role(config, 128, 4096)
