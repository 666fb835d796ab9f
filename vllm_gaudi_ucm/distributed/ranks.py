"""The workers of one engine, which run the same steps. They agree on values that depend on a single worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from vllm_gaudi_ucm.vllm_api.distributed import GroupCoordinator, get_dp_group, get_tp_group, get_world_group


class RanksDisagreeError(RuntimeError):
    """Workers of one engine were about to do different things."""


@dataclass(frozen=True)
class Ranks:
    """All workers of an engine, of which this process is one.

    Agreements are collectives on the host: every rank makes the same ones in the same order, outside graphs. With one
    rank they cost nothing.

    Args:
        rank: number of this worker, from 0.
        output_rank: the one whose output the engine reads, which also keeps the log and the metrics.
        group: gloo; None with one rank.
    """

    rank: int = 0
    size: int = 1
    output_rank: int = 0
    group: dist.ProcessGroup | None = field(default=None, compare=False)

    @classmethod
    def of_engine(cls, output_rank: int) -> Ranks:
        """The ranks of vLLM's world group. To be called once that is there.

        Of engines that share out experts that group has all workers; such an engine has no pipeline.
        """
        return cls._of(get_world_group() if get_dp_group().world_size == 1 else get_tp_group(), output_rank)

    @classmethod
    def of_world(cls) -> Ranks:
        """The ranks including workers of other engines, if they share out experts."""
        return cls._of(get_world_group(), 0)

    @classmethod
    def of_layer(cls) -> Ranks:
        """The ranks that share out a layer: all of one pipeline stage, which compute the same logits."""
        return cls._of(get_tp_group(), 0)

    @classmethod
    def _of(cls, found: GroupCoordinator, output_rank: int) -> Ranks:
        group = found.cpu_group if found.world_size > 1 else None
        return cls(found.rank_in_group, found.world_size, output_rank, group)

    @property
    def reports(self) -> bool:
        """True if this worker keeps the phase log and the metrics: one of all does."""
        return self.rank == self.output_rank

    def least(self, value: int) -> int:
        """The smallest value of all ranks."""
        return self.least_of([value])[0]

    def least_of(self, values: Sequence[int]) -> list[int]:
        """Returns the smallest value of all ranks at each place; all ranks pass the same number of values."""
        if self.group is None:
            return list(values)
        agreed = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self.group)
        found: list[int] = agreed.tolist()
        return found

    def most(self, value: int) -> int:
        """The largest value of all ranks."""
        return self.most_of([value])[0]

    def most_of(self, values: Sequence[int]) -> list[int]:
        """Returns the largest value of all ranks at each place; all ranks pass the same number of values."""
        return [-value for value in self.least_of([-value for value in values])]

    def all_of(self, is_true: bool) -> bool:
        """True if it is true on every rank."""
        return bool(self.least(int(is_true)))

    def texts(self, own: str) -> list[str]:
        """The texts of all ranks, in their order."""
        if self.group is None:
            return [own]
        text = own.encode()
        longest = self.most(len(text))
        padded = torch.frombuffer(bytearray(text.ljust(longest + 1, b"\0")), dtype=torch.uint8)
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(gathered, padded, group=self.group)
        return [bytes(text.tolist()).rstrip(b"\0").decode() for text in gathered]

    def check_same(self, what: str, found: str) -> None:
        """Raises RanksDisagreeError on every rank unless all have found the same text.

        what: its name in the error.
        """
        if self.group is None:
            return
        texts = self.texts(found)
        different = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
        if different is not None:
            raise RanksDisagreeError(f"{what}: rank 0 has {texts[0]}, rank {different} has {texts[different]}")


ALONE = Ranks()
"""An engine with one worker."""
