"""Sampling in compiled regions: the tokens of vLLM's sampler, one graph of each stage for each logits bucket."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from vllm import SamplingParams

from tests.sampling.sampling_twins import (
    MAX_ROWS,
    MODES,
    VOCAB,
    WIDTH,
    Twins,
    assert_same,
    engine_config,
    poisoned_logits,
    random_grammar,
)
from vllm_gaudi_ucm.execution.divided_logits import put_rows, take_rows
from vllm_gaudi_ucm.graphs.runners.compiled import StaticCompiler
from vllm_gaudi_ucm.ops.likeliest_tokens import likeliest_tokens
from vllm_gaudi_ucm.sampling.stages.logit_bias import add_biases
from vllm_gaudi_ucm.sampling.stages.penalties import penalised, write_lines
from vllm_gaudi_ucm.sampling.stages.row_transfer import put_row, take_row
from vllm_gaudi_ucm.sampling.stages.token_choice import draw, draw_from_top
from vllm_gaudi_ucm.sampling.stages.token_mask import mask_logits
from vllm_gaudi_ucm.sampling.stages.top_logprobs import score_tokens

REGIONS: tuple[Callable[..., Any], ...] = (
    mask_logits,
    add_biases,
    take_row,
    put_row,
    write_lines,
    penalised,
    likeliest_tokens,
    draw,
    draw_from_top,
    score_tokens,
)
BUCKETS = (1, 2, MAX_ROWS)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def entries() -> dict[str, int]:
    """Compiled graphs of each region."""
    return {region.__name__: len(_debug_get_cache_entry_list(region.__code__)) for region in REGIONS}


def any_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
        top_k=rng.choice([0, 0, 1, 5]),
        top_p=rng.choice([1.0, 1.0, 0.5, 0.9]),
        min_p=rng.choice([0.0, 0.0, 0.2]),
        presence_penalty=rng.choice([0.0, 1.5]),
        frequency_penalty=rng.choice([0.0, -1.0]),
        repetition_penalty=rng.choice([1.0, 1.8]),
        logprobs=rng.choice([None, 0, 3, WIDTH]),
        seed=rng.choice([None, 4]),
        logit_bias=rng.choice([None, {4: 9.0, 5: -100.0}]),
        allowed_token_ids=rng.choice([None, list(range(0, VOCAB, 3))]),
        max_tokens=20,
    )


# `eager` runs what Dynamo traces, `aot_eager` that and what is made of it
@pytest.mark.parametrize(("mode", "backend"), [(MODES[0], "aot_eager"), (MODES[-1], "aot_eager"), (MODES[1], "eager")])
@torch.inference_mode()
def test_regions_sample_as_vllm_does(mode: str, backend: str) -> None:
    """Bit for bit from the same noise; once warm no mix of parameters, number of requests or length compiles."""
    compiler = StaticCompiler(backend)
    twins = Twins(engine_config(mode), region=compiler.step_region)
    for rows in BUCKETS:
        twins.static.warm(rows)
    warm = entries()
    # a new line of token counts is written alone, whatever the bucket
    assert warm == {name: len(BUCKETS) + (name == "write_lines") for name in warm}
    compiler.skip_guards()
    rng, weights = random.Random(5), torch.Generator().manual_seed(5)
    for _ in range(25):
        for name in twins.names:
            twins.remove(name)
        count = rng.choice(BUCKETS)
        names = [
            twins.add(any_params(rng), [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]) for _ in range(count)
        ]
        for _ in range(2):
            twins.sync(names)
            grammar = random_grammar(twins.batch.req_ids, rng) if rng.random() < 0.5 else None
            assert_same(*twins.sample(poisoned_logits(count, count, weights), grammar))
    assert not twins.bypasses
    assert entries() == warm


@torch.inference_mode()
def test_a_stage_is_one_graph_without_breaks() -> None:
    """What breaks a region in two would be more graphs, and Python between them in every step."""
    torch._dynamo.utils.counters.clear()
    compiler = StaticCompiler("aot_eager")
    Twins(engine_config(), region=compiler.step_region).static.warm(4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(REGIONS) + 1  # a single line of token counts
    assert not torch._dynamo.utils.counters["graph_break"]


@torch.inference_mode()
def test_divided_logits_are_put_in_place() -> None:
    compiler = StaticCompiler("aot_eager")
    put, take = compiler.step_region(put_rows), compiler.step_region(take_rows)
    whole, rows = torch.zeros(5, 3), torch.arange(6.0).reshape(2, 3)
    put(whole, torch.tensor([2, 0]), rows)
    assert torch.equal(whole[[2, 0]], rows)
    assert torch.equal(take(whole, torch.tensor([0, 4])), torch.stack([rows[1], torch.zeros(3)]))


@torch.inference_mode()
def test_noise_is_new_in_each_call() -> None:
    """At each position of a request, and for each request."""
    twins = Twins(engine_config(), region=StaticCompiler("aot_eager").step_region)
    twins.sync([twins.add(SamplingParams(temperature=1.0)) for _ in range(MAX_ROWS)])
    logits = torch.zeros(MAX_ROWS, VOCAB)
    drawn = []
    for _ in range(5):
        drawn.append(tuple(token for (token,) in twins.static.sample(logits, twins.batch, None).tokens))
        for request in twins.batch.slots:
            request.output_token_ids.append(3)
    assert len({*drawn}) == 5
    assert len({*drawn[0]}) > 1
