"""`ucm.kv_cache.partial_hits` beside several KV-cache groups: tokens are those of Transformers, and less is computed.

A part of a block is copied in every group. What no request may read or copy is NaN.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.chunked_attention import TUNED
from tests.engine.connector import file_store, transfer
from tests.engine.group_memory import SWAP
from tests.engine.partial_hits import WINDOWS, count_scheduled
from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Engine
from tests.engine.swap import Poisoned
from tests.engine.tiny_models import VOCAB, make_config, make_model
from tests.engine.window_models import WINDOW, window_config

pytestmark = pytest.mark.slow  # starts engines

BLOCK = 16
LENGTH = 32
ON: dict[str, Any] = {"kv_cache": {"partial_hits": True}}
# every step fills all free blocks: no more of them than six requests need
OPTIONS: dict[str, Any] = {
    "max_num_batched_tokens": 48,
    "max_num_seqs": 6,
    "max_model_len": 176,
    "num_gpu_blocks_override": 400,
}
RNG = random.Random(7)
# longer than any window, and shorter; no multiple of a block
COMMON = [RNG.randrange(3, VOCAB) for _ in range(4 * BLOCK + 11)]
# of a window of 24 tokens: a whole block, less, more than most contexts
SIZES = [BLOCK, 5, 24, 300]


def prompts(count: int, common: int) -> list[list[int]]:
    return [COMMON[:common] + [RNG.randrange(3, VOCAB) for _ in range(RNG.randint(1, 30))] for _ in range(count)]


ASKED = prompts(6, len(COMMON)) + prompts(4, 2 * BLOCK + 5) + prompts(3, 5)
ARRIVALS = [3 * index for index in range(len(ASKED))]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
GSA = {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": {**WINDOWS, "sparse_ratio": 1.0}}}
TIGHT = {"gemma3_text": 28, "gpt_oss": 24, "llama4_text": 40}
BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "small": ({}, {}),
    "drafts": ({}, {"speculative_config": NGRAM}),
    "static": ({"graphs": {"mode": "eager", "max_graphs": 8}}, {}),
    "swaps and compaction": ({**SWAP, "kv_cache": {"partial_hits": True, "compaction": True}}, {}),
    "all blocks chosen": (GSA, {}),
    "exact admission": ({"scheduler": {"admission": "exact"}}, {}),
}
# with every model what lays out blocks and steps; what has to do with neither, with a model each
MODELS_BESIDE = [(model, name) for model in TIGHT for name in ("small", "static")]
MODELS_BESIDE += [(model, "swaps and compaction") for model in ("gemma3_text", "llama4_text")]
MODELS_BESIDE += [("gpt_oss", "drafts"), ("gpt_oss", "all blocks chosen"), ("gpt_oss", "exact admission")]


@pytest.fixture(scope="module", params=list(TIGHT))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / request.param, window_config(request.param))


@pytest.fixture(scope="module")
def reference(model: Path) -> ReferenceModel:
    return ReferenceModel(model, "eager")


def end(engine: Engine) -> None:
    for _ in range(3):
        engine.step()
    engine.check_idle()


@pytest.mark.parametrize(("model", "name"), MODELS_BESIDE, indirect=["model"])
def test_no_answer_changes(model: Path, reference: ReferenceModel, name: str) -> None:
    ucm, options = BESIDE[name]
    options = {**OPTIONS, **TUNED, "num_gpu_blocks_override": TIGHT[model.name], **options}
    with Poisoned(model, {**ON, **ucm}, **options) as engine:
        groups = len(engine.core.scheduler.kv_cache_config.kv_cache_groups)
        assert groups > 1
        reference.assert_greedy(ASKED, engine.staggered(ASKED, ARRIVALS, LENGTH))
        copies = engine.core.scheduler.block_policies.totals.copies
        assert copies
        assert copies % groups == 0
        assert engine.preemptions or name == "exact admission"
        assert engine.totals.swapped_in or "swaps" not in name
        end(engine)


def test_a_common_start_is_computed_once(model: Path, reference: ReferenceModel) -> None:
    """One after the other: windows have left the common tokens behind, whose blocks are free, and hold them still. Of
    a prompt's windows vLLM keeps the last one alone, until a second prompt shows where others go on; where a chunk
    begins nothing is needed of it."""
    asked = prompts(5, len(COMMON))
    with Engine(model, ON, **OPTIONS, **TUNED) as engine:
        count = count_scheduled(engine)
        answers = engine.alone(asked, LENGTH)
        reference.assert_greedy(asked, answers)
        hits = [answer.cached_tokens >= len(COMMON) for answer in answers]
        assert hits == [False, model.name == "llama4_text", *3 * [True]]
        assert count[0] <= sum(map(len, asked)) - 3 * len(COMMON) + 5 * (LENGTH - 1)
        end(engine)


def test_what_one_group_has_given_away_is_computed(model: Path, reference: ReferenceModel) -> None:
    """Blocks of windows are used for others before the second prompt comes, those with full attention are not."""
    first, second = prompts(2, len(COMMON))
    with Poisoned(model, ON, **OPTIONS, **TUNED) as engine:
        reference.assert_greedy([first], engine.greedy([first], LENGTH))
        manager = engine.core.scheduler.kv_cache_manager
        held = engine.core.scheduler.block_policies.named("partial hits")._blocks._held
        windows = [one.block for one in held.values() if one.place[0] != 0]
        assert windows
        manager.evict_blocks({block.block_id for block in windows})
        (found,) = engine.greedy([second], LENGTH)
        reference.assert_greedy([second], [found])
        assert found.cached_tokens == 0
        end(engine)


@pytest.mark.parametrize("model", ["gpt_oss"], indirect=True)
def test_a_draft_model(model: Path, reference: ReferenceModel) -> None:
    """Its keys and values are copied with the blocks of its groups."""
    drafts = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
    with Poisoned(model, ON, **OPTIONS, **TUNED, speculative_config=drafts) as engine:
        assert len(engine.core.scheduler.kv_cache_config.kv_cache_groups) > 1
        reference.assert_greedy(ASKED, engine.staggered(ASKED, ARRIVALS, LENGTH))
        assert engine.core.scheduler.block_policies.totals.copies
        end(engine)


@pytest.mark.parametrize("window", SIZES)
def test_windows_of_any_size(window: int, tmp_path: Path) -> None:
    """A window of a block, of less, and longer than the context: beside full attention, and in all layers."""
    configs = [make_config("mistral", sliding_window=window)]
    if window != WINDOW:  # above
        configs.append(window_config("gemma3_text", sliding_window=window))
    for number, config in enumerate(configs):
        folder = make_model(tmp_path / str(number), config)
        with Poisoned(folder, ON, **OPTIONS) as engine:
            found = engine.staggered(ASKED, ARRIVALS, LENGTH)
            ReferenceModel(folder, "eager").assert_greedy(ASKED, found)
            assert engine.core.scheduler.block_policies.totals.copies
            end(engine)


@pytest.mark.parametrize("model", ["gemma3_text", "llama4_text"], indirect=True)
def test_beside_our_connector(model: Path, reference: ReferenceModel, tmp_path: Path) -> None:
    """The second server loads what the first has stored; nothing that was loaded is copied."""
    for is_second in (False, True):
        stored = transfer(file_store(tmp_path))
        with Poisoned(model, ON, **OPTIONS, **TUNED, kv_transfer_config=stored) as engine:
            assert len(engine.core.scheduler.kv_cache_config.kv_cache_groups) > 1
            reference.assert_greedy(ASKED, engine.staggered(ASKED, ARRIVALS, LENGTH // 2))
            assert engine.core.scheduler.block_policies.totals.copies
            assert engine.runner.parts.transfer._ours.worker_side.loads.counts.loaded_blocks or not is_second
            end(engine)
