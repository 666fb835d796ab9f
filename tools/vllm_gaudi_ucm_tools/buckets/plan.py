"""`gaudi-ucm plan`: estimates the cost of a server's buckets in padding, memory and warm-up, before a server starts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from vllm_gaudi_ucm.cli.doctor.configuration import resolve_text
from vllm_gaudi_ucm.config.graphs_config import GraphsConfig
from vllm_gaudi_ucm.decisions.bucket_choice import most_buckets
from vllm_gaudi_ucm.decisions.step_memory import StepMemory, as_served
from vllm_gaudi_ucm.graphs.cost.specs import DEFAULT_SPECS
from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.shapes.prompt_remainder import RemainderShapes, remainder_rows
from vllm_gaudi_ucm.graphs.shapes.steps import Steps, check_steps, steps_within
from vllm_gaudi_ucm.graphs.strategies import STRATEGIES, automatic_strategy, build_buckets
from vllm_gaudi_ucm.graphs.strategies.base import BucketRequest
from vllm_gaudi_ucm.observability.phase_log import bucket_shapes
from vllm_gaudi_ucm.observability.step_record import StepRecord
from vllm_gaudi_ucm_tools.buckets import other_servers
from vllm_gaudi_ucm_tools.buckets.compile_cost import AttentionNodes
from vllm_gaudi_ucm_tools.buckets.cost_options import (
    add_cost_arguments,
    add_limit_arguments,
    add_strategy_arguments,
    check_block_size,
    check_max_graphs,
    cost_model,
    given_limits,
    limits_of,
    read_codes,
    read_encoder,
    read_model,
    read_pooling,
    strategy_options,
)
from vllm_gaudi_ucm_tools.buckets.held_weights import adapter_bytes, held_bytes
from vllm_gaudi_ucm_tools.buckets.plan_memory import blocks_that_fit, plan_memory
from vllm_gaudi_ucm_tools.buckets.plan_report import PlanReport, show
from vllm_gaudi_ucm_tools.buckets.pooling_plan import RUNNERS
from vllm_gaudi_ucm_tools.op_cost.work import CHIPS
from vllm_gaudi_ucm_tools.output import task_progress
from vllm_gaudi_ucm_tools.phases.joined_logs import JoinedLogs
from vllm_gaudi_ucm_tools.phases.phases import open_logs
from vllm_gaudi_ucm_tools.traffic.mix_traffic import MixTraffic

# vLLM's defaults for a server, and Gaudi's natural block size; num_blocks is the number that fits the device's memory.
DEFAULT_LIMITS = {"max_num_batched_tokens": 2048, "max_num_seqs": 64, "max_model_len": 8192, "block_size": 128}
MIX_STEPS = 5000
# The behaviour of a server without configuration.
SERVER = GraphsConfig()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command."""
    add_strategy_arguments(parser, "how buckets are chosen (default: trace with --log or --mix, else padding_aware)")
    traffic = parser.add_mutually_exclusive_group()
    traffic.add_argument(
        "--log", type=Path, nargs="+", metavar="FILE", help="the traffic: a phase log, or several of the same limits"
    )
    traffic.add_argument(
        "--mix",
        metavar="NAME",
        help="the traffic: a synthetic mix of gaudi-ucm trace, with its own limits",
    )
    parser.add_argument(
        "--max-graphs",
        type=int,
        default=SERVER.max_graphs,
        metavar="N",
        help="graphs, forward and logits together (default: %(default)s)",
    )
    parser.add_argument(
        "--skeleton",
        type=int,
        default=SERVER.skeleton,
        metavar="N",
        help="forward graphs that are warm before serving starts (default: %(default)s)",
    )
    parser.add_argument(
        "--count-nodes",
        action="store_true",
        help="count the nodes of attention in every bucket instead of taking the most there may be; imports torch",
    )
    parser.add_argument(
        "--step-memory",
        type=float,
        default=SERVER.step_memory,
        metavar="GIB",
        help="what attention of a step may take on a Gaudi, as ucm.graphs.step_memory (default: %(default)g)",
    )
    parser.add_argument(
        "--quantised-experts",
        choices=("auto", "codes", "plain"),
        default="auto",
        help="what quantised experts of --model are kept as, as ucm.quantised_experts (default: %(default)s)",
    )
    parser.add_argument(
        "--runner",
        choices=RUNNERS,
        default="auto",
        help="`pooling` if --model yields embeddings, scores or classes, as vLLM's flag; encoders always do",
    )
    for flag, default, what in (
        ("--max-loras", 0, "slots for adapters (LoRA), as vLLM's flag (default: none)"),
        ("--max-lora-rank", 16, "rank of each slot, as vLLM's flag (default: %(default)s)"),
        ("--kept-states", 0, "states kept for prefix caching, as ucm.kv_cache.kept_states (default: none)"),
        ("--picture-tokens", 0, "tokens of the largest picture that --model reads (default: no pictures)"),
    ):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=what)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    add_sparse_arguments(parser)
    add_cost_arguments(parser)
    add_limit_arguments(
        parser,
        "those of the log or the mix; else "
        + ", ".join(f"{name} {value}" for name, value in DEFAULT_LIMITS.items())
        + ", and as many blocks as fit the device's memory",
    )
    other_servers.add_arguments(parser, "plan")


def run(args: argparse.Namespace) -> int:
    """Plans and reports; unusable input raises a ValueError."""
    if (done := other_servers.run(args, "plan")) is not None:
        return done
    report = make_plan(args)
    if args.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        show(report)
    return 0 if report.memory.fits else 1


def make_plan(args: argparse.Namespace) -> PlanReport:
    """Chooses the buckets, runs the traffic through them, and adds up memory and time."""
    check_max_graphs(args.max_graphs)
    pooling = read_pooling(args.model, args.runner)
    pooling.check(args.num_blocks, args.mix)
    if args.mix is not None:
        traffic = MixTraffic(args, args.mix)
        cost = cost_model(args, traffic.limits.block_size)
        return _report(
            args,
            as_served(traffic.limits, _step_memory(args, cost), _own_blocks(args)),
            cost,
            _simulate(traffic, args.mix, cost),
        )
    if args.log is not None:
        with open_logs(args.log, given_limits(args)) as logs:
            check_block_size(args, logs.header, logs.header_place)
            # a log of true shapes says "auto" if each step read the cheaper way; a graph has one form, which gathers
            said = {**logs.header, "contiguous": logs.header.get("contiguous") is True}
            limits = limits_of(args, said, logs.header_place)
            cost = cost_model(args, limits.block_size)
            steps, num_remainders = _steps_and_remainders(logs)
        return _report(
            args, as_served(limits, _step_memory(args, cost), _own_blocks(args)), cost, steps, num_remainders
        )
    cost = cost_model(args, args.block_size or DEFAULT_LIMITS["block_size"])
    known: dict[str, int] = {**pooling.limits(DEFAULT_LIMITS), "contiguous": False}
    if args.num_blocks is None and not pooling.is_encoder:
        states = _states(args, cost, args.max_num_seqs or DEFAULT_LIMITS["max_num_seqs"])
        tokens = args.max_num_batched_tokens or DEFAULT_LIMITS["max_num_batched_tokens"]
        encoder = read_encoder(args.model, args.picture_tokens, cost, tokens)
        held = _weights(args, cost) + _adapters(args, cost) + states + encoder.held
        known["num_blocks"] = blocks_that_fit(cost, held)
    limits = limits_of(args, known, "the defaults")
    memory, asked = _step_memory(args, cost), limits.max_num_batched_tokens
    if memory is not None:
        longest = limits.blocks_per_request * limits.block_size if limits.strip else limits.max_model_len
        rows = memory.rows(asked, limits.max_num_seqs, longest)
        limits = replace(limits, max_num_batched_tokens=rows)
    return replace(_report(args, as_served(limits, memory, _own_blocks(args)), cost, None), asked_tokens=asked)


def _steps_and_remainders(logs: JoinedLogs) -> tuple[Steps, int]:
    """Returns the steps that need buckets, and how many ran in graphs for prompt remainders."""
    num_remainders = 0

    def counted() -> Iterator[StepRecord]:
        nonlocal num_remainders
        for record in logs.steps():
            num_remainders += record.prompt_remainder
            yield record

    return Steps.from_buckets(bucket_shapes(counted())), num_remainders


def _step_memory(args: argparse.Namespace, cost: CostModel) -> StepMemory | None:
    """Returns the bound of a server's steps; None for a device that needs none."""
    if not args.step_memory > 0:
        raise ValueError(f"--step-memory is {args.step_memory:g}, expected more than 0 GiB")
    return StepMemory(cost.model, args.step_memory) if args.device in CHIPS else None


def _own_blocks(args: argparse.Namespace) -> bool:
    """Returns whether a server's attention on the device reads only each request's own blocks, see `as_served`."""
    return args.device == DEFAULT_SPECS["cuda"]


def _weights(args: argparse.Namespace, cost: CostModel) -> int:
    """Returns the bytes of the weights on the device."""
    return held_bytes(cost.model, read_codes(args.model), args.device, args.quantised_experts)


def _adapters(args: argparse.Namespace, cost: CostModel) -> int:
    """Returns the bytes of the slots of adapters on the device."""
    for flag, value, least in (("--max-loras", args.max_loras, 0), ("--max-lora-rank", args.max_lora_rank, 1)):
        if value < least:
            raise ValueError(f"{flag} is {value}, expected at least {least}")
    return adapter_bytes(cost.model, args.max_loras, args.max_lora_rank)


def _states(args: argparse.Namespace, cost: CostModel, max_num_seqs: int) -> int:
    """Returns the bytes of the states of running requests and of kept ones; 0 if no layer keeps a state."""
    kept, states = args.kept_states, cost.model.states
    if kept < 0:
        raise ValueError(f"--kept-states is {kept}, expected 0 or more")
    if states is not None:
        return states.bytes_of(max_num_seqs, args.num_speculative_tokens, kept)
    if kept:
        raise ValueError("--kept-states: no layer of the model keeps a state; leave it out")
    return 0


def _report(
    args: argparse.Namespace, limits: Limits, cost: CostModel, steps: Steps | None, tail_steps: int = 0
) -> PlanReport:
    limits, remainders, live_blocks, rows_each = with_sparse_method(args, limits)
    shapes = [] if remainders is None else remainders.shapes
    files = {"buckets": args.buckets, "trace": steps}
    strategy = args.strategy or automatic_strategy([key for key, value in files.items() if value is not None])
    if STRATEGIES.get(strategy).needs == "trace" and steps is None:
        raise ValueError(f"--strategy {strategy} needs --log or --mix, whose steps the buckets are tuned to")
    if args.skeleton < 1:
        raise ValueError(f"--skeleton is {args.skeleton}, expected at least 1: the configured maximum")
    divided = 0
    if steps is not None:
        divided = int(steps.forward_counts[steps.forward[:, 2] > limits.most_shared_blocks].sum())
        steps = steps_within(steps, limits)
        check_steps(steps, limits)
    options = strategy_options(args, strategy)
    with task_progress("choosing buckets") as progress:
        most = most_buckets(args.max_graphs, strategy, len(shapes))
        request = BucketRequest(limits, cost, most, args.buckets, steps, progress, live_blocks, rows_each)
        buckets = build_buckets(strategy, request, options)
        progress(1.0)
    name, _ = read_model(args.model)
    traffic = args.mix or (args.log and ", ".join(map(str, args.log)))
    encoder = read_encoder(args.model, args.picture_tokens, cost, limits.max_num_batched_tokens)
    pools = read_pooling(args.model, args.runner).pools
    memory = plan_memory(
        buckets,
        cost,
        _weights(args, cost),
        shapes,
        adapters=_adapters(args, cost),
        states=_states(args, cost, limits.max_num_seqs),
        encoder=encoder,
        pools=pools,
    )
    nodes = _count(buckets, cost, shapes) if args.count_nodes else None
    return PlanReport(
        name,
        strategy,
        traffic,
        cost,
        buckets,
        steps,
        divided,
        memory,
        args.skeleton,
        shapes,
        tail_steps,
        nodes,
        pipeline=args.pipeline_parallel_size,
        picture_graphs=encoder.graphs,
        pools=pools,
    )


def _count(buckets: BucketSet, cost: CostModel, remainders: list[ForwardShape]) -> AttentionNodes:
    """Counts the nodes of every forward graph once, and returns a function that looks them up."""
    # torch takes seconds to import, which other plans do not need
    from vllm_gaudi_ucm_tools.op_cost.attention_nodes import attention_nodes

    counts: dict[ForwardShape, int] = {}
    with task_progress("counting nodes") as progress:
        shapes = [*buckets.forward, *remainders]
        for shape in shapes:
            counts[shape] = attention_nodes(shape, buckets.limits, cost.model).num_operators
            progress(len(counts) / len(shapes))
    return counts.__getitem__


def _simulate(traffic: MixTraffic, name: str, cost: CostModel) -> Steps:
    with task_progress(f"simulating {name}") as progress:
        buckets = []
        for bucket in traffic.buckets(cost, MIX_STEPS):
            buckets.append(bucket)
            progress(len(buckets) / MIX_STEPS)
    return Steps.from_buckets(buckets)


def add_sparse_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares --sparse and the options that need it: --partial-loads, --num-speculative-tokens."""
    group = parser.add_argument_group("sparse method of the server")
    group.add_argument(
        "--sparse",
        metavar="FILE|JSON",
        help="what you pass as ucm in --additional-config; its method and options say how many blocks are selected, "
        "and whether prompts choose (prompt_ratio), which need graphs of their own",
    )
    group.add_argument(
        "--partial-loads",
        action="store_true",
        help="prompts may be loaded in part, by UcmConnector under memory mode: count the graphs for their remainders",
    )
    group.add_argument(
        "--num-speculative-tokens",
        type=int,
        default=0,
        metavar="N",
        help="drafts of a request in a step, as num_speculative_tokens of --speculative-config: list the buckets of "
        "their verification, and count the states of drafts (default: %(default)s)",
    )


def with_sparse_method(args: argparse.Namespace, limits: Limits) -> tuple[Limits, RemainderShapes | None, int, int]:
    """Returns the limits with the blocks that --sparse selects, the shapes for prompt remainders with --partial-loads
    or `prompt_ratio`, the room for live blocks of a sparse request, and its rows: a token and its drafts.

    They are the same as for a server at static shapes.

    Raises:
        ValueError: options that do not go together, or a configuration that lacks what they need.
    """
    drafts = args.num_speculative_tokens
    if drafts < 0:
        raise ValueError(f"--num-speculative-tokens is {drafts}, expected 0 or more")
    if args.sparse is None:
        if args.partial_loads:
            raise ValueError("--partial-loads needs --sparse: what is selected decides how large the graphs are")
        return limits, None, 0, 1 + drafts
    if args.max_selected_blocks is not None:
        raise ValueError("--max-selected-blocks and --sparse both say how many blocks are selected; leave one out")
    # torch and vLLM take seconds to import, which a plan without a sparse method does not need
    from vllm_gaudi_ucm.config.ucm_config import block_options
    from vllm_gaudi_ucm.execution.bucketed_execution import remainder_shapes
    from vllm_gaudi_ucm.sparse.selection.sparse_worker import ServerSizes, selection_limits

    config = resolve_text(args.sparse)
    options = block_options(config)
    if options is None:
        raise ValueError(
            f"--sparse: ucm_sparse_method is {config.ucm_sparse_method!r}, expected one that selects blocks"
        )
    if args.partial_loads and not config.memory_mode.enabled:
        raise ValueError(
            "--partial-loads: memory_mode.enabled of --sparse is false, and then nothing is loaded in part"
        )
    rows, blocks = 1 + drafts, limits.num_blocks
    sizes = ServerSizes(limits.max_model_len, limits.max_num_seqs, rows, limits.block_size, blocks, static=True)
    tiles = options.prompt_ratio is not None
    if args.partial_loads or tiles:
        largest = remainder_rows(limits.block_size, limits.max_num_batched_tokens, sizes.max_rows, tiles)
        sizes = sizes._replace(remainder_rows=largest)
    choices = selection_limits(options, sizes)
    limits = replace(limits, max_selected_blocks=choices.max_selected_blocks)
    return limits, remainder_shapes(limits, choices), choices.room_for_live_blocks, choices.max_rows
