"""`gaudi-ucm tune --for vllm-gaudi` and `gaudi-ucm plan --for vllm-gaudi`."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable
from dataclasses import replace

from vllm_gaudi_ucm.options.errors import counted
from vllm_gaudi_ucm_tools.buckets.cost_options import cost_model, read_model
from vllm_gaudi_ucm_tools.op_cost.work import CHIPS
from vllm_gaudi_ucm_tools.output import check_output, report_console, task_progress, written_whole
from vllm_gaudi_ucm_tools.vllm_gaudi.bucket_file import parse_bucket_file, write_bucket_file
from vllm_gaudi_ucm_tools.vllm_gaudi.choice import Choice, choose
from vllm_gaudi_ucm_tools.vllm_gaudi.demand import check_traffic
from vllm_gaudi_ucm_tools.vllm_gaudi.options import LIMITS, drop_longer, settings_of
from vllm_gaudi_ucm_tools.vllm_gaudi.picture import PICTURES, draw
from vllm_gaudi_ucm_tools.vllm_gaudi.readers import phase_steps, profiler
from vllm_gaudi_ucm_tools.vllm_gaudi.readers.log import Log, open_log
from vllm_gaudi_ucm_tools.vllm_gaudi.replay import replay
from vllm_gaudi_ucm_tools.vllm_gaudi.report import GRAPH_MEMORY, Comparison, SetReport, show
from vllm_gaudi_ucm_tools.vllm_gaudi.settings import STRATEGIES, Settings, SettingsError
from vllm_gaudi_ucm_tools.vllm_gaudi.shape_cost import ShapeCost
from vllm_gaudi_ucm_tools.vllm_gaudi.simulation import check_requests, simulate
from vllm_gaudi_ucm_tools.vllm_gaudi.strategies import Prepared, prepare, prepare_from_file
from vllm_gaudi_ucm_tools.vllm_gaudi.traffic import Traffic

MOST_GRAPHS = 4096


def tune(args: argparse.Namespace) -> int:
    """Chooses buckets for a log, writes them, and compares them with the server's strategies.

    Raises:
        ValueError: an option or the log cannot be used; the message names it.
    """
    for option in ("margin", "holdout"):
        if not 0.0 <= getattr(args, option) <= 0.9:
            raise ValueError(f"--{option} is {getattr(args, option)}, expected a share from 0 to 0.9")
    check_output("--output", args.output)
    check_output("--picture", args.picture, PICTURES)
    most = _most_graphs(args)
    log = _one_log(args)
    settings = settings_of(args, log.known or {})
    cost = _cost(args, settings)
    traffic = _traffic(args, log, settings, cost)
    end = len(traffic.steps) - int(len(traffic.steps) * args.holdout)
    tuned, judged = traffic.part(0, end), traffic.part(end) if end < len(traffic.steps) else traffic
    with task_progress("choosing buckets") as progress:
        choice = choose(tuned, settings, cost, most, progress, margin=args.margin)
    outcome = choice.outcome if judged is traffic else replay(judged.steps, choice.prepared, settings)
    own = SetReport("tuned", "tuned to this traffic", choice.prepared, outcome, cost)
    sets, refused = _own_sets(settings, judged, cost)
    notes = [*log.notes, *traffic.assumptions]
    if settings.ranks > 1 and settings.prefill_batch > 1:
        notes.append(
            "prompts merge alike on all ranks; where they do not, vllm-gaudi runs shapes that no file can list"
        )
    if judged is not traffic:
        notes.append(f"buckets were chosen for the first {end:,} steps; the figures are of those after them")
    comparison = Comparison(settings, [*sets, own], refused, traffic.source, len(judged.steps), notes, "tuned")
    if args.output is not None:
        with written_whole(args.output) as path:
            write_bucket_file(path, choice.entries, settings, _head(args, traffic, choice))
    if args.picture is not None:
        with written_whole(args.picture) as path:
            draw(comparison, path)
    _report(args, comparison, {"output": args.output and str(args.output), "command": _command(args, settings)})
    if args.picture is not None and not args.json:
        print(f"picture written to {args.picture}")
    return 0


def plan(args: argparse.Namespace) -> int:
    """Compares the buckets of the server's strategies, and of a file, with or without a log.

    Raises:
        ValueError: an option, the file or the log cannot be used; the message names it.
    """
    log = None if args.log is None else _one_log(args)
    settings = settings_of(args, {} if log is None or log.known is None else log.known)
    cost = _cost(args, settings)
    traffic = None if log is None else _traffic(args, log, settings, cost)
    sets, refused = _own_sets(settings, traffic, cost)
    if args.buckets is not None:
        prepared = prepare_from_file(parse_bucket_file(args.buckets), settings)
        sets.append(_set_report(args.buckets.name, args.buckets.name, prepared, settings, traffic, cost))
    notes = [] if log is None or traffic is None else [*log.notes, *traffic.assumptions]
    source, count = (None, 0) if traffic is None else (traffic.source, len(traffic.steps))
    _report(args, Comparison(settings, sets, refused, source, count, notes), {})
    for found in sets:
        if found.prepared.omitted and not args.json:
            left = ", ".join(map(str, found.prepared.omitted[:5]))
            report_console().print(f"{found.label}: the server leaves out {left}", markup=False)
    return 0


def _most_graphs(args: argparse.Namespace) -> int:
    """Returns the limit of graphs that both options give."""
    if not 1 <= args.max_graphs <= MOST_GRAPHS:
        raise ValueError(f"--max-graphs is {args.max_graphs}, expected 1 to {MOST_GRAPHS}")
    if args.graph_memory is None:
        return int(args.max_graphs)
    if not args.graph_memory > 0:
        raise ValueError(f"--graph-memory is {args.graph_memory:g}, expected more than 0 GiB")
    return min(int(args.max_graphs), int(min(args.graph_memory, 1e6) * 2**30 / GRAPH_MEMORY))


def _one_log(args: argparse.Namespace) -> Log:
    if len(args.log) > 1:
        raise ValueError(f"{args.log[1]}: --for vllm-gaudi takes one log; join logs of requests into one file")
    return open_log(args.log[0], args.time_unit)


def _cost(args: argparse.Namespace, settings: Settings) -> ShapeCost:
    if args.device not in CHIPS:
        raise ValueError(f"--device is {args.device!r}, expected one of {', '.join(CHIPS)} with --for vllm-gaudi")
    return ShapeCost(cost_model(args, settings.block_size))


def _traffic(args: argparse.Namespace, log: Log, settings: Settings, cost: ShapeCost) -> Traffic:
    """Returns the steps of a log, simulated if it is one of requests."""
    if log.phases:
        traffic = phase_steps.traffic(log.path, settings)
    elif log.text:
        traffic = profiler.traffic(log.text, str(log.path), settings)
    else:
        traffic = _simulated(args, log, settings, cost)
    check_traffic(traffic, settings)
    return traffic


def _simulated(args: argparse.Namespace, log: Log, settings: Settings, cost: ShapeCost) -> Traffic:
    if not 0.0 <= args.acceptance <= 1.0:
        raise ValueError(f"--acceptance is {args.acceptance}, expected a share from 0 to 1")
    if args.most_requests < 1:
        raise ValueError(f"--most-requests is {args.most_requests}, expected at least 1")
    requests, notes = log.requests[: args.most_requests], []
    if len(requests) < len(log.requests):
        notes.append(f"only the first {len(requests):,} of {len(log.requests):,} requests (--most-requests)")
    if args.drop_longer:
        kept = drop_longer(requests, settings)
        if len(kept) < len(requests):
            notes.append(f"{counted(len(requests) - len(kept), 'request')} longer than the server takes left out")
        requests = kept
    check_requests(requests, settings, str(log.path))
    with task_progress("simulating") as progress:
        steps = simulate(requests, settings, cost, args.acceptance, progress)
    notes.append("chunked prefill, first come first served, steps of modelled length without padding")
    return Traffic(f"{log.path} ({counted(len(requests), 'request')})", steps, tuple(notes))


def _own_sets(settings: Settings, traffic: Traffic | None, cost: ShapeCost) -> tuple[list[SetReport], dict[str, str]]:
    """Returns a report for each strategy, and why one cannot be used. The one that the variables choose is marked."""
    sets, refused = [], {}
    for name in STRATEGIES:
        variables = {key: value for key, value in settings.environment.items() if "EXPONENTIAL" not in key}
        own = replace(settings, environment={**variables, "VLLM_BUCKETING_STRATEGY": name})
        label = f"{name} (in use)" if name == settings.strategy else name
        try:
            sets.append(_set_report(name, label, prepare(own), own, traffic, cost))
        except SettingsError as error:
            refused[name] = str(error)
    if not sets:
        raise SettingsError(f"no strategy of vllm-gaudi can start with these settings: {refused[settings.strategy]}")
    return sets, refused


def _set_report(
    name: str, label: str, prepared: Prepared, settings: Settings, traffic: Traffic | None, cost: ShapeCost
) -> SetReport:
    if traffic is None:
        return SetReport(name, label, prepared, None, cost)
    with task_progress(f"{name}: {prepared.num_graphs:,} buckets") as progress:
        return SetReport(name, label, prepared, replay(traffic.steps, prepared, settings, progress), cost)


def _head(args: argparse.Namespace, traffic: Traffic, choice: Choice) -> list[str]:
    """Returns the lines at the head of the bucket file."""
    name, _ = read_model(args.model)
    return [
        "Buckets for vllm-gaudi (VLLM_BUCKETING_FROM_FILE), written by gaudi-ucm tune --for vllm-gaudi.",
        f"Traffic: {traffic.source}, {counted(len(traffic.steps), 'step')}. Model: {name} on {args.device}.",
        f"{counted(choice.prepared.num_graphs, 'graph')}. Each line: batch, query tokens, context blocks.",
    ]


def _command(args: argparse.Namespace, settings: Settings) -> str | None:
    """Returns a command that serves with the file; None if none was written."""
    if args.output is None:
        return None
    dropped = ("STRATEGY", "EXPONENTIAL", "_BUCKET_")
    kept = {name: value for name, value in settings.environment.items() if not any(part in name for part in dropped)}
    variables = {
        "VLLM_BUCKETING_FROM_FILE": str(args.output.resolve()),
        "VLLM_PROMPT_BS_BUCKET_MAX": str(settings.prefill_batch),
        "VLLM_CONTIGUOUS_PA": str(settings.contiguous).lower(),
        **kept,
    }
    flags = [f"--{name.replace('_', '-')} {getattr(settings, name)}" for name in LIMITS if name != "num_blocks"]
    # with more blocks than the file covers, contiguous reading would meet shapes that nothing has prepared
    flags.append(f"--num-gpu-blocks-override {settings.num_blocks}")
    if not settings.prefix_caching:
        flags.append("--no-enable-prefix-caching")
    if settings.ranks > 1:
        flags.append(f"--data-parallel-size {settings.ranks}")
    head = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    return f"{head} vllm serve MODEL {' '.join(flags)}"


def _report(args: argparse.Namespace, comparison: Comparison, more: dict[str, str | None]) -> None:
    if args.json:
        print(json.dumps({**more, **comparison.to_json()}, indent=2))
        return
    show(comparison)
    console = report_console()
    if more.get("output"):
        console.print(f"buckets written to {more['output']}; serve with", markup=False)
        console.print(f"  {more['command']}", markup=False, soft_wrap=True)


RUN: dict[str, Callable[[argparse.Namespace], int]] = {"tune": tune, "plan": plan}
