"""Answers from a KV cache of 8-bit floats are those of a float32 cache that holds the same numbers, each of them the
nearest one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.families import prompts
from tests.engine.rounded_cache import RoundedRows, assert_follows
from tests.engine.tiny_models import make_config, make_model
from vllm_gaudi_ucm.ops.narrow_floats import narrow


def test_in_the_middle_either_is_right() -> None:
    """1.0625 lies between 1 and 1.125."""
    rows = RoundedRows()
    for _ in range(2):
        rows.record(narrow(torch.tensor([[1.125, -2.0, 0.0]])))
    found = rows.follow(torch.tensor([[1.0625 - 1e-6, -2.01, 0.0]]))
    assert torch.equal(found, torch.tensor([[1.125, -2.0, 0.0]]))
    assert rows.others == 1
    with pytest.raises(AssertionError, match="1 more rows"):
        rows.check_all_followed()
    with pytest.raises(AssertionError, match=r"a number 1\.2e-02 of itself from the middle"):
        rows.follow(torch.tensor([[1.05, -2.0, 0.0]]))
    rows.check_all_followed()


@pytest.mark.slow  # starts engines
@pytest.mark.parametrize("family", ["glm4_moe"])
def test_rows_of_an_engine(family: str, tmp_path: Path) -> None:
    """In chunks, and with preempted requests."""
    model = make_model(tmp_path, make_config(family))
    assert_follows(model, prompts(), 16, max_model_len=256, num_gpu_blocks_override=24)
