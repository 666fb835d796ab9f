"""Swaps, admission and compaction beside several KV-cache groups: tokens are those of Transformers.

What no request has any more is NaN after each step, in host memory nothing is left, and windows still free blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.group_memory import LENGTHS, OPTIONS, SWAP, TOKENS, prompts
from tests.engine.kv_groups import held_at_the_end
from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Answer
from tests.engine.swap import Poisoned
from tests.engine.tiny_models import make_config, make_model
from tests.engine.window_models import window_config
from tests.engine.worker_processes import EngineOfWorkers
from vllm_gaudi_ucm.vllm_api.blocks import kv_block_bytes
from vllm_gaudi_ucm.vllm_api.stage_layers import engine_block_bytes

pytestmark = pytest.mark.slow  # starts engines

# blocks that hold one request of the longest length, and not all of the prompts
TIGHT = {"gemma3_text": 22, "gpt_oss": 18}


@pytest.fixture(scope="module", params=list(TIGHT))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / request.param, window_config(request.param))


@pytest.fixture(scope="module")
def reference(model: Path) -> ReferenceModel:
    return ReferenceModel(model, "eager")


def tight(model: Path, ucm: dict[str, Any], mode: str = "off", **options: Any) -> Poisoned:
    blocks = next(count for name, count in TIGHT.items() if name in str(model))
    ucm = {**ucm, "graphs": {"mode": mode, "max_graphs": 4}}
    found = Poisoned(model, ucm, **{**OPTIONS, "num_gpu_blocks_override": blocks, **options})
    assert len(found.core.scheduler.kv_cache_config.kv_cache_groups) > 1
    found.poison()
    return found


def served(engine: Poisoned) -> list[Answer]:
    return engine.staggered(prompts(), [2 * index for index in range(len(LENGTHS))], TOKENS)


@pytest.mark.parametrize("mode", ["off", "eager"])
def test_swapped_requests_come_back(model: Path, reference: ReferenceModel, mode: str) -> None:
    """A window group gives and gets the blocks of its window alone."""
    with tight(model, SWAP, mode) as engine:
        manager = engine.core.scheduler.kv_cache_manager
        space = engine.runner.parts.memory._swaps
        assert (
            space.block_bytes
            == kv_block_bytes(manager)
            == engine_block_bytes(space.block_bytes, 1, engine.llm.llm_engine.vllm_config)
        )
        reference.assert_greedy(prompts(), served(engine))
        assert engine.preemptions > 1
        assert engine.totals.swapped_in > 2
        assert engine.totals.recomputed_tokens == 0
        assert engine.totals.swap_refusals == 0
        engine.check_all_free()


def test_swaps_beside_drafts_and_compaction(model: Path, reference: ReferenceModel) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    ucm = {**SWAP, "kv_cache": {"compaction": True}}
    with tight(model, ucm, speculative_config=drafts) as engine:
        reference.assert_greedy(prompts(), served(engine))
        assert engine.totals.swapped_in > 2
        engine.check_all_free()


def test_swaps_beside_a_sparse_method(reference: ReferenceModel, model: Path) -> None:
    """Summaries of blocks that come back are made again; layers with windows swap theirs, and choose nothing."""
    options = {"sparse_steps": "always", "min_tokens": 32, "sparse_ratio": 1.0, "init_window_sz": 1}
    ucm = {**SWAP, "ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": options}, "kv_cache": {"compaction": True}}
    with tight(model, ucm) as engine:
        reference.assert_greedy(prompts(), served(engine))
        assert engine.totals.swapped_in > 2
        assert sum(engine.runner.parts.sparse.state.totals.modes.values())
        engine.check_all_free()


def test_exact_admission_never_preempts(model: Path, reference: ReferenceModel) -> None:
    """The same requests are preempted where greedy admission swaps them."""
    with tight(model, {"scheduler": {"admission": "exact"}}) as engine:
        reference.assert_greedy(prompts(), served(engine))
        assert engine.totals.admission_waits
        assert engine.preemptions == 0
        for _ in range(3):
            engine.step()
        engine.check_idle()


# of two models and two modes a pair each: all four are above, and blocks move alike
@pytest.mark.parametrize(("model", "mode"), [("gemma3_text", "eager"), ("gpt_oss", "off")], indirect=["model"])
def test_blocks_move_down_in_every_group(model: Path, reference: ReferenceModel, mode: str) -> None:
    """Requests that end leave gaps, and tables of all groups follow what moves."""
    with tight(model, {"kv_cache": {"compaction": True}}, mode, num_gpu_blocks_override=400) as engine:
        engine.greedy(prompts()[1:3], 2)
        reference.assert_greedy(prompts(), served(engine))
        assert engine.totals.moves > 5
        engine.core.scheduler.block_policies.named("compaction").runs.check_integrity()
        engine.check_idle()


@pytest.mark.parametrize(("model", "mode"), [("gemma3_text", "off"), ("gpt_oss", "eager")], indirect=["model"])
def test_a_draft_model_has_groups_of_its_own(
    model: Path, reference: ReferenceModel, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of the model itself are all right, so that K/V of its windows are, too; beside swaps and compaction."""
    drafts = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    ucm = {**SWAP, "kv_cache": {"compaction": True}}
    with tight(model, ucm, mode, speculative_config=drafts) as engine:
        reference.assert_greedy(prompts(), served(engine))
        assert engine.totals.swapped_in > 2
        steps, step = [], engine.step
        monkeypatch.setattr(engine, "step", lambda: steps.append(0) or step())
        *windows, whole = held_at_the_end(engine, prompts()[1][:100])
        # of the prompt three, of 40 tokens one for four
        assert len(steps) <= 3 + 10 + 2
        # of 140 tokens; a window has those that are drafted, too
        assert whole == 9
        assert max(windows) <= 4
        engine.check_all_free()


def test_a_draft_model_of_another_shape(tmp_path: Path) -> None:
    """Its layers share no memory with the model's: one table, and the same tokens."""
    model = make_model(tmp_path / "model", window_config("gpt_oss"))
    other = make_model(tmp_path / "other", make_config("llama", num_key_value_heads=4))
    drafts = {"method": "draft_model", "model": str(other), "num_speculative_tokens": 3}
    with Poisoned(model, SWAP, speculative_config=drafts, num_gpu_blocks_override=22, **OPTIONS) as engine:
        assert len(engine.core.scheduler.kv_cache_config.kv_cache_groups) == 1
        ReferenceModel(model, "eager").assert_greedy(prompts(), served(engine))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two windows, then full attention: for engines of two workers, where each layer of each worker takes its time."""
    return make_model(tmp_path_factory.mktemp("models") / "gemma3_text", window_config("gemma3_text"))


def test_two_workers(gemma: Path) -> None:
    """Each has a part of the heads of every group, in host memory, too; all run the same bucket."""
    ucm = {**SWAP, "distributed": {"check_ranks": True}, "graphs": {"mode": "eager", "max_graphs": 4}}
    with EngineOfWorkers(gemma, ucm, tensor_parallel_size=2, num_gpu_blocks_override=22, **OPTIONS) as engine:
        assert len(engine.core.scheduler.kv_cache_config.kv_cache_groups) > 1
        found = engine.staggered(prompts(), [2 * index for index in range(len(LENGTHS))], TOKENS)
        assert engine.core.scheduler.block_policies.totals.swapped_in > 2
    ReferenceModel(gemma, "eager").assert_greedy(prompts(), found)


def test_two_stages(gemma: Path) -> None:
    """The first has windows alone, and reads no block of the group that has full attention."""
    ucm = {
        "scheduler": {"admission": "exact"},
        "kv_cache": {"compaction": True},
        "graphs": {"mode": "eager", "max_graphs": 4},
        "distributed": {"check_ranks": True},
    }
    with EngineOfWorkers(gemma, ucm, pipeline_parallel_size=2, num_gpu_blocks_override=40, **OPTIONS) as engine:
        assert len(engine.core.scheduler.kv_cache_config.kv_cache_groups) > 1
        found = engine.staggered(prompts(), [2 * index for index in range(len(LENGTHS))], 18)
        assert engine.preemptions == 0
        assert engine.most_in_flight == 2
        engine.step()
        engine.check_idle()
    ReferenceModel(gemma, "eager").assert_greedy(prompts(), found)
