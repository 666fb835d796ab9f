"""Our connector beside several KV-cache groups: a second server finds what the first one stored, whole windows of it.

Every block holds NaN until a request writes it or a load fills it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.connector import file_store, transfer
from tests.engine.multi_connector import multi, offloading, ours
from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Engine
from tests.engine.tiny_models import VOCAB, make_config, make_model
from tests.engine.window_models import WINDOW, window_config
from vllm_gaudi_ucm.connector.offloading_connector import SwappingWorker

pytestmark = pytest.mark.slow  # starts engines

# a block's, so that every answer begins one
TOKENS = 16
BLOCK = 16
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 6, "max_model_len": 192}


def prompts() -> list[list[int]]:
    """Shorter and longer than the window, and than the tokens of a step; the last two begin alike."""
    rng = random.Random(5)
    found = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (1, 110, WINDOW + 3, 90)]
    return [*found, [*found[1][:70], 9, 8, 7, 6]]


@pytest.fixture(scope="module", params=["gemma3_text", "gpt_oss"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / request.param, window_config(request.param))


@pytest.fixture(scope="module")
def reference(model: Path) -> ReferenceModel:
    return ReferenceModel(model, "eager")


def server(model: Path, folder: Path, mode: str = "off", **options: Any) -> Engine:
    ucm = {"graphs": {"mode": mode, "max_graphs": 4}}
    found = Engine(model, ucm, kv_transfer_config=transfer(file_store(folder)), **{**OPTIONS, **options})
    assert len(found.core.scheduler.kv_cache_config.kv_cache_groups) > 1
    found.poison()
    return found


def end(engine: Engine) -> None:
    for _ in range(3):
        engine.step()
    engine.check_idle()


# a step's shapes have nothing to do with what a model's groups store: one model in buckets
@pytest.mark.parametrize(
    ("model", "mode"), [("gemma3_text", "off"), ("gemma3_text", "eager"), ("gpt_oss", "off")], indirect=["model"]
)
def test_a_second_server_finds_the_blocks_of_every_group(
    model: Path, reference: ReferenceModel, mode: str, tmp_path: Path
) -> None:
    asked = prompts()
    with server(model, tmp_path, mode) as engine:
        reference.assert_greedy(asked, engine.greedy(asked, TOKENS))
        end(engine)
    with server(model, tmp_path, mode) as engine:
        again = engine.alone(asked, TOKENS)
        reference.assert_greedy(asked, again)
        assert [answer.cached_tokens for answer in again] == [(len(one) - 1) // BLOCK * BLOCK for one in asked]
        counts = engine.runner.parts.transfer._ours.worker_side.loads.counts
        groups = len(engine.core.scheduler.kv_cache_config.kv_cache_groups)
        whole = {3: 1, 2: 1}[groups]
        # Of a window of 24 tokens two blocks, whatever the prompt. The last prompt loads its own, because the second
        # one has brought those of its own window only.
        assert counts.loaded_blocks == whole * (6 + 1 + 5 + 4) + (groups - whole) * (2 + 1 + 2 + 2)
        assert counts.failed_blocks == 0
        end(engine)


def test_what_does_not_come_is_computed(model: Path, reference: ReferenceModel, tmp_path: Path) -> None:
    """Blocks that are not what they were: their requests begin anew, and nothing before a window is missing."""
    asked = prompts()
    with server(model, tmp_path) as engine:
        engine.greedy(asked, TOKENS)
        end(engine)
    stored = sorted(path for path in (tmp_path / "blocks").rglob("*") if path.is_file() and path.stat().st_size > 4096)
    for path in random.Random(3).sample(stored, len(stored) // 4):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with server(model, tmp_path) as engine:
        for _ in range(2):
            reference.assert_greedy(asked, engine.greedy(asked, TOKENS))
            end(engine)
        counts = engine.runner.parts.transfer._ours.worker_side.loads.counts
        assert counts.failed_blocks > 0


def test_a_small_cache_that_saves_and_loads(model: Path, reference: ReferenceModel, tmp_path: Path) -> None:
    """Preempted requests find in the store what the device has given away, beside others that save."""
    asked = prompts()
    groups = {"gemma3_text": 30, "gpt_oss": 26}
    blocks = next(count for name, count in groups.items() if name in str(model))
    with server(model, tmp_path, num_gpu_blocks_override=blocks) as engine:
        for _ in range(2):
            reference.assert_greedy(asked, engine.staggered(asked, [3 * index for index in range(len(asked))], 48))
            end(engine)
        assert engine.preemptions
        assert engine.runner.parts.transfer._ours.worker_side.loads.counts.loaded_blocks


def test_offloading_connector(model: Path, reference: ReferenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own, whose chunks in host memory are those of each group: what the device forgets comes back."""
    loads = []
    load = SwappingWorker.submit_load

    def counted(self: SwappingWorker, job_id: int, source: Any, target: Any) -> bool:
        loads.append([size > 0 for size in target.group_sizes])
        return load(self, job_id, source, target)

    monkeypatch.setattr(SwappingWorker, "submit_load", counted)
    asked = prompts()
    options = {**OPTIONS, "num_gpu_blocks_override": 30 if "gemma3" in str(model) else 26}
    with Engine(model, kv_offloading_size=0.01, kv_offloading_backend="native", **options) as engine:
        assert len(engine.core.scheduler.kv_cache_config.kv_cache_groups) > 1
        engine.poison()
        for _ in range(2):
            found = engine.alone(asked, TOKENS)
            reference.assert_greedy(asked, found)
        assert found[1].cached_tokens == 96
        # of windows and of full attention
        assert any(all(groups) for groups in loads)
        end(engine)


def test_both_connectors_and_a_sparse_method(model: Path, reference: ReferenceModel, tmp_path: Path) -> None:
    """Children of MultiConnector: host memory first; a second server has our files alone."""
    options = {"sparse_steps": "always", "min_tokens": 32, "sparse_ratio": 1.0, "init_window_sz": 1}
    ucm = {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": options}}
    asked, blocks = prompts(), 30 if "gemma3" in str(model) else 26
    for _ in range(2):
        config = multi(offloading(), ours(tmp_path))
        with Engine(model, ucm, kv_transfer_config=config, num_gpu_blocks_override=blocks, **OPTIONS) as engine:
            assert len(engine.core.scheduler.kv_cache_config.kv_cache_groups) > 1
            engine.poison()
            for _ in range(2):
                found = engine.alone(asked, TOKENS)
                reference.assert_greedy(asked, found)
            assert found[1].cached_tokens == 96
            assert sum(engine.runner.parts.sparse.state.totals.modes.values())
            end(engine)


def test_a_window_in_all_layers(tmp_path: Path) -> None:
    """One group, which frees what is behind its window: a load begins with blocks that nobody has."""
    model = make_model(tmp_path / "model", make_config("mistral", sliding_window=WINDOW))
    asked = prompts()
    for start in range(2):
        config = transfer(file_store(tmp_path))
        with Engine(model, kv_transfer_config=config, **OPTIONS) as engine:
            engine.poison()
            found = engine.alone(asked, TOKENS)
            ReferenceModel(model).assert_greedy(asked, found)
            if start:
                assert found[1].cached_tokens == 96
                assert engine.runner.parts.transfer._ours.worker_side.loads.counts.loaded_blocks == 2 + 1 + 2 + 2
            end(engine)
