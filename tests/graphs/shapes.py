"""Limits, costs and steps for the tests of buckets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from vllm_gaudi_ucm.graphs.cost.specs import DEVICES, LLAMA_8B
from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import ALL_TILES
from vllm_gaudi_ucm.graphs.shapes.steps import Steps

COST = CostModel(DEVICES["gaudi2"], LLAMA_8B, 128)
LIMITS = Limits(256, 16, 2048, 128, 120)
ODD_LIMITS = {
    "one request": Limits(512, 1, 4096, 128, 100),
    "one token": Limits(1, 1, 1, 1, 2),
    "one row per step": Limits(1, 8, 1024, 128, 50),
    "tiny cache": Limits(2048, 64, 8192, 128, 2),
    "tiny cache, gathered": Limits(2048, 64, 8192, 128, 3, contiguous=False),
    "huge cache": Limits(8192, 1024, 131072, 128, 2_000_000),
    "huge cache, gathered": Limits(8192, 256, 131072, 16, 2_000_000, contiguous=False),
    "fewer tokens than requests": Limits(16, 64, 512, 128, 300),
}


# The same servers with a sparse method, which selects few blocks or many.
SPARSE_LIMITS = {
    name: replace(within, max_selected_blocks=most)
    for (name, within), most in zip(ODD_LIMITS.items(), [25, 1, 60, 1, 2, 30_000, 300, 4], strict=True)
}


# made once: hypothesis looks through each new strategy
ROWS = st.one_of(st.integers(1, 300), st.integers(1, 2000))
PROMPT_TILES = st.one_of(st.integers(1, 5), st.just(ALL_TILES))


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    return Limits(
        draw(ROWS),
        draw(st.integers(1, 40)),
        draw(st.integers(1, 3000)),
        draw(st.sampled_from([1, 16, 128])),
        draw(st.integers(2, 200)),
        draw(st.booleans()),
        max_selected_blocks=draw(st.sampled_from([0, 0, 1, 50, 400])),
        bounds_prompt_tiles=draw(st.booleans()),
    )


@st.composite
def steps(draw: st.DrawFn, within: Limits) -> Bucket:
    """A shape no larger than the maximum, whether or not such a step could occur."""
    most = within.maximum
    shared, unique = (draw(st.sampled_from([0, 1])) * draw(st.integers(0, most[axis])) for axis in (2, 3))
    selected = draw(st.integers(0, most.selected_blocks))
    max_tiles = draw(PROMPT_TILES)
    shape = ForwardShape.from_sizes(
        draw(st.booleans()), draw(st.integers(1, most.query_len)), shared, unique, selected, max_tiles
    )
    return shape.step(draw(st.integers(0, most.logits)))


@st.composite
def forward_shapes(draw: st.DrawFn, within: Limits, largest: int = 12) -> list[ForwardShape]:
    return [step.forward for step in draw(st.lists(steps(within), max_size=largest))]


def random_log(seed: int) -> tuple[Steps, Limits, CostModel]:
    """Two to six shapes, each seen once to a thousand times, of some model on some device within some limits.

    The steps reach from a thousandth of the limits to all of them; logits cost from next to nothing to nearly all.
    """
    rng = np.random.default_rng(seed)
    known, model = DEVICES["gaudi2"], LLAMA_8B
    device = replace(
        known,
        flops=known.flops * 10 ** rng.uniform(-2, 1),
        bandwidth=known.bandwidth * 10 ** rng.uniform(-2, 1),
        launch_seconds=known.launch_seconds * 10 ** rng.uniform(-1, 1.5),
    )
    vocab, layers = int(model.vocab * 10 ** rng.uniform(-2.5, 0.7)), int(rng.integers(1, 80))
    model = replace(model, vocab=vocab, layers=layers, hidden=int(rng.choice([512, 2048, 8192])))
    requests, rows = int(2 ** rng.uniform(1, 8)), int(2 ** rng.uniform(6, 14))
    length, blocks = int(2 ** rng.uniform(9, 16)), int(2 ** rng.uniform(5, 13))
    within = Limits(max(rows, requests), requests, length, 128, blocks, contiguous=bool(rng.random() < 0.5))
    size, seen = 10 ** rng.uniform(-3, 0), []
    for _ in range(rng.integers(2, 7)):
        seen += [_random_step(rng, within.maximum, size)] * int(10 ** rng.uniform(0, 3))
    return Steps.from_buckets(seen), within, CostModel(device, model, 128)


def _random_step(rng: np.random.Generator, most: Bucket, size: float) -> Bucket:
    causal = bool(rng.random() < 0.5)
    query = 1 + causal + int(rng.integers(max(1, int(most.query_len * size) - causal)))
    shared = int(rng.random() < 0.5) * int(rng.integers(int(most.shared_blocks * size) + 1))
    unique = int(rng.random() < 0.7) * int(rng.integers(int(most.unique_blocks * size) + 1))
    shape = ForwardShape.from_sizes(causal, min(query, most.query_len), shared, unique)
    return shape.step(1 + int(rng.integers(max(1, int(most.logits * rng.random() ** 0.5)))))
