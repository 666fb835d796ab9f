"""The three rules of admission under memory pressure: preemptions, tokens computed again, memory, answers per second.

`python -m benchmarks.admission [--mix chat ...] [--steps N] [--json FILE] [--plot FILE]`. The requests and the clock of
`gaudi-ucm trace`, whose KV cache has a part of its blocks (`--blocks`); the rules are those that a server uses. Each
client asks for the longest answer of its mix (`max_tokens`) and gets one of the mix's lengths.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.positive import positive
from vllm_gaudi_ucm.cli.buckets.trace_simulation import MIXES, Prefix, Request, Simulation
from vllm_gaudi_ucm.config.scheduler_config import SchedulerConfig
from vllm_gaudi_ucm.graphs.cost.specs import LLAMA_8B, device_spec
from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm.scheduler.admission_rules import make_rule
from vllm_gaudi_ucm.scheduler.future_blocks import Footprint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RULES = ("greedy", "exact", "predicted")
DEFAULT_MIXES = ("chat", "batch")
COLOURS = {"greedy": "#D55E00", "exact": "#0072B2", "predicted": "#009E73"}


@dataclass
class Result:
    """Totals of a run. seconds: of the modelled clock. used: share of the requests' blocks in use, step by step."""

    mix: str
    rule: str
    preemptions: int = 0
    computed_again: int = 0
    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    busy: float = 0.0
    used: list[tuple[float, float]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass
class AdmittingSimulation(Simulation):
    """The server of `gaudi-ucm trace`, with a rule of admission. Its prefixes have blocks of their own."""

    rule: str = "greedy"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.result = Result("", self.rule)
        self._rule = make_rule(SchedulerConfig(admission=self.rule), self.mix.limits.block_size, in_step=True)
        self._room = self._free
        self._output: dict[int, int] = {}

    def run(self, steps: int) -> Result:
        """The first `steps` steps."""
        waited = []
        for _ in self.steps(steps):
            share = 1 - self._free / self._room
            self.result.used.append((self.clock, share))
            if self.waiting:
                waited.append(share)
        self.result.seconds = self.clock
        self.result.busy = sum(waited) / len(waited) if waited else 0.0
        return self.result

    def _turn(self, client: int, prefix: Prefix | None, history: int, turns_left: int, cached: int) -> Request:
        request = super()._turn(client, prefix, history, turns_left, cached)
        self._output[id(request)] = request.remaining
        return request

    def _allocate(self, request: Request, new: int) -> bool:
        if self._rule is not None and self.running and request not in self.running:
            footprints = [self._footprint(one) for one in (*self.running, request)]
            if self._rule.peak(footprints) > self._room:
                return False
        return super()._allocate(request, new)

    def _footprint(self, request: Request) -> Footprint:
        generated = self._output[id(request)] - request.remaining
        size, rows = self.mix.limits.block_size, self.mix.limits.max_num_batched_tokens
        first = id(request) * self.mix.limits.num_blocks
        delay = -(-(request.tokens - request.computed) // rows)
        own = request.tokens - request.depth * size
        left = self.mix.output.high - generated
        return Footprint(range(first, first + request.held), own, left, delay, generated)

    def _preempt(self, request: Request) -> None:
        self.result.preemptions += 1
        self.result.computed_again += request.computed
        super()._preempt(request)

    def _leave(self, request: Request) -> None:
        length = self._output.pop(id(request))
        if self._rule is not None:
            self._rule.ended(length)
        self.result.answers += 1
        self.result.tokens += length
        super()._leave(request)


def measure(mix: str, rule: str, blocks: float, steps: int, device: str) -> Result:
    """blocks: share of the mix's own KV cache."""
    found = MIXES[mix]
    limits = replace(found.limits, num_blocks=int(found.limits.num_blocks * blocks))
    cost = CostModel(device_spec(device), LLAMA_8B, limits.block_size)
    result = AdmittingSimulation(replace(found, limits=limits), cost, seed=0, rule=rule).run(steps)
    result.mix = mix
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mix", choices=sorted(MIXES), action="append", help="may be repeated (default: chat, batch)")
    parser.add_argument("--steps", type=positive, default=8000, help="steps of each run (default: %(default)s)")
    parser.add_argument("--blocks", type=float, default=0.1, help="share of the mix's KV cache (default: %(default)g)")
    parser.add_argument("--device", default="gaudi3", help="whose modelled clock runs (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="writes the figures to this file")
    parser.add_argument("--plot", type=Path, help="draws memory over time to this file (PNG, SVG, PDF)")
    args = parser.parse_args(argv)
    mixes = args.mix or DEFAULT_MIXES
    runs = [(mix, rule) for mix in mixes for rule in RULES]
    console = Console(width=110, highlight=False)
    results = [
        measure(mix, rule, args.blocks, args.steps, args.device)
        for mix, rule in track(runs, "simulating", console=Console(stderr=True), transient=True)
    ]
    console.print(_table(results))
    if args.json is not None:
        figures = [{key: value for key, value in asdict(one).items() if key != "used"} for one in results]
        args.json.write_text(json.dumps(figures, indent=1))
    if args.plot is not None:
        plot(results, args.plot)
    return 0


def _table(results: Sequence[Result]) -> Table:
    names = ("mix", "rule", "preemptions", "tokens again", "memory while others wait", "answers/s", "tokens/s", "")
    table = Table(*names)
    for one in results:
        (greedy,) = (other for other in results if other.mix == one.mix and other.rule == "greedy")
        table.add_row(
            one.mix,
            one.rule,
            f"{one.preemptions:,}",
            f"{one.computed_again:,}",
            f"{one.busy:.1%}",
            f"{one.answers / one.seconds:.2f}",
            f"{one.tokens_per_second:,.0f}",
            f"{one.tokens_per_second / greedy.tokens_per_second:.2f}x",
        )
    return table


def plot(results: Sequence[Result], path: Path) -> None:
    """Memory over time under the rules, a mix in each row."""
    from matplotlib.figure import Figure

    mixes = list(dict.fromkeys(one.mix for one in results))
    figure = Figure(figsize=(11, 2.6 * len(mixes) + 0.5), dpi=110, layout="constrained")
    for axes, mix in zip(figure.subplots(len(mixes), 1, squeeze=False)[:, 0], mixes, strict=True):
        _memory_over_time(axes, [one for one in results if one.mix == mix])
        axes.set_title(f"{mix}: blocks in use, preemptions in the legend", fontsize=9, loc="left")
    figure.savefig(path)


def _memory_over_time(axes: Axes, results: Sequence[Result]) -> None:
    end = min(one.seconds for one in results)
    for one in results:
        points = [(time, 100 * share) for time, share in one.used if time <= end]
        label = f"{one.rule} ({one.preemptions:,})"
        axes.plot(*zip(*points, strict=True), color=COLOURS[one.rule], linewidth=0.8, label=label)
    axes.set_xlabel("modelled seconds", fontsize=8)
    axes.set_ylabel("%", fontsize=8)
    axes.set_ylim(0, 102)
    axes.legend(fontsize=8, frameon=False, loc="lower center", ncols=3)


if __name__ == "__main__":
    raise SystemExit(main())
