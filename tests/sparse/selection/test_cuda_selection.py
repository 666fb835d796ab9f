"""A layer that chooses by the CUDA kernels. Runs on a CPU in the process of tests/ops/test_interpreter.py alone."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from tests.ops.oracle import CUDA_RUNS
from tests.sparse.selection.one_layer import Member, OneLayer, select
from vllm_gaudi_ucm.ops.selected_list import SelectedList
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import joined as cuda_joined
from vllm_gaudi_ucm.protocol.sparse_meta import SelectionMode
from vllm_gaudi_ucm.sparse.options import BlockOptions

pytestmark = pytest.mark.skipif(
    not CUDA_RUNS or torch.cuda.is_available(), reason="runs on the CPU, under Triton's interpreter"
)
SELECT, REUSE, CHECK = SelectionMode
OPTIONS = BlockOptions(min_tokens=1, sparse_ratio=0.3, min_blocks=1)
NARROW = BlockOptions(min_tokens=1, sparse_ratio=0.3, min_blocks=1, summary_dtype="fp8")


def layer(attention: str, choice: str, *, static: bool, max_rows: int, options: BlockOptions = OPTIONS) -> OneLayer:
    return OneLayer(options, static=static, max_rows=max_rows, implementation=attention, choice=choice)


@pytest.mark.parametrize(
    ("choice", "options", "static", "drafts"),
    [
        ("cuda", OPTIONS, True, 0),
        ("cuda", OPTIONS, False, 2),
        ("cuda_fused", OPTIONS, True, 0),
        # what differs with 8-bit summaries is in the kernels of scores, which test_cuda_narrow_caches.py runs
        ("cuda_fused", NARROW, False, 2),
    ],
    ids=["cuda", "cuda, drafts", "cuda_fused", "cuda_fused, drafts, 8-bit summaries"],
)
def test_cuda_choices_and_attention_equal_the_references(
    choice: str, options: BlockOptions, static: bool, drafts: int
) -> None:
    """covers: C13, C17. Sparse, dense and prompt rows in a step; anew, again, and after checks of either outcome.

    The list that attention reads has what a layer of before left there, unless this one's choice is written to it.
    """
    kernels = layer("cuda", choice, static=static, max_rows=1 + drafts, options=options)
    reference = layer("reference", "reference", static=static, max_rows=1 + drafts, options=options)
    assert kernels.selector.layers[0].hands_over
    assert not reference.selector.layers[0].hands_over

    def compare(members: list[Member]) -> None:
        found, expected = (server.step(members) for server in (kernels, reference))
        for name, seen in expected.items():
            assert found[name].chosen == seen.chosen
            torch.testing.assert_close(found[name].output, seen.output, atol=2e-6, rtol=1e-4)

    compare([Member("a", 0, 41), Member("b", 0, 12)])
    compare([Member("b", 12, 25)])
    steps = [(SELECT, 0), (REUSE, 0), (CHECK, 9), (CHECK, 0), (SELECT, 0)]
    copied: list[bool] = []

    def blocks_with(self: cuda_joined.Joined, selected: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.chosen, SelectedList)
        copied.append(self.chosen.holds is not selected)
        return plain(self, selected)

    plain = cuda_joined.Joined.blocks_with
    with patch.object(cuda_joined.Joined, "blocks_with", blocks_with):
        for step, (mode, threshold) in enumerate(steps):
            sparse = select((1, 7, 3), mode, threshold)
            compare(
                [
                    Member("a", 41 + step, 1 + drafts, drafts, sparse),
                    Member("b", 37 + step, 1),
                    Member("c", 3 * (step - 2), 3),
                    Member("d", step - 3, 1),
                ][: 2 + (step > 1) + (step > 2)]
            )
    assert kernels.selector.counts()[:2] == reference.selector.counts()[:2] == (1, 1)
    assert torch.equal(kernels.selector.layers[0].stored[:-1], reference.selector.layers[0].stored[:-1])
    if not drafts:
        assert copied, "no step has joined the lists: the case tells nothing"
        # a step that only uses stored choices ranks nothing, so that attention copies them
        assert all(copied) if choice == "cuda" else not all(copied)
