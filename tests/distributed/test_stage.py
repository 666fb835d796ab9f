"""What stages of a pipeline hand on, in real processes over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.processes import on_ranks
from vllm_gaudi_ucm.device import get_device
from vllm_gaudi_ucm.distributed.stage import Stage, StageError, StageTensors

STAGES, ROWS, STEPS = 3, 5, 4


def _between(rows: int) -> StageTensors:
    return {"hidden_states": torch.zeros(rows, 8), "residual": torch.zeros(rows, 8, dtype=torch.bfloat16)}


def _pipeline(rank: int, size: int, group: dist.ProcessGroup) -> tuple[list[str], list[float]]:
    """Errors of the connection, and what steps have at their end: every stage adds one, and doubles the residual."""
    stage = Stage(rank, size, rank - 1, (rank + 1) % size, group, get_device("cpu"))
    errors, sums = [], []
    other = {name: tensor for name, tensor in _between(1).items() if name != "residual"}
    if not stage.is_last:  # it would wait for the others
        try:
            stage.connect(other, _between(1))
        except StageError as error:
            errors.append(str(error))
    stage.connect(_between(1), _between(1))
    for step in range(STEPS):
        tensors = _between(ROWS + step)
        if stage.is_first:
            tensors["residual"] += 1 + step
        else:
            stage.receive(tensors)
        tensors = {"residual": 2 * tensors["residual"], "hidden_states": tensors["hidden_states"].T.contiguous().T + 1}
        if stage.is_last:
            sums.append(float(tensors["hidden_states"].sum() + tensors["residual"].sum()))
        else:
            stage.send(tensors)
    stage.finish_sends()
    return errors, sums


@pytest.mark.slow  # starts processes
def test_stages_hand_on_tensors_of_any_number_of_rows(tmp_path: Path) -> None:
    found = on_ranks(_pipeline, STAGES, tmp_path)
    expected = [8.0 * (ROWS + step) * (STAGES + (1 + step) * 2**STAGES) for step in range(STEPS)]
    assert [sums for _, sums in found] == [[], [], expected]
    for errors, _ in found[:-1]:
        (error,) = errors
        assert "the stage hands on {'hidden_states': (1, 8, torch.float32)}, expected" in error
        assert "'residual': (1, 8, torch.bfloat16)}" in error


def test_ends_of_a_pipeline() -> None:
    stages = [Stage(number, 3, 0, 0, dist.group.WORLD, get_device("cpu")) for number in range(3)]  # type: ignore[arg-type]  # unused
    assert [stage.is_first for stage in stages] == [True, False, False]
    assert [stage.is_last for stage in stages] == [False, False, True]
