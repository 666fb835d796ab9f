"""The engine with a cost model of attention that says what no device would: outputs stay as they are."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.serving import Answer, Engine, assert_same
from tests.engine.tiny_models import VOCAB
from vllm_gaudi_ucm.ops.native.library import native, why_not_native
from vllm_gaudi_ucm.ops.unified_attention.cost.cost_model import NAMES, CostModel
from vllm_gaudi_ucm.ops.unified_attention.cost.model_file import Facts, save_model
from vllm_gaudi_ucm.ops.unified_attention.impl import native_items

pytestmark = pytest.mark.skipif(native() is None, reason=why_not_native())
MAX_TOKENS = 12


def _workload() -> list[list[int]]:
    """Prompts that share a beginning, some that share more of it, one alone."""
    rng = random.Random(5)
    common = [rng.randrange(3, VOCAB) for _ in range(70)]
    return [
        common[:length] + [rng.randrange(3, VOCAB) for _ in range(own)]
        for length, own in ((70, 3), (70, 40), (48, 9), (70, 1), (0, 20))
    ]


WORKLOAD = _workload()


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[Answer]:
    with Engine(tiny_llama, {"attention": {"cost_model": "off"}}, max_num_batched_tokens=64) as engine:
        return [answer for _ in range(2) for answer in engine.greedy(WORKLOAD, MAX_TOKENS)][len(WORKLOAD) :]


@pytest.mark.parametrize("dear", ["layer.merged", "layer.loaded"])
def test_outputs_do_not_depend_on_the_choice(
    tiny_llama: Path, tmp_path: Path, expected: list[Answer], dear: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """covers: A20, A22. Where merging costs all the time no group is split off, where loading does each is."""
    vector = np.array([1.0 if name == dear else 0.0 for name in NAMES])
    facts = Facts.of(torch.device("cpu"))
    path = tmp_path / "cost.json"
    save_model(path, CostModel({"native": vector}, {"native": vector * 1e18}), facts, {})
    unsplit: list[int] = []
    make_items = native_items.make_items

    def counted(parts: object, block_size: int, groups: object = ()) -> object:
        unsplit.append(len(groups))  # type: ignore[arg-type]
        return make_items(parts, block_size, groups)  # type: ignore[arg-type]

    monkeypatch.setattr("vllm_gaudi_ucm.ops.unified_attention.impl.native_jobs.make_items", counted)
    with Engine(tiny_llama, {"attention": {"cost_model": str(path)}}, max_num_batched_tokens=64) as engine:
        for _ in range(2):  # the second time the beginnings are cached, and shared from the first step on
            answers = engine.greedy(WORKLOAD, MAX_TOKENS)
        engine.check_idle()
    assert_same(answers, expected)
    assert (sum(unsplit) > 0) is (dear == "layer.merged")
