"""One layer whose heads several ranks share out: each chooses by its own heads, or all by the scores of all heads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import Any

import pytest
import torch

from tests.sparse.selection.one_layer import HEADS, KV_HEADS, SCALE, Member, OneLayer, Seen, select
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
from vllm_gaudi_ucm.protocol.sparse_meta import SelectionMode
from vllm_gaudi_ucm.sparse.base import UcmSparseRole
from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.sparse.factory import UcmSparseFactory
from vllm_gaudi_ucm.sparse.options import BlockOptions
from vllm_gaudi_ucm.sparse.selection.block_scorer import OverRanks
from vllm_gaudi_ucm.sparse.selection.block_selector import BlockSelector, SelectionLayer
from vllm_gaudi_ucm.sparse.selection.layer_selector import ChoosingLayer, Scoring
from vllm_gaudi_ucm.sparse.selection.sparse_worker import BlockSelection

WAIT = 60  # seconds until a rank that is alone in a collective fails


class ThreadMean:
    """What the ranks' collective computes, among threads of this process."""

    def __init__(self, size: int) -> None:
        self._given: dict[int, torch.Tensor] = {}
        self._size = size
        self._barrier = Barrier(size)
        self.calls = 0

    def of_rank(self, rank: int) -> OverRanks:
        def mean(own: torch.Tensor) -> torch.Tensor:
            self._given[rank] = own.clone()
            self._barrier.wait(WAIT)
            found = torch.stack([self._given[one] for one in range(self._size)]).mean(0)
            # nobody gives new scores before all have read these
            self._barrier.wait(WAIT)
            self.calls += rank == 0
            return found

        return mean


@dataclass
class RankLayer(OneLayer):
    """The part of the layer that one of `size` ranks has. With more ranks than KV heads, several have the same one."""

    rank: int = 0
    size: int = 1
    over_ranks: OverRanks | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        group = HEADS // KV_HEADS
        self.heads = range(self.rank * HEADS // self.size, (self.rank + 1) * HEADS // self.size)
        self.kv_heads = range(self.heads[0] // group, self.heads[-1] // group + 1)
        part = slice(self.kv_heads.start, self.kv_heads.stop)
        self.keys, self.values = self.keys[:, :, part].contiguous(), self.values[:, :, part].contiguous()
        layer, kind = SelectionLayer(self.keys, SCALE), SummaryKind(self.options.summary)
        narrow = self.options.narrow_summaries
        self.selector = BlockSelector(
            [layer], kind, self.limits, scoring=Scoring(over_ranks=self.over_ranks), narrow=narrow
        )

    def tokens(self, request_id: str, positions: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super().tokens(request_id, positions)
        own = slice(self.kv_heads.start, self.kv_heads.stop)
        return q[:, self.heads.start : self.heads.stop], k[:, own], v[:, own]


class Ranks:
    """Ranks that run the same steps."""

    def __init__(self, size: int, options: BlockOptions, choose_alone: bool = False, **sizes: Any) -> None:
        self.mean = ThreadMean(size)
        self.layers = [
            RankLayer(
                options, rank=rank, size=size, over_ranks=None if choose_alone else self.mean.of_rank(rank), **sizes
            )
            for rank in range(size)
        ]

    def step(self, members: list[Member]) -> list[dict[str, Seen]]:
        """What each rank has seen."""
        with ThreadPoolExecutor(len(self.layers)) as pool:
            return list(pool.map(lambda layer: layer.step(members), self.layers))


def options(kind: str = "box_mean", ratio: float = 0.3) -> BlockOptions:
    """kind: a summary, and its dtype where it has a choice."""
    summary, _, dtype = kind.partition(" ")
    return BlockOptions(sparse_ratio=ratio, min_tokens=1, summary=summary, summary_dtype=dtype or "auto")  # type: ignore[arg-type]


def prompts(*lengths: int) -> list[Member]:
    return [Member(f"request {index}", 0, length) for index, length in enumerate(lengths)]


def decodes(*decisions: Any, lengths: tuple[int, ...], drafts: int = 0) -> list[Member]:
    pairs = enumerate(zip(lengths, decisions, strict=True))
    return [Member(f"request {index}", length, 1 + drafts, drafts, one) for index, (length, one) in pairs]


LENGTHS = (50, 81)


@pytest.mark.parametrize("static", [False, True], ids=["true shapes", "static"])
@pytest.mark.parametrize("kind", ["mean", "box_mean", "box_mean fp8", "hash", "codes"])
@pytest.mark.parametrize("size", [2, 4], ids=["a kv head each", "a kv head for two"])
def test_ranks_choose_what_one_rank_chooses(size: int, kind: str, static: bool) -> None:
    """Steps of every mode, one with drafts: the same blocks on all ranks, and together one rank's output."""
    one, ranks = OneLayer(options(kind), static=static), Ranks(size, options(kind), static=static)
    first, second = (1, 10, 3), (1, 18, 4)
    modes = SelectionMode.SELECT, SelectionMode.CHECK, SelectionMode.REUSE, SelectionMode.SELECT
    # no bucket holds both prompts
    chunks = [prompts(LENGTHS[0]), [Member("request 1", 0, 41)], [Member("request 1", 41, LENGTHS[1] - 41)]]
    steps = chunks if static else [prompts(*LENGTHS)]
    for number, mode in enumerate(modes):
        lengths = (LENGTHS[0] + number, LENGTHS[1] + number)
        decisions = select(first, mode, threshold=number), select(second, mode, threshold=4)
        steps.append(decodes(*decisions, lengths=lengths, drafts=2 * (number == 3)))
    for members in steps:
        expected, found = one.step(members), ranks.step(members)
        for name, seen in expected.items():
            assert all(rank[name].chosen == seen.chosen for rank in found), name
            assert found[0][name].output.isfinite().all()
            together = torch.cat([rank[name].output for rank in found], 1)
            torch.testing.assert_close(together, seen.output, rtol=1e-4, atol=1e-5)
    stored = [rank.selector.layers[0].stored for rank in ranks.layers]  # type: ignore[attr-defined]
    assert all(torch.equal(table, stored[0]) for table in stored)
    # at true shapes a step that uses stored choices scores nothing
    assert ranks.mean.calls == (4 if static else 3)


@pytest.mark.parametrize("size", [2, 4])
def test_with_all_blocks_the_output_is_dense(size: int) -> None:
    """The oracle in float64; no number that is not finite gets in from blocks that nobody wrote."""
    ranks = Ranks(size, options(ratio=1.0))
    ranks.step(prompts(*LENGTHS))
    members = decodes(select((1, 10, 9)), select((1, 18, 17)), lengths=LENGTHS)
    for layer, seen in zip(ranks.layers, ranks.step(members), strict=True):
        for member in members:
            assert seen[member.request_id].output.isfinite().all()
            torch.testing.assert_close(
                seen[member.request_id].output.double(), layer.dense(member), rtol=1e-4, atol=1e-5
            )


def test_ranks_that_choose_alone_choose_as_many_other_blocks() -> None:
    """`per_rank`: a choice of each rank's own heads, without a collective."""
    one, ranks = OneLayer(options()), Ranks(2, options(), choose_alone=True)
    for server in (one, ranks):
        server.step(prompts(*LENGTHS))  # type: ignore[attr-defined]
    members = decodes(select((1, 10, 3)), select((1, 18, 4)), lengths=LENGTHS)
    expected, found = one.step(members), ranks.step(members)
    for name, count in (("request 0", 3), ("request 1", 4)):
        chosen = [rank[name].chosen or [] for rank in found]
        assert [len(blocks) for blocks in chosen] == [count, count]
        for rank, layer in zip(found, ranks.layers, strict=True):
            member = next(member for member in members if member.request_id == name)
            live = {0, *range(member.decision.window_start, 32)} if member.decision else set()
            torch.testing.assert_close(
                rank[name].output.double(),
                layer.dense(member, live | set(rank[name].chosen or [])),
                rtol=1e-4,
                atol=1e-5,
            )
    assert any(rank[name].chosen != expected[name].chosen for rank in found for name in expected)
    assert ranks.mean.calls == 0


def test_a_broken_block_of_one_rank_is_chosen_by_all() -> None:
    """covers: D8. On one rank it would come first; here it is among as many blocks as there are ranks."""
    ranks = Ranks(2, options("mean"))
    ranks.step(prompts(*LENGTHS))
    broken = 7
    block = ranks.layers[0].tables["request 1"][broken]
    ranks.layers[1].selector.summaries[0][block] = torch.inf
    for rank in ranks.step(decodes(None, select((1, 18, 2)), lengths=LENGTHS)):
        assert broken in (rank["request 1"].chosen or [])


@pytest.mark.parametrize(
    ("method", "given", "asks"),
    [
        ("GSA", {}, True),
        ("ESA", {"scores_over_ranks": "per_rank"}, False),
        ("KVStar", {"base_method": "ESA", "scores_over_ranks": "per_rank"}, False),
    ],
)
def test_the_option_decides(method: str, given: dict[str, Any], asks: bool) -> None:
    """Scores that go over the ranks leave no choice to one native call."""
    made = UcmSparseFactory.create_sparse_method(method, UcmSparseRole.WORKER, given).selecting_method
    assert isinstance(made, BlockSparse)
    layer, sizes = SelectionLayer(torch.zeros(16, 4, 1, 8), 1.0), OneLayer(options()).sizes
    same: Callable[[torch.Tensor], torch.Tensor] = torch.clone
    for over_ranks, expected in ((same, not asks), (None, True)):
        (chooses,) = BlockSelection.from_layers(made, [layer], sizes, over_ranks=over_ranks).selector.layers
        assert isinstance(chooses, ChoosingLayer)
        assert chooses.chooses_at_once is expected
