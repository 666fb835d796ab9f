"""Packed prompts, chunks and decodes on the simulated card, in buckets that bound how far rows look back."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.engine.hpu_process import run_on_card
from tests.engine.serving import Answer, Engine, assert_same
from vllm_gaudi_ucm.graphs.cost.specs import LLAMA_8B, device_spec
from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes import prompt_tiles
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.strategies.file import write_bucket_file
from vllm_gaudi_ucm.observability.phase_log import read_phase_log

# starts engines on the simulated card
pytestmark = pytest.mark.slow

TILE = 32
REACHES = (1, 4)
# Tokens of each prompt; a step takes at most 512, so some are cut in chunks.
LENGTHS = [[16] * 12, [60, 64, 33, 64, 50, 41, 64, 64], [100, 30, 400, 90, 7, 64, 2, 120, 48], [128] * 8]


def prompts_of(lengths: list[int], vocabulary: int = 128) -> list[list[int]]:
    """The first tokens of every other one are common."""
    rng = random.Random(sum(lengths))
    common = [rng.randrange(vocabulary) for _ in range(48)]
    return [
        [*common[: length - 1], rng.randrange(vocabulary)][:length]
        if place % 2 and length > 60
        else [rng.randrange(vocabulary) for _ in range(length)]
        for place, length in enumerate(lengths)
    ]


def serve(model: str, files: str) -> dict[str, Any]:
    """Answers and what ran where, with tiles of a few rows so that small steps have many."""
    from habana_frameworks.torch.simulator import card

    prompt_tiles.TILE_ROWS = TILE
    file, log = Path(files, "buckets.yaml"), Path(files, "phases.jsonl")
    limits = Limits(512, 16, 512, 16, 200, False, bounds_prompt_tiles=True)
    shapes = [ForwardShape.from_sizes(True, 512, *blocks) for blocks in ((0, 0), (40, 100))]
    shapes = [shape.with_prompt_tiles(reach) for shape in shapes for reach in REACHES]
    cost = CostModel(device_spec("gaudi2"), LLAMA_8B, 16)
    write_bucket_file(file, BucketSet([ForwardShape("-su", 16, 40, 100), *shapes], [16], limits, cost), {})
    graphs = {"mode": "auto", "warm_up": "full", "buckets": str(file)}
    with Engine(Path(model), {"phase_log": str(log), "graphs": graphs}) as engine:
        warm = card.compilations, card.compiled_graphs
        answers = [[asdict(answer) for answer in engine.greedy(prompts_of(lengths), 3)] for lengths in LENGTHS]
        served = card.compilations, card.compiled_graphs
    ran = [(record.bucket.max_prompt_tiles, record.padded.max_prompt_tiles) for record in read_phase_log(log)[1]]
    return {"warm": warm, "served": served, "answers": answers, "ran": ran}


def test_answers_are_those_of_true_shapes_and_nothing_is_compiled(tiny_llama: Path, tmp_path: Path) -> None:
    """covers: A2 A15 B1 B2 B3"""
    with Engine(tiny_llama) as engine:
        expected = [engine.greedy(prompts_of(lengths), 3) for lengths in LENGTHS]
    found = run_on_card(serve, tmp_path, model=str(tiny_llama), files=str(tmp_path)).result
    for answers, wanted in zip(found["answers"], expected, strict=True):
        assert_same([Answer(**answer) for answer in answers], wanted, near_ties=0)
    assert found["served"] == found["warm"]
    used = {padded for _, padded in found["ran"]}
    assert used >= {*REACHES, prompt_tiles.ALL_TILES}, "a chunk of a long prompt reaches beyond the bounds"
    assert all(true <= padded for true, padded in found["ran"] if true != prompt_tiles.ALL_TILES)
