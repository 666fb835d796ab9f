"""Steps that do not fit the memory of the device are divided: by shared blocks first, then by tokens."""

from __future__ import annotations

import pytest

from vllm_gaudi_ucm.decisions.step_memory import GIB, StepMemory, step_bytes
from vllm_gaudi_ucm.graphs.cost.specs import LLAMA_8B
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import Limits, default_shared_blocks

BLOCK = 128


def limits(rows: int, length: int, shared: int | None = None) -> Limits:
    return Limits(rows, 64, length, BLOCK, 4096, contiguous=False, max_shared_blocks=shared)


def largest(found: Limits) -> int:
    """Bytes of prompts beside the most shared blocks."""
    shape = ForwardShape.from_sizes(True, found.max_num_batched_tokens, found.most_shared_blocks, 0)
    return step_bytes(shape, LLAMA_8B, BLOCK)


def test_what_fits_stays() -> None:
    given = limits(2048, 8192, default_shared_blocks(8192, BLOCK))
    memory = StepMemory(LLAMA_8B, 8.0)
    assert memory.bound(given) == given
    assert memory.rows(2048, 64, 8192) == 2048


def test_fewer_shared_blocks_but_those_of_a_request() -> None:
    given = limits(2048, 32768, default_shared_blocks(32768, BLOCK))
    memory = StepMemory(LLAMA_8B, 8.0)
    found = memory.bound(given)
    assert 32768 // BLOCK <= found.most_shared_blocks < given.most_shared_blocks
    assert largest(found) <= 8 * GIB < largest(given)
    assert StepMemory(LLAMA_8B, 0.1).bound(given).most_shared_blocks == 32768 // BLOCK


@pytest.mark.parametrize(("length", "most"), [(131072, 2048), (131072, 8192), (8192, 8192)])
def test_fewer_tokens_where_one_request_does_not_fit(length: int, most: int) -> None:
    memory = StepMemory(LLAMA_8B, 8.0)
    rows = memory.rows(most, 64, length)
    shape = ForwardShape.from_sizes(True, rows, -(-length // BLOCK), 0)
    assert 64 <= rows < most
    assert step_bytes(shape, LLAMA_8B, BLOCK) <= 8 * GIB


def test_where_nothing_fits_steps_are_as_small_as_may_be() -> None:
    memory = StepMemory(LLAMA_8B, 8.0)
    assert memory.rows(2048, 256, 1 << 20) == 256
    assert memory.rows(200, 256, 1 << 20) == 200
    assert memory.gib_of(256, 1 << 20) > 8


@pytest.mark.parametrize("rows", [1, 2, 127, 128, 129, 300, 2048])
def test_rows_are_never_more_than_asked(rows: int) -> None:
    assert StepMemory(LLAMA_8B, 8.0).rows(rows, 1, 4096) == rows
