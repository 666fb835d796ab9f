"""Options that several tools share: the device and the model of the cost model, and the limits of the server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from vllm_gaudi_ucm.config.graphs_config import GraphsConfig
from vllm_gaudi_ucm.graphs.cost.specs import DEVICES, LLAMA_8B, ModelSpec, device_spec
from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm.graphs.shapes.limits import Limits, LimitsError, strip_size
from vllm_gaudi_ucm.graphs.strategies import STRATEGIES
from vllm_gaudi_ucm_tools.buckets.encoder_plan import EncoderPlan
from vllm_gaudi_ucm_tools.buckets.expert_codes import CodeSpec
from vllm_gaudi_ucm_tools.buckets.pooling_plan import PoolingPlan
from vllm_gaudi_ucm_tools.op_cost.work import CHIPS

OPTIONAL_LIMITS = ("contiguous", "max_shared_blocks", "max_selected_blocks", "bounds_prompt_tiles", "strip", "window")
LIMIT_NAMES = tuple(field.name for field in fields(Limits) if field.name not in OPTIONAL_LIMITS)
LLAMA_NAME = "llama-8b"
MOST_GRAPHS = 4096  # the same as for the option ucm.graphs.max_graphs


def add_strategy_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """Declares --strategy with its options, and --buckets as an alternative. what: help of --strategy."""
    choice = parser.add_mutually_exclusive_group()
    # a bucket file is named by --buckets
    choice.add_argument("--strategy", choices=[name for name in STRATEGIES.names() if name != "file"], help=what)
    choice.add_argument("--buckets", type=Path, metavar="FILE", help="take the buckets of this file")
    parser.add_argument(
        "--strategy-options", metavar="JSON", help="options of the strategy, as ucm.graphs.strategy_options"
    )


def strategy_options(args: argparse.Namespace, strategy: str) -> Mapping[str, Any]:
    """Returns the options of --strategy-options, checked as in a server. Raises a ValueError that names the option."""
    try:
        given = json.loads(args.strategy_options or "{}")
    except ValueError as error:
        raise ValueError(f"--strategy-options: malformed JSON: {error}") from error
    graphs = GraphsConfig.resolve({"strategy": strategy, "strategy_options": given}, "ucm.graphs")
    return graphs.strategy_options.model_dump()


def add_cost_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares --device and --model, and how many devices share the model."""
    parser.add_argument(
        "--device", choices=DEVICES, default="gaudi2", help="device spec of the cost model (default: gaudi2)"
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="CONFIG",
        help="config.json of the model, or the folder that holds it (default: sizes of Llama 3.1 8B)",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="devices that share each layer (default: %(default)s)",
    )
    parser.add_argument(
        "--pipeline-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="stages of layers, each on devices of its own (default: %(default)s)",
    )


def add_limit_arguments(parser: argparse.ArgumentParser, source: str) -> None:
    """Declares one option for each limit; without it the limit comes from `source`."""
    group = parser.add_argument_group("limits of the server", f"without them: {source}")
    for name in LIMIT_NAMES:
        group.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N")
    group.add_argument(
        "--max-shared-blocks",
        type=int,
        metavar="N",
        help="distinct shared blocks of a step, as ucm.graphs.max_shared_blocks",
    )
    group.add_argument(
        "--max-selected-blocks",
        type=int,
        metavar="N",
        help="blocks that a sparse method selects for the requests of a step; 0: none",
    )
    group.add_argument(
        "--granularity",
        choices=("block", "token"),
        help="as ucm.kv_cache.granularity; with a slot for each token sizes count ranges of blocks",
    )
    group.add_argument(
        "--contiguous",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="the unique part may read a contiguous slice of the cache, so that it can span all of it",
    )


def given_limits(args: argparse.Namespace) -> set[str]:
    """Returns the fields of a log's header that options override: logs may differ in them."""
    names = (*LIMIT_NAMES, "max_shared_blocks", "max_selected_blocks", "contiguous")
    return {name for name in names if getattr(args, name) is not None}


def read_model(path: Path | None) -> tuple[str, ModelSpec]:
    """Returns (name, sizes) of the model at `path`, or of the default one; raises a ValueError that names the file."""
    if path is None:
        return LLAMA_NAME, LLAMA_8B
    file, config = _read_config(path)
    try:
        # a model with pictures has its decoder's sizes in a part of its own
        own = config.get("text_config")
        decoder = {**config, **own} if isinstance(own, dict) else config
        return file.parent.name or file.name, ModelSpec.from_hf_config(decoder)
    except ValueError as error:
        raise ValueError(f"--model {file}: {error}") from error


def read_codes(path: Path | None) -> CodeSpec | None:
    """Returns the codes of the model's quantised experts, if it has any; raises a ValueError that names the file."""
    if path is None:
        return None
    return CodeSpec.of_experts(_read_config(path)[1], read_model(path)[1].layers)


def read_encoder(path: Path | None, tokens: int, cost: CostModel, step_tokens: int) -> EncoderPlan:
    """Returns what pictures of up to this many tokens take; a ValueError names what is missing. tokens: 0 for none."""
    if tokens < 0:
        raise ValueError(f"--picture-tokens is {tokens}, expected 0 or more")
    if not tokens:
        return EncoderPlan()
    if path is None:
        raise ValueError("--picture-tokens needs --model: the sizes of its encoder are in its config.json")
    file, config = _read_config(path)
    m = cost.model
    try:
        return EncoderPlan.of(config, tokens, step_tokens, m.hidden, m.tensor, on_gaudi=cost.device.name in CHIPS)
    except ValueError as error:
        raise ValueError(f"--model {file}: {error}") from error


def read_pooling(path: Path | None, runner: str) -> PoolingPlan:
    """Returns how the model answers; raises a ValueError that names the file. runner: as vLLM's `--runner`."""
    if path is None:
        return PoolingPlan.of({}, runner)
    file, config = _read_config(path)
    try:
        return PoolingPlan.of(config, runner)
    except ValueError as error:
        raise ValueError(f"--model {file}: {error}") from error


def _read_config(path: Path) -> tuple[Path, dict[str, Any]]:
    """Returns (file, content)."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = str(error).partition("; use sys.")[0]
        raise ValueError(f"--model {file}: cannot be read as a config.json: {why}") from error
    except RecursionError as error:
        raise ValueError(f"--model {file}: cannot be read as a config.json: nested too deeply") from error
    if not isinstance(config, dict):
        raise ValueError(f"--model {file}: found {type(config).__name__}, expected the JSON object of a config.json")
    return file, config


def cost_model(args: argparse.Namespace, block_size: int) -> CostModel:
    """Returns the cost model of --device and of its part of --model."""
    part = read_model(args.model)[1].shard(args.tensor_parallel_size, args.pipeline_parallel_size)
    return CostModel(device_spec(args.device), part, block_size)


def check_max_graphs(number: int) -> None:
    """Raises a ValueError for more than a server accepts; the least possible number depends on the buckets."""
    if number > MOST_GRAPHS:
        raise ValueError(f"--max-graphs is {number}, expected at most {MOST_GRAPHS}")


def check_block_size(args: argparse.Namespace, known: Mapping[str, Any], where: str) -> None:
    """Raises a ValueError if --block-size or --granularity contradicts the log, whose steps are counted in blocks of
    its own size, or in ranges of them.
    """
    logged = known.get("block_size")
    if args.block_size is not None and logged is not None and args.block_size != logged:
        raise ValueError(
            f"--block-size is {args.block_size}, but {where} says {logged}, and its steps count such blocks; "
            "leave the option out"
        )
    if args.granularity is not None and (args.granularity == "token") != bool(known.get("strip")):
        counts = "ranges of blocks" if known.get("strip") else "blocks"
        raise ValueError(
            f"--granularity is {args.granularity!r}, but the steps of {where} count {counts}; leave the option out"
        )


def limits_of(args: argparse.Namespace, known: Mapping[str, Any], where: str) -> Limits:
    """Returns the limits from the options, and from `known` for options that are not given.

    Raises:
        ValueError: limits that are in neither, all named, or that do not go together.
    """
    values = {name: getattr(args, name) for name in LIMIT_NAMES}
    values = {name: known.get(name) if value is None else value for name, value in values.items()}
    wrong = [name for name, value in values.items() if type(value) is not int]
    if wrong:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise ValueError(f"{where} does not say {', '.join(wrong)}; give {options}")
    contiguous = known.get("contiguous", True) if args.contiguous is None else args.contiguous
    shared = known.get("max_shared_blocks") if args.max_shared_blocks is None else args.max_shared_blocks
    selected = known.get("max_selected_blocks", 0) if args.max_selected_blocks is None else args.max_selected_blocks
    if type(selected) is not int:
        raise ValueError(f"{where} has max_selected_blocks {selected!r}, expected a number; give --max-selected-blocks")
    if shared is not None and type(shared) is not int:
        raise ValueError(f"{where} has max_shared_blocks {shared!r}, expected a number; give --max-shared-blocks")
    try:
        return Limits(
            **values,
            strip=_strip_of(args, known, values["block_size"], where),
            contiguous=bool(contiguous),
            max_shared_blocks=shared,
            max_selected_blocks=selected,
            bounds_prompt_tiles=args.device in CHIPS,
            window=_window_of(args, known, where),
        )
    except LimitsError as error:
        raise ValueError(f"limits of {where}{_of_options(args)}: {error}") from error


def _strip_of(args: argparse.Namespace, known: Mapping[str, Any], block_size: int, where: str) -> int:
    """Returns the strip of --granularity, or of the log if the option is not given."""
    found = known.get("strip", 0)
    if type(found) is not int:
        raise ValueError(f"{where} has strip {found!r}, expected a number; give --granularity")
    if args.granularity is None:
        return found
    return strip_size(block_size) if args.granularity == "token" else 0


def _window_of(args: argparse.Namespace, known: Mapping[str, Any], where: str) -> int:
    """Returns the window of a log, or of the model if the log has none and all layers have the same window."""
    if "window" not in known:
        model = read_model(args.model)[1]
        return model.window if model.window_layers == model.layers else 0
    found = known.get("window", 0)
    if type(found) is not int:
        raise ValueError(f"{where} has window {found!r}, expected a number of tokens")
    return found


def _of_options(args: argparse.Namespace) -> str:
    names = (*LIMIT_NAMES, "max_shared_blocks", "max_selected_blocks")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None]
    return f", and {', '.join(given)}" if given else ""
