"""What `gaudi-ucm sparse-report` puts around a method and a sampler: the recorder of recall, and forced tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from vllm_gaudi_ucm.sparse.base import UcmSparseBase, UcmSparseRole
from vllm_gaudi_ucm.sparse.selection.block_selector import SelectionLayer
from vllm_gaudi_ucm_tools.sparse_report.forced_tokens import FORCED, ForcedTokens
from vllm_gaudi_ucm_tools.sparse_report.recall import RecallRecorder, block_mass

BLOCK, HEADS, KV_HEADS, DIM, SCALE = 4, 6, 2, 8, 0.3
# candidates, and live blocks with the tokens that are seen of each
CANDIDATES, LIVE, SEEN = [7, 2, 5, 9], [1, 4, 8], [4, 4, 3]


def layer(seed: int) -> SelectionLayer:
    keys = torch.randn(11, BLOCK, KV_HEADS, DIM, generator=torch.Generator().manual_seed(seed))
    keys[8, 3:] = torch.nan  # the tail beyond the newest token
    return SelectionLayer(keys, SCALE)


def exact_mass(query: torch.Tensor, keys: torch.Tensor) -> dict[int, float]:
    """Head by head, in float64, over the tokens one after the other."""
    tokens = [(block, t) for block in CANDIDATES for t in range(BLOCK)]
    tokens += [(block, t) for block, seen in zip(LIVE, SEEN, strict=True) for t in range(seen)]
    mass = dict.fromkeys([*CANDIDATES, *LIVE], 0.0)
    for head in range(HEADS):
        row = torch.stack([keys[block, t, head // (HEADS // KV_HEADS)] for block, t in tokens]).double()
        weights = (SCALE * row @ query[head].double()).softmax(0)
        for (block, _), weight in zip(tokens, weights.tolist(), strict=True):
            mass[block] += weight / HEADS
    return mass


def plan() -> Any:
    unique = SimpleNamespace(blocks=np.array(LIVE), hi=np.array(SEEN, np.int32))
    selection = SimpleNamespace(candidate_blocks=np.array(CANDIDATES))
    return SimpleNamespace(unique=unique, shared=None, selection=selection)


def run_layer(method: UcmSparseBase, index: int, query: torch.Tensor, chosen: list[int] | None) -> None:
    blocks = None if chosen is None else torch.tensor(chosen)
    metadata = SimpleNamespace(selection=SimpleNamespace(chosen=blocks))
    assert method.attention_begin(index, query, query, query, metadata)[0] is query


def test_the_mass_of_blocks_is_that_of_their_tokens() -> None:
    query, (keys, scale) = torch.randn(HEADS, DIM), layer(0)
    blocks, seen = torch.tensor(CANDIDATES + LIVE), torch.tensor([BLOCK] * len(CANDIDATES) + SEEN)
    found = block_mass(query, keys, blocks, seen, scale)
    assert found.tolist() == pytest.approx(list(exact_mass(query, keys).values()), abs=1e-6)


def test_the_recorder_adds_up_what_each_layer_attends() -> None:
    layers, query = [layer(1), layer(2)], torch.randn(1, HEADS, DIM)
    recorder, method = RecallRecorder(layers), UcmSparseBase(UcmSparseRole.WORKER)
    with recorder.watching(method):
        for _ in range(2):
            method.execute_begin(plan())
            run_layer(method, 0, query, [5, 7])
            run_layer(method, 1, query, None)
        method.attention_begin(0, query, query, query, SimpleNamespace(selection=None))
    run_layer(method, 0, query, [5, 7])
    mass = exact_mass(query[0], layers[0].keys)
    live = sum(mass[block] for block in LIVE)
    first, second = recorder.layers
    assert (first.steps, second.steps) == (2, 2), "dense steps, and those after watching, do not count"
    assert first.attended == pytest.approx(2 * (live + mass[5] + mass[7]), abs=1e-5)
    best = sum(sorted((mass[block] for block in CANDIDATES), reverse=True)[:2])
    assert first.best == pytest.approx(2 * (live + best), abs=1e-5)
    assert (first.tokens, first.context) == (2 * (11 + 8), 2 * (11 + 16))
    assert second.attended == pytest.approx(2.0, abs=1e-5)


def test_a_step_of_several_rows_is_refused() -> None:
    recorder, method = RecallRecorder([layer(1)]), UcmSparseBase(UcmSparseRole.WORKER)
    with recorder.watching(method):
        method.execute_begin(plan())
        with pytest.raises(ValueError, match="found a step of 3 rows"):
            run_layer(method, 0, torch.randn(3, HEADS, DIM), [5])


def processor() -> ForcedTokens:
    return ForcedTokens(None, torch.device("cpu"), False)  # type: ignore[arg-type]  # not looked at


def forced(tokens: list[int]) -> SamplingParams:
    return SamplingParams(extra_args={FORCED: tokens})


def choices(forcing: ForcedTokens, slots: int) -> list[int]:
    logits = torch.zeros(slots, 10)
    logits[:, 9] = 1.0
    return forcing.apply(logits).argmax(1).tolist()


def test_tokens_are_forced_until_they_end() -> None:
    forcing, output = processor(), [0]
    forcing.update_state(BatchUpdate(1, [], [(0, forced([3, 4]), None, output)], []))
    assert choices(forcing, 1) == [4]
    output.append(4)
    forcing.update_state(None)
    assert choices(forcing, 1) == [9]


def test_tokens_follow_their_request_from_slot_to_slot() -> None:
    forcing = processor()
    added = [(0, forced([1]), None, []), (1, SamplingParams(), None, []), (2, forced([2]), None, [])]
    forcing.update_state(BatchUpdate(3, [], added, []))
    assert choices(forcing, 3) == [1, 9, 2]
    forcing.update_state(BatchUpdate(3, [], [], [(0, 1, MoveDirectionality.SWAP)]))
    assert choices(forcing, 3) == [9, 1, 2]
    forcing.update_state(BatchUpdate(2, [1], [], [(2, 1, MoveDirectionality.UNIDIRECTIONAL)]))
    assert choices(forcing, 2) == [9, 2]
    with pytest.raises(ValueError, match=f"{FORCED}.*expected a list"):
        ForcedTokens.validate_params(SamplingParams(extra_args={FORCED: "3"}))
