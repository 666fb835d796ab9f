"""Both rules of admission under memory pressure: preemptions, tokens computed again, memory, answers per second.

`python -m benchmarks.admission [--mix chat ...] [--steps N] [--json FILE] [--plot FILE]`. The requests and the clock of
`gaudi-ucm trace`, whose KV cache has a part of its blocks (`--blocks`); the rules are those that a server uses. Each
client asks for the longest answer of its mix (`max_tokens`) and gets one of the mix's lengths. A third row is greedy,
without computing preempted tokens again: the most that a rule can gain by avoiding preemptions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.positive import positive
from vllm_gaudi_ucm.block_policies.admission.future_blocks import Footprint, peak_blocks
from vllm_gaudi_ucm.graphs.cost.specs import LLAMA_8B, device_spec
from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm_tools.output import report_console
from vllm_gaudi_ucm_tools.traffic.simulation import MIXES, Prefix, Request, Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RULES = ("greedy", "exact")
BOUND = "greedy, kept"
"""The bound: greedy, but a preempted request keeps its results at no cost."""
PRESSURE = {"chat": 0.1, "batch": 0.1, "agentic": 0.2, "long-context": 0.3}
"""Share of a mix's KV cache with which requests wait most of the time."""
SEEDS = 3
COLOURS = {"greedy": "#D55E00", "exact": "#0072B2"}


@dataclass
class Result:
    """Totals of a run, or of several of other seeds. seconds: of the modelled clock.

    computed: tokens of all steps. waited, busy: steps in which others waited, and the sum of the shares of the cache in
    use then. used: share of the requests' blocks in use, step by step, of the first run.
    """

    mix: str
    rule: str
    preemptions: int = 0
    computed_again: int = 0
    computed: int = 0
    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    waited: int = 0
    busy: float = 0.0
    used: list[tuple[float, float]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def memory(self) -> float:
        """Share of the cache in use while others wait."""
        return self.busy / max(1, self.waited)

    def add(self, other: Result) -> None:
        """Another run's totals."""
        for each in fields(self):
            if each.name not in ("mix", "rule", "used"):
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass
class AdmittingSimulation(Simulation):
    """The server of `gaudi-ucm trace`, with a rule of admission. Its prefixes have blocks of their own."""

    rule: str = "greedy"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.result = Result("", self.rule)
        self._room = self._free
        self._output: dict[int, int] = {}
        # tokens that a preempted request had computed
        self._lost: dict[int, int] = {}

    def run(self, steps: int) -> Result:
        """The first `steps` steps."""
        for step in self.steps(steps):
            share = 1 - self._free / self._room
            self.result.used.append((self.clock, share))
            self.result.computed += step.tokens
            if self.waiting:
                self.result.waited += 1
                self.result.busy += share
        self.result.seconds = self.clock
        return self.result

    def _turn(self, client: int, prefix: Prefix | None, history: int, turns_left: int, cached: int) -> Request:
        request = super()._turn(client, prefix, history, turns_left, cached)
        self._output[id(request)] = request.remaining
        return request

    def _allocate(self, request: Request, new: int) -> bool:
        if request not in self.running:
            # as in vLLM 0.32, all of its prompt has to fit, whatever part comes first
            missing = -(-request.tokens // self.mix.limits.block_size) - request.depth - request.held
            if missing > self._free:
                return False
            if self.rule == "exact" and self.running and self._peak(request) > self._room:
                return False
        if not super()._allocate(request, new):
            return False
        if request not in self.running:
            self.result.computed_again += max(0, self._lost.pop(id(request), 0) - request.computed)
        return True

    def _hit(self, request: Request) -> None:
        super()._hit(request)
        if self.rule == BOUND:
            request.computed = max(request.computed, self._lost.get(id(request), 0))

    def _peak(self, request: Request) -> int:
        """Blocks that `request` and all that run will need at one time."""
        footprints = [self._footprint(one) for one in (*self.running, request)]
        return peak_blocks(footprints, self.mix.limits.block_size)

    def _footprint(self, request: Request) -> Footprint:
        generated = self._output[id(request)] - request.remaining
        size, rows = self.mix.limits.block_size, self.mix.limits.max_num_batched_tokens
        first = id(request) * self.mix.limits.num_blocks
        delay = -(-(request.tokens - request.computed) // rows)
        own = request.tokens - request.depth * size
        left = self.mix.output.high - generated
        return Footprint(range(first, first + request.held), own, left, delay)

    def _preempt(self, request: Request) -> None:
        self.result.preemptions += 1
        self._lost[id(request)] = request.computed
        super()._preempt(request)

    def _leave(self, request: Request) -> None:
        length = self._output.pop(id(request))
        self.result.answers += 1
        self.result.tokens += length
        super()._leave(request)


def measure(mix: str, rule: str, blocks: float, steps: int, seeds: int, device: str) -> Result:
    """blocks: share of the mix's own KV cache. seeds: runs of this many steps."""
    # all clients at any time: a server that waits for them tells nothing about its rule
    found, result = replace(MIXES[mix], quiet=1.0), Result(mix, rule)
    limits = replace(found.limits, num_blocks=int(found.limits.num_blocks * blocks))
    cost = CostModel(device_spec(device), LLAMA_8B, limits.block_size)
    for seed in range(seeds):
        run = AdmittingSimulation(replace(found, limits=limits), cost, seed, rule=rule).run(steps)
        result.used = result.used or run.used
        result.add(run)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mix", choices=sorted(MIXES), action="append", help="may be repeated (default: all)")
    parser.add_argument("--steps", type=positive, default=4000, help="steps of each run (default: %(default)s)")
    parser.add_argument("--seeds", type=positive, default=SEEDS, help="runs, summed up (default: %(default)s)")
    parser.add_argument("--blocks", type=float, help="share of the mix's KV cache (default: 0.1 to 0.3, by mix)")
    parser.add_argument("--device", default="gaudi3", help="whose modelled clock runs (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="writes the figures to this file")
    parser.add_argument("--plot", type=Path, help="draws memory over time to this file (PNG, SVG, PDF)")
    args = parser.parse_args(argv)
    mixes = args.mix or sorted(MIXES)
    runs = [(mix, rule) for mix in mixes for rule in (*RULES, BOUND)]
    console = report_console(least_width=110)
    results = [
        measure(mix, rule, args.blocks or PRESSURE[mix], args.steps, args.seeds, args.device)
        for mix, rule in track(runs, "simulating", console=Console(stderr=True), transient=True)
    ]
    console.print(_table(results))
    if args.json is not None:
        figures = [
            {key: value for key, value in asdict(one).items() if key != "used"} | {"memory": one.memory}
            for one in results
        ]
        args.json.write_text(json.dumps(figures, indent=1))
    if args.plot is not None:
        plot(results, args.plot)
    return 0


def _table(results: Sequence[Result]) -> Table:
    names = ("mix", "rule", "preempted per answer", "tokens again", "of those computed", "memory", "tokens/s", "")
    table = Table(*names)
    for one in results:
        (greedy,) = (other for other in results if other.mix == one.mix and other.rule == "greedy")
        table.add_row(
            one.mix,
            one.rule,
            f"{one.preemptions / one.answers:.3f}",
            f"{one.computed_again:,}",
            f"{one.computed_again / one.computed:.1%}",
            f"{one.memory:.1%}",
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
        _memory_over_time(axes, [one for one in results if one.mix == mix and one.rule != BOUND])
        axes.set_title(f"{mix}: blocks in use, preemptions of all runs in the legend", fontsize=9, loc="left")
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
