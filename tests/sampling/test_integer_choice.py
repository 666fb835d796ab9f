"""No `where` of integers in what runs on Gaudi, whose compiler is known to get it wrong; and the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_gaudi_ucm.ops.block_selection.impl import reference
from vllm_gaudi_ucm.ops.block_selection.impl.reference import CHECK, REUSE
from vllm_gaudi_ucm.ops.row_noise.api import token_mixes
from vllm_gaudi_ucm.sampling.stages.penalties import CountedRows, count_tokens, read_lines, write_lines
from vllm_gaudi_ucm.sampling.stages.token_choice import RandomRows, draw, draw_from_top


class IntegerWheres(TorchDispatchMode):
    """Notes each result of `where` that is no float."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.where and not result.is_floating_point():
            self.found.append(result.dtype)
        return result


def penalties() -> list[Any]:
    """Two lines of three tokens and one of pads; a token is counted in one of them."""
    table = torch.tensor([[1, 4, 0], [0, 3, 0], [0, 0, 0]], dtype=torch.int32)
    rows = CountedRows(torch.tensor([1, 2, 0]), torch.tensor([2, 2, 0]), torch.tensor([1, 0, 0], dtype=torch.int32))
    lines = count_tokens(table, rows)
    write_lines(table, rows.lines, lines)
    assert table.tolist() == [[1, 4, 0], [0, 3, 2], [0, 0, 0]]
    return [found.tolist() for found in read_lines(lines)]


def choice() -> list[Any]:
    scores, places = torch.tensor([0.5, 0.9, 0.1]), torch.tensor([0, 2, 4])
    return reference.choose(scores, places, 2, 3, 2).tolist()


def kept() -> list[Any]:
    stored, fresh = torch.tensor([[1, 2], [0, 1], [2, -1]]), torch.tensor([[2, 1], [2, 3], [0, 1]])
    modes = torch.tensor([CHECK, CHECK, REUSE])
    zero = torch.zeros(3, dtype=torch.int64)
    return [found.tolist() for found in reference.keep_or_replace(stored, fresh, zero + 2, modes, zero, 4)]


def tokens() -> list[Any]:
    """Greedy rows and random ones, all of whose mass is on one token."""
    logits = torch.tensor([[0.0, 1.0, 0.5], [0.0, -1e9, -1e9]])
    rows = RandomRows(
        torch.tensor([0.0, 1.0]), torch.tensor([3, 3]), torch.tensor([2.0, 2.0]), torch.tensor([0.0, 0.1])
    )
    keys, mixes = torch.tensor([5, 7], dtype=torch.int32), torch.from_numpy(token_mixes(3))
    found = [run(logits, rows, keys, mixes, False)[0].tolist() for run in (draw, draw_from_top)]
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (penalties, [[[0, 1, 1], [0, 0, 0], [0, 2, 0]], [[False, True, False], [False] * 3, [True, False, False]]]),
        (choice, [[2, 0], [1, -1]]),
        (kept, [[[1, 2], [2, 3], [2, -1]], [True, False, False], [False, True, False]]),
        (tokens, [1, 0]),
    ],
)
def test_integers_are_chosen_by_arithmetic(compute: Callable[[], list[Any]], expected: list[Any]) -> None:
    with IntegerWheres() as wheres:
        assert compute() == expected
    assert wheres.found == []
