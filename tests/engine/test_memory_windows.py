"""Memory mode in models whose layers see differently far back: blocks of whole contexts leave and come back, those of
windows stay until no token sees them.

Every block holds NaN until a request writes it, and once it is free.
"""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.connector import file_store, transfer
from tests.engine.hpu_process import run_on_card
from tests.engine.memory_mode import check_finite, copies_of, generated
from tests.engine.offloaded_blocks import WatchedEngine, check_same, contents_of
from tests.engine.rank_faults import settle_moves
from tests.engine.serving import Answer, Engine, assert_same, greedy_params
from tests.engine.tiny_models import VOCAB, make_model
from tests.engine.window_models import WINDOW, window_config
from tests.engine.worker_processes import EngineOfWorkers
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.protocol.offload import OffloadTotals

pytestmark = pytest.mark.slow  # starts engines

LENGTHS = (20, 130, 200, 260, WINDOW + 3)
# requests with the same prompts take each other's blocks, computed in other chunks
ROUNDING = 1e-4
# every step fills all free blocks: half of the memory that other tests have is enough
OPTIONS: dict[str, Any] = {
    "max_model_len": 384,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 48,
    "kv_cache_memory_bytes": 4 << 20,
}
CHOICE = {"sparse_steps": "always", "min_tokens": 32, "local_window_sz": 1, "init_window_sz": 1, "min_blocks": 2}
# Gemma 3: one layer of three sees whole contexts; with five windows for four of these a block has room for one more
MODELS: dict[str, dict[str, Any]] = {
    "gemma3_text": {},
    "gpt_oss": {},
    "llama4_text": {},
    "uneven": {
        "num_hidden_layers": 9,
        "layer_types": [*["sliding_attention", "full_attention"] * 4, "sliding_attention"],
    },
}


def prompts() -> list[list[int]]:
    """Shorter and longer than windows, and than the tokens of a step; two begin alike."""
    rng = random.Random(3)
    found = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]
    return [*found, found[2][:96] + found[1][:60]]


def ucm(mode: str = "off", method: str = "GSA", ratio: float = 0.2, **memory: Any) -> dict[str, Any]:
    options = {"on_device_ratio": 0.4, "refresh_steps": 3, "history_decay": 0.0, "max_missed": 1.0, **memory}
    return {
        "ucm_sparse_method": method,
        "ucm_sparse_config": {method: {**CHOICE, "sparse_ratio": ratio}},
        "memory_mode": {"enabled": True, **options},
        "graphs": {"mode": mode, "max_graphs": 12},
    }


def without(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "memory_mode"}


def settle(engine: Engine) -> None:
    """Answers depend on no clock from now on."""
    engine.core.model_executor.collective_rpc(settle_moves)


class WatchedGroups(WatchedEngine):
    """And the groups with windows: both sides have one table, and what stays in its place does not change."""

    def __init__(self, engine: Engine, tolerance: float | None = None) -> None:
        super().__init__(engine, tolerance)
        settle(engine)
        scheduler = engine._core.scheduler
        self._managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        others = (number for number in range(len(self._managers)) if number != self.offload._blocks.group)
        self._windows = {number: self._caches_of(number) for number in others}
        assert self._windows
        self._seen: dict[tuple[int, int, int], tuple[int, torch.Tensor]] = {}
        self._seen_before = self._seen
        engine.poison()

    def step(self) -> Any:
        self._seen_before, self._seen = self._seen, {}
        return super().step()

    def _check_request(self, state: Any) -> None:
        super()._check_request(state)
        scheduler, table = self.engine._core.scheduler, self.engine.runner.parts.requests
        request, live = scheduler.requests[state.request_id], table.requests.get(state.request_id)
        if live is None or request not in scheduler.running:
            return
        block_size, changes = self.engine.runner.parts.block_size, []
        for group, caches in self._windows.items():
            blocks = self._managers[group].req_to_blocks.get(state.request_id, [])
            first = self._managers[group].get_num_skipped_tokens(request.num_computed_tokens) // block_size
            numbers = range(first, min(request.num_computed_tokens // block_size, len(blocks)))
            contents = contents_of(caches, [blocks[number].block_id for number in numbers])
            for number, found in zip(numbers, contents, strict=True):
                block, name = blocks[number].block_id, f"block {number} of group {group}"
                assert block, f"{name} has left, and is seen"
                assert table._tables[group].blocks[live.row, number] == block
                place = state.generation, group, number
                self._seen[place] = block, found
                before = self._seen_before.get(place)
                if before is not None:
                    assert before[0] == block, f"{name} was moved"
                    changes.append((name, found, before[1]))
        check_same(changes, "was written where it stays")


def made(folder: Path, name: str) -> Path:
    family = "gemma3_text" if name == "uneven" else name
    return make_model(folder / name, window_config(family, **MODELS[name]))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS:
        made(folder, name)
    return folder


@pytest.fixture(scope="module")
def gemma(models: Path) -> Path:
    return models / "gemma3_text"


SERVED = [("gemma3_text", "off"), ("gpt_oss", "eager"), ("llama4_text", "off"), ("uneven", "off")]


@pytest.mark.parametrize(("name", "mode"), [*SERVED, ("gemma3_text", "eager")])
def test_blocks_leave_and_come_back(models: Path, name: str, mode: str) -> None:
    """In chunks. Two runs give the same tokens."""
    found = []
    # of one kind of graphs or other; what a run does is the same for every model
    for _ in range(2 if (name, mode) in SERVED[:2] else 1):
        with Engine(models / name, ucm(mode), **OPTIONS, enable_prefix_caching=False) as engine:
            watched = WatchedGroups(engine)
            outputs = watched.generate(prompts()[1:4], 40)
            check_finite(outputs)
            totals = watched.offload.totals
            assert totals.released > 20
            assert totals.loaded
            assert not totals.failed
            found.append(generated(outputs))
            engine.check_idle()
    assert found[0] == found[-1]


@pytest.mark.parametrize(("name", "mode"), SERVED)
def test_beside_the_prefix_cache(models: Path, name: str, mode: str) -> None:
    """Blocks that left are found again where nobody has taken them."""
    with Engine(models / name, ucm(mode), **OPTIONS) as engine:
        watched = WatchedGroups(engine, ROUNDING)
        check_finite(watched.generate(prompts(), 40))
        totals = watched.offload.totals
        assert totals.released > 20
        assert totals.found
        assert not totals.failed
        engine.check_idle()


def test_what_a_copy_takes(models: Path) -> None:
    """The layers that see whole contexts alone, to the byte."""
    with Engine(models / "uneven", ucm(), **OPTIONS) as engine:
        offload, groups = engine.core.scheduler.offload, engine.core.scheduler.kv_cache_config.kv_cache_groups
        assert sorted(len(group.layer_names) for group in groups) == [4, 5]
        assert len(groups[offload._blocks.group].layer_names) == 4
        # keys and values of 16 tokens in two heads of 16 float32 numbers
        assert copies_of(engine)._loads._block_bytes == 4 * 2 * 16 * 2 * 16 * 4
        rows = len(engine.runner.parts.sparse.selector.scorer.offloaded[0]) - 1
        blocks = engine.core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        assert offload._moves.rows.num_rows == rows == 2 * blocks


@pytest.mark.parametrize(("name", "mode"), SERVED)
def test_room_for_everything_changes_no_token(models: Path, name: str, mode: str) -> None:
    with Engine(models / name, without(ucm(mode)), **OPTIONS) as engine:
        expected = generated(engine.generate(prompts()[:4], greedy_params(30)))
    with Engine(models / name, ucm(mode, on_device_ratio=1.0), **OPTIONS) as engine:
        watched = WatchedGroups(engine)
        assert generated(watched.generate(prompts()[:4], 30)) == expected
        assert not watched.offload.totals.released


def test_drafts(gemma: Path) -> None:
    """Verified rows see what a single row sees, in windows, too."""
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    repeated = [(prompt[:40] * 6)[:200] for prompt in prompts()[2:4]]
    options = {**OPTIONS, "enable_prefix_caching": False}
    with Engine(gemma, ucm(method="KVStar"), **options, speculative_config=speculative) as engine:
        watched = WatchedGroups(engine)
        check_finite(watched.generate(repeated, 60))
        assert watched.offload.totals.released
        engine.check_idle()


@pytest.mark.parametrize("mode", ["off", "eager"])
def test_preempted_requests_compute_everything_again(mode: str, tmp_path: Path) -> None:
    """With many windows, whose blocks stay: requests grow out of them."""
    rng = random.Random(8)
    growing = [[rng.randrange(3, VOCAB) for _ in range(80 + 3 * count)] for count in range(6)]
    many = make_model(tmp_path, window_config("gemma3_text", num_hidden_layers=6, sliding_window_pattern=6))
    with Engine(many, ucm(mode), **OPTIONS, num_gpu_blocks_override=80) as engine:
        watched = WatchedGroups(engine)
        check_finite(watched.generate(growing, 60))
        assert engine.preemptions
        assert watched.offload.totals.released
        engine.check_idle()


def test_a_prefix_whose_blocks_have_left(gemma: Path) -> None:
    """Where a block of the whole contexts is given to others, the prompt is found up to it, whatever windows have."""
    prompt = prompts()[3]
    with Engine(gemma, ucm(moves_per_step=32), **OPTIONS) as engine:
        watched = WatchedGroups(engine, ROUNDING)
        engine.add("first", prompt, greedy_params(60))
        while not watched.offload.totals.released:
            watched.step()
        manager, blocks = engine.core.scheduler.kv_cache_manager, watched.offload._blocks
        (request,) = engine.core.scheduler.requests.values()
        away = min(watched.offload._states[request.request_id].offloaded)
        found = manager.block_pool.get_cached_block(request.block_hashes[away], [blocks.group])
        manager.evict_blocks({found[0].block_id})
        engine.add("second", prompt, greedy_params(8))
        outputs = watched.finish(["second", "first"])
        check_finite(outputs)
        # no window ends there any more
        assert outputs[0].num_cached_tokens < 16 * away + 1
        engine.check_idle()


def test_aborted_requests_leave_nothing(gemma: Path) -> None:
    rng = random.Random(5)
    with Engine(gemma, ucm(), **OPTIONS, enable_prefix_caching=False) as engine:
        watched = WatchedGroups(engine)
        for _ in range(6):
            engine.add("again", rng.choice(prompts()[2:4]), greedy_params(60))
            for _ in range(rng.randint(3, 25)):
                watched.step()
            engine.llm.llm_engine.abort_request(["again"])
        engine.add("again", prompts()[3], greedy_params(30))
        check_finite(watched.finish(["again"]))
        engine.check_idle()
        # the end of a request is told with the next step
        engine.generate([prompts()[0]], greedy_params(1))
        copies_of(engine).check_idle()


def test_more_requests_run_at_once(models: Path) -> None:
    """The same memory, too small for the contexts, and the same traffic."""
    rng = random.Random(9)
    asked = [[rng.randrange(3, VOCAB) for _ in range(190)] for _ in range(6)]
    most = []
    for config in (without(ucm()), ucm(moves_per_step=32)):
        with Engine(models / "gpt_oss", config, **OPTIONS, num_gpu_blocks_override=52) as engine:
            for prompt in asked:
                engine.add(engine.new_id(), prompt, greedy_params(100))
            running = []
            while engine._core.scheduler.has_unfinished_requests():
                engine.step()
                running.append(len(engine._core.scheduler.running))
            most.append(sum(running) / len(running))
            engine.check_idle()
    assert most[1] > 1.2 * most[0]


def served(engine: Engine) -> tuple[list[Answer], OffloadTotals]:
    settle(engine)
    answers = engine.greedy(prompts()[1:4], 24)
    return answers, engine.core.scheduler.offload.totals


def test_two_workers_do_what_one_does(gemma: Path) -> None:
    """Each copies its own heads of the layers with whole contexts."""
    found = []
    for of_workers, workers in ((Engine, 1), (EngineOfWorkers, 2)):
        config = {**ucm(), "distributed": {"check_ranks": True}}
        options = {**OPTIONS, "enable_prefix_caching": False, "tensor_parallel_size": workers}
        with of_workers(gemma, config, **options) as engine:
            found.append(served(engine))
            engine.step()
            engine.check_idle()
    (expected, counted), (answers, totals) = found
    assert_same(answers, expected)
    assert totals.loaded == counted.loaded > 0
    assert totals.released == counted.released > 0


def serve_on_card(model: str) -> dict[str, Any]:
    config = {**ucm(), "graphs": {"mode": "auto", "warm_up": "full", "max_graphs": 3}}
    with Engine(Path(model), config, **OPTIONS, enable_prefix_caching=False, num_gpu_blocks_override=200) as engine:
        from habana_frameworks.torch.simulator import card

        warm = card.compilations, card.compiled_graphs, card.bypasses
        answers, totals = served(engine)
        counts = card.compilations, card.compiled_graphs, card.bypasses
        moved = totals.released, totals.loaded
    return {"answers": [asdict(answer) for answer in answers], "warm": warm, "counts": counts, "moved": moved}


def test_on_the_simulated_card(tmp_path: Path) -> None:
    """Tokens of the CPU, by recipes that were compiled before."""
    config = window_config("gemma3_text", num_hidden_layers=2, sliding_window_pattern=2)
    model = make_model(tmp_path / "model", config)
    found = run_on_card(serve_on_card, tmp_path, model=str(model)).result
    with Engine(model, ucm(), **OPTIONS, enable_prefix_caching=False, num_gpu_blocks_override=200) as engine:
        expected, totals = served(engine)
        assert found["moved"] == [totals.released, totals.loaded]
        assert min(found["moved"]) > 0
    assert_same([Answer(**answer) for answer in found["answers"]], expected)
    assert found["counts"] == found["warm"]


def test_windows_in_the_table_of_whole_contexts_are_refused(gemma: Path, tmp_path: Path) -> None:
    """They would read what has left."""
    kinds = ["sliding_attention", *["full_attention"] * 3]
    more_whole = make_model(tmp_path, window_config("gemma3_text", num_hidden_layers=4, layer_types=kinds))
    refused = r"memory mode with layers with windows .* in the block table"
    with pytest.raises(UnsupportedFeatureError, match=refused):
        Engine(gemma, ucm(), **OPTIONS, disable_hybrid_kv_cache_manager=True)
    with pytest.raises(UnsupportedFeatureError, match=refused):
        Engine(more_whole, ucm(), **OPTIONS)


@pytest.mark.parametrize("mode", ["off", "eager"])
def test_beside_our_connector(gemma: Path, tmp_path: Path, mode: str) -> None:
    """Prompts are loaded whole, blocks of windows too, and leave afterwards; nothing absent is stored."""
    connector = transfer(file_store(tmp_path))
    hits = []
    for _ in range(2):
        with Engine(gemma, ucm(mode), **OPTIONS, kv_transfer_config=connector) as engine:
            watched = WatchedGroups(engine, ROUNDING)
            outputs = watched.generate(prompts()[:5], 20)
            check_finite(outputs)
            hits.append([output.num_cached_tokens for output in outputs])
            assert watched.offload.totals.released
            assert not watched.offload.totals.stored
            for _ in range(3):
                watched.step()
            engine.check_idle()
            copies_of(engine).check_idle()
    assert hits == [[0] * 5, [(length - 1) // 16 * 16 for length in LENGTHS]]


def test_answers_beside_our_connector(gemma: Path, tmp_path: Path) -> None:
    """All blocks stay: answers are those without a store."""
    config = ucm(ratio=1.0, on_device_ratio=1.0)
    with Engine(gemma, without(config), **OPTIONS) as engine:
        expected = engine.greedy(prompts(), 18)
    for _ in range(2):
        with Engine(gemma, config, **OPTIONS, kv_transfer_config=transfer(file_store(tmp_path))) as engine:
            assert_same(engine.greedy(prompts(), 18), expected)


def test_what_does_not_come_is_computed(gemma: Path, tmp_path: Path) -> None:
    """Blocks that are not what they were: requests begin anew, and their blocks may leave again."""
    with Engine(gemma, ucm(), **OPTIONS, kv_transfer_config=transfer(file_store(tmp_path))) as engine:
        engine.greedy(prompts(), 8)
    stored = sorted(path for path in (tmp_path / "blocks").rglob("*") if path.is_file() and path.stat().st_size > 4096)
    for path in random.Random(3).sample(stored, len(stored) // 4):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with Engine(gemma, ucm(), **OPTIONS, kv_transfer_config=transfer(file_store(tmp_path))) as engine:
        watched = WatchedGroups(engine, ROUNDING)
        check_finite(watched.generate(prompts(), 40))
        assert engine.runner.parts.transfer._ours.worker_side.loads.counts.failed_blocks
        assert watched.offload.totals.released
        for _ in range(3):
            watched.step()
        engine.check_idle()


def test_partial_loads_are_refused_by_name(gemma: Path, tmp_path: Path) -> None:
    connector = transfer(file_store(tmp_path), partial_loads=True)
    with pytest.raises(Exception, match=r"partial_loads.*prompts are loaded whole"):
        Engine(gemma, ucm(), **OPTIONS, kv_transfer_config=connector)
