"""Largest values by row, without a word to the user."""

from __future__ import annotations

import subprocess
import sys

import torch

from vllm_gaudi_ucm.ops.index_maximum import index_maximum_

CALL = """
import torch
from vllm_gaudi_ucm.ops.index_maximum import index_maximum_
index_maximum_(torch.zeros(2), torch.tensor([0, 1, 1]), torch.ones(3))
"""


def test_rows_keep_what_is_larger() -> None:
    into = torch.tensor([[1.0, -1.0], [0.0, 5.0], [float("-inf"), 0.0]])
    values = torch.tensor([[0.0, 2.0], [7.0, 4.0], [6.0, 6.0]])
    assert index_maximum_(into, torch.tensor([0, 1, 1]), values) is into
    assert into.tolist() == [[1.0, 2.0], [7.0, 6.0], [float("-inf"), 0.0]]


def test_torch_does_not_warn() -> None:
    """It does so once in a process, which is another one here."""
    ended = subprocess.run([sys.executable, "-W", "always", "-c", CALL], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
