"""Rejection sampling: its tokens have the model's distribution, whatever the drafts' is."""

from __future__ import annotations

import math

import pytest
import torch

from tests.chi_square import assert_distributed
from tests.ops.oracle import CUDA_RUNS
from vllm_gaudi_ucm.ops.rejection_sampling.api import accept_or_draw
from vllm_gaudi_ucm.ops.rejection_sampling.impl import reference
from vllm_gaudi_ucm.ops.rejection_sampling.impl.cuda.rejection import can_accept_or_draw, cuda_accept_or_draw

GPU = torch.cuda.is_available()
ROWS = 60_000
P = {
    "spread": [0.4, 0.3, 0.15, 0.1, 0.05],
    "few tokens are left": [0.7, 0.0, 0.3, 0.0, 0.0],
    "one token is left": [0.0, 0.0, 0.0, 1.0, 0.0],
}
Q = {
    "the same": [0.4, 0.3, 0.15, 0.1, 0.05],
    "reversed": [0.05, 0.1, 0.15, 0.3, 0.4],
    "flat": [0.2] * 5,
    "of one token": [0.0, 1.0, 0.0, 0.0, 0.0],
    "apart": [0.0, 0.5, 0.0, 0.0, 0.5],
}


def drawn(probabilities: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.empty(ROWS, len(probabilities), dtype=probabilities.dtype).exponential_(generator=generator)
    return (probabilities / noise).argmax(-1)


@pytest.mark.parametrize("q", Q)
@pytest.mark.parametrize("p", P)
def test_tokens_have_the_distribution_of_the_model(p: str, q: str) -> None:
    """And as many drafts are accepted as the two distributions have in common, the most that is possible."""
    generator = torch.Generator().manual_seed(5)
    wanted, proposed = torch.tensor(P[p]).double(), torch.tensor(Q[q]).double()
    drafts = drawn(proposed, generator)
    uniform = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    noise = torch.empty(ROWS, 5, dtype=torch.float64).exponential_(generator=generator)
    both = wanted.expand(ROWS, -1), proposed.expand(ROWS, -1)
    tokens = accept_or_draw(both[0], drafts, both[1], uniform, noise)
    assert_distributed(tokens.bincount(minlength=5), wanted)
    common = float(torch.minimum(wanted, proposed).sum())
    accepted = float((tokens == drafts).double().mean())
    assert abs(accepted - common) <= 5 * math.sqrt(max(0.0, common * (1 - common)) / ROWS) + 1e-6


def test_rows_without_a_draft_draw_as_without_drafts() -> None:
    """Whatever their places hold, also of a draft model that computed NaN."""
    generator = torch.Generator().manual_seed(6)
    probabilities = torch.randn(6, 9, generator=generator).softmax(-1)
    noise = torch.empty(6, 9).exponential_(generator=generator)
    drafts = torch.tensor([-1, -1, -1, 3, 4, 5])
    garbage = torch.full((6, 9), math.nan)
    garbage[1], garbage[4] = 1.0, 0.0
    garbage[5] = -1.0
    tokens = accept_or_draw(probabilities, drafts, garbage, torch.full((6,), 0.5), noise)
    assert tokens.tolist() == (probabilities / noise).argmax(-1).tolist()


def test_a_forbidden_draft_is_never_accepted() -> None:
    """Also if rounding leaves nothing of the difference."""
    probabilities = torch.tensor([[0.5, 0.5, 0.0]]).expand(1000, -1)
    proposed = torch.tensor([[0.5, 0.5, 1e-8]]).expand(1000, -1)
    noise = torch.empty(1000, 3).exponential_(generator=torch.Generator().manual_seed(7))
    uniform = torch.linspace(1e-7, 1 - 1e-7, 1000)
    tokens = accept_or_draw(probabilities, torch.full((1000,), 2), proposed, uniform, noise)
    assert_distributed(tokens.bincount(minlength=3), torch.tensor([0.5, 0.5, 0.0]))


@pytest.mark.skipif(not CUDA_RUNS, reason="no GPU, and not under Triton's interpreter")
@pytest.mark.parametrize(("rows", "vocab_size"), [(24, 5), (12, 4097)] + ([(512, 151936)] if GPU else []))
def test_the_cuda_kernel_gives_the_tokens_of_the_reference(rows: int, vocab_size: int) -> None:
    """Rows that accept, draw from the rest or have no draft, equal distributions, ties, NaN and forbidden tokens."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(2, rows, vocab_size, generator=generator) * 3
    logits[0, :, 1::3] = -math.inf
    probabilities, proposed = logits.softmax(-1)
    drafts = proposed.multinomial(1, generator=generator).squeeze(1)
    uniform = torch.rand(rows, generator=generator)
    noise = torch.empty(rows, vocab_size).exponential_(generator=generator).clamp_(min=1e-7)
    proposed[0] = probabilities[0]
    drafts[0], uniform[0] = 0, 1.0  # nothing is left
    drafts[1:3], proposed[1] = -1, math.nan
    proposed[3] = math.nan
    proposed[4, vocab_size - 1], drafts[4], uniform[4] = math.nan, 1, 1.0
    probabilities[5, 3:] = math.nan
    probabilities[6], proposed[6], noise[6], uniform[6] = 0.25, 0.125, 1.0, 1.0
    probabilities[7] = 0.0
    arguments = [x.to("cuda" if GPU else "cpu") for x in (probabilities, drafts, proposed, uniform, noise)]
    expected = reference.accept_or_draw(*arguments)
    assert can_accept_or_draw(*arguments)
    assert cuda_accept_or_draw(*arguments).tolist() == expected.tolist()
    assert accept_or_draw(*arguments).tolist() == expected.tolist()
    accepted = (expected == arguments[1]).sum()
    assert 2 <= accepted <= rows - 4


def test_what_the_cuda_kernel_leaves_to_the_reference() -> None:
    """Distributions in float64, and rows that share their memory."""
    p, drafts, uniform = torch.full((2, 4), 0.25), torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    assert can_accept_or_draw(p, drafts, p, uniform, p)
    assert not can_accept_or_draw(p.double(), drafts, p, uniform, p)
    assert not can_accept_or_draw(p, drafts, p[:1].expand(2, -1), uniform, p)
    assert not can_accept_or_draw(p[:, :0], drafts, p[:, :0], uniform, p[:, :0])
