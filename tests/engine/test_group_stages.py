"""Several KV-cache groups over pipeline stages that swap, store and load: tokens are those of Transformers.

A stage has layers of some groups, so that a block has room for other numbers of layers on each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig

from tests.engine.connector_ranks import failed_blocks, ours, spoil, transfer
from tests.engine.group_memory import LENGTHS, OPTIONS, SWAP, TOKENS, prompts
from tests.engine.multi_connector import multi, offloading
from tests.engine.rank_faults import settle_saves
from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Answer, Engine, assert_same
from tests.engine.tiny_models import make_model
from tests.engine.window_models import window_config
from tests.engine.worker_processes import EngineOfWorkers
from vllm_gaudi_ucm.connector.connector import our_connector
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]  # starts engines

BLOCK = 16
# tokens of an answer to a prompt that was loaded
FEW = 8
WINDOW_LAYER, WHOLE_LAYER = "sliding_attention", "full_attention"
# of each the layers that a block has room for on two stages, and blocks that do not hold all requests
MODELS: dict[str, tuple[dict[str, Any], list[int], int]] = {
    # windows alone on the first stage: groups of one layer
    "gemma3_text": ({}, [1, 1], 32),
    # five layers, of which two see whole contexts
    "gpt_oss": ({"num_hidden_layers": 5, "layer_types": [WINDOW_LAYER, WHOLE_LAYER] * 2 + [WINDOW_LAYER]}, [1, 1], 29),
    # two layers of one group and one of another on the first stage, one layer of each of two groups on the other one
    "uneven": ({"num_hidden_layers": 5, "layer_types": [WHOLE_LAYER] * 2 + [WINDOW_LAYER] * 3}, [2, 1], 29),
}


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes, *_ = MODELS[request.param]
    kind = "gpt_oss" if request.param == "gpt_oss" else "gemma3_text"
    return make_model(tmp_path_factory.mktemp("models") / request.param, window_config(kind, **changes))


@pytest.fixture(scope="module")
def reference(model: Path) -> ReferenceModel:
    return ReferenceModel(model, "eager")


def stages(model: Path, ucm: dict[str, Any], **options: Any) -> EngineOfWorkers:
    ucm = {**ucm, "distributed": {"check_ranks": True}}
    found = EngineOfWorkers(model, ucm, pipeline_parallel_size=2, **{**OPTIONS, **options})
    assert len(found.core.scheduler.kv_cache_config.kv_cache_groups) > 1
    return found


def served(engine: EngineOfWorkers) -> list[Answer]:
    return engine.staggered(prompts(), [2 * index for index in range(len(LENGTHS))], TOKENS)


@torch.inference_mode()
def poison(worker: Any) -> None:
    """Of a worker: what is in no block that a request has written, or loaded."""
    for cache in worker.model_runner.parts.kv_caches.values():
        for rows in cache:
            rows.fill_(float("nan"))


def host_slots(worker: Any) -> tuple[int, int]:
    """Of a worker: how many, and bytes of one."""
    space = worker.model_runner.parts.memory._swaps
    return space._count, space.block_bytes


def choosing_layers(worker: Any) -> int:
    """Of a worker: how many of its layers choose blocks."""
    return len(worker.model_runner.parts.sparse.selector.layers)


@pytest.mark.parametrize(
    ("model", "mode"), [("gemma3_text", "eager"), ("gpt_oss", "off"), ("uneven", "eager")], indirect=["model"]
)
def test_swapped_requests_come_back(model: Path, reference: ReferenceModel, mode: str) -> None:
    """Each stage has a part of every slot in host memory, of as many layers as a block has room for there."""
    _, layers, blocks = MODELS[model.name]
    ucm = {**SWAP, "graphs": {"mode": mode, "max_graphs": 4}, "kv_cache": {"compaction": True}}
    with stages(model, ucm, num_gpu_blocks_override=blocks) as engine:
        engine.on_workers(poison)
        reference.assert_greedy(prompts(), served(engine))
        rules = engine.core.scheduler.block_policies
        assert rules.totals.swapped_in > 2
        assert rules.totals.recomputed_tokens == 0
        assert engine.most_in_flight == 2
        # keys and values of two heads of 16 float32 each
        page = 2 * BLOCK * 2 * 16 * 4
        count = SWAP["preemption"]["host_memory"] // (page * sum(layers))
        assert rules.named("swap")._slots.count == count
        assert engine.on_workers(host_slots) == [(count, page * number) for number in layers]
        rules.named("swap").check_integrity()
        engine.step()
        engine.check_idle()


@pytest.mark.parametrize("mode", ["off", "eager"])
@pytest.mark.parametrize("model", ["gemma3_text"], indirect=True)
def test_a_stage_of_windows_alone_chooses_nothing(model: Path, mode: str) -> None:
    """The other stage has a layer with whole contexts, which makes the choices of one worker."""
    options = {"sparse_steps": "always", "min_tokens": 32, "sparse_ratio": 0.3, "init_window_sz": 1}
    options |= {"local_window_sz": 1, "min_blocks": 1}
    ucm = {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": options}}
    ucm["graphs"] = {"mode": mode, "max_graphs": 4}
    with Engine(model, ucm, **OPTIONS) as engine:
        expected = engine.staggered(prompts(), [2 * index for index in range(len(LENGTHS))], TOKENS)
        assert engine.runner.parts.sparse is not None
        assert engine.runner.parts.sparse.state.totals.attended_blocks
        engine.check_idle()
    ucm["distributed"] = {"check_ranks": True}
    with EngineOfWorkers(model, ucm, pipeline_parallel_size=2, **OPTIONS) as engine:
        assert_same(served(engine), expected)
        assert engine.on_workers(choosing_layers) == [0, 1]
        engine.step()
        engine.check_idle()


@pytest.mark.parametrize("model", ["gemma3_text", "uneven"], indirect=True)
def test_stages_share_a_folder(model: Path, reference: ReferenceModel, tmp_path: Path) -> None:
    """Each stage stores its part of a block of every group. What one stage lacks, both compute again."""
    _, layers, blocks = MODELS[model.name]
    options = {"kv_transfer_config": transfer(tmp_path), "num_gpu_blocks_override": blocks}
    with stages(model, {}, **options) as engine:
        engine.on_workers(poison)
        _check_served(engine, reference, layers)
        if model.name != "uneven":
            # the same server has forgotten all; a second one is the same for any layers
            _forget(engine)
            _check_loaded(engine, reference)
            return
    with stages(model, {}, **options) as engine:
        engine.on_workers(poison)
        _check_loaded(engine, reference)
        page = _check_served(engine, reference, layers)
        in_files = (path for path in (tmp_path / "blocks").rglob("*") if path.is_file())
        for path in sorted(path for path in in_files if path.stat().st_size > page)[::4]:
            spoil(path)
        _forget(engine)
        reference.assert_greedy(prompts(), engine.greedy(prompts(), FEW))
        assert max(engine.llm.collective_rpc(failed_blocks)) > 0


def _check_served(engine: EngineOfWorkers, reference: ReferenceModel, layers: list[int]) -> int:
    """Beside steps in flight, and preempted; bytes of a layer of a block."""
    reference.assert_greedy(prompts(), served(engine))
    shards = our_connector(engine.core.scheduler.connector).scheduler_side._setup.shards
    page = shards[0].block_bytes // layers[0]
    assert [shard.block_bytes for shard in shards] == [page * number for number in layers]
    engine.step()
    engine.check_idle()
    return page


def _check_loaded(engine: EngineOfWorkers, reference: ReferenceModel) -> None:
    """All that is stored, and nothing that fails."""
    found = engine.alone(prompts(), FEW)
    reference.assert_greedy(prompts(), found)
    assert [answer.cached_tokens for answer in found] == [(length - 1) // BLOCK * BLOCK for length in LENGTHS]
    assert engine.llm.collective_rpc(failed_blocks) == [0, 0]


def _forget(engine: EngineOfWorkers) -> None:
    """What blocks of the device hold, and which blocks were seen in the store: the files alone are left."""
    engine.on_workers(settle_saves)
    assert engine.core.scheduler.reset_prefix_cache()
    our_connector(engine.core.scheduler.connector).scheduler_side.known.clear()
    engine.on_workers(poison)


@pytest.mark.parametrize("model", ["gemma3_text", "uneven"], indirect=True)
def test_blocks_come_back_from_vllms_connector(reference: ReferenceModel, model: Path, tmp_path: Path) -> None:
    """covers: D9. A block has as many layers on both stages where several groups are kept. Beside ours both store, and
    requests get their blocks from the first that has them."""
    _, layers, blocks = MODELS[model.name]
    options: dict[str, Any] = {"num_gpu_blocks_override": blocks}
    if len(set(layers)) > 1:
        options["kv_transfer_config"] = KVTransferConfig(**offloading())
        with pytest.raises(UnsupportedFeatureError, match=r"OffloadingConnector with stages of 3, 2 layers"):
            stages(model, {}, **options)
        return
    options["kv_transfer_config"] = multi(offloading(), ours(tmp_path))
    with stages(model, {}, **options) as engine:
        engine.on_workers(poison)
        for _ in range(2):
            found = engine.alone(prompts(), FEW)
            reference.assert_greedy(prompts(), found)
        assert found[1].cached_tokens == 96
        engine.step()
        engine.check_idle()
