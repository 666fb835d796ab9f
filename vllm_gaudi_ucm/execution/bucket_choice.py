"""The buckets of a server: its limits, its cost model and the strategy that the configuration names."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.graphs.cost.specs import DEVICES, DeviceFigures, ModelFigures, device_figures
from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.limits import Limits, LimitsError
from vllm_gaudi_ucm.graphs.shapes.padding import default_shared_blocks
from vllm_gaudi_ucm.graphs.shapes.steps import Steps, steps_within
from vllm_gaudi_ucm.graphs.strategies import BLIND_STRATEGIES, build_buckets
from vllm_gaudi_ucm.graphs.strategies.grid import coarsest_grid
from vllm_gaudi_ucm.graphs.strategies.request import BucketRequest
from vllm_gaudi_ucm.graphs.tuning.tune import check_steps
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.observability.phase_log import PhaseLogReader, bucket_shapes

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.config.ucm_config import GraphsConfig
    from vllm_gaudi_ucm.device import Device

logger = plugin_logger(__name__)

# Whose peaks stand for a device that has no entry of its own.
DEFAULT_FIGURES = {"hpu": "gaudi2", "cuda": "h200", "cpu": "cpu"}


def server_limits(
    vllm_config: VllmConfig,
    block_size: int,
    num_blocks: int,
    contiguous: bool,
    max_shared_blocks: int | None,
    max_selected_blocks: int = 0,
) -> Limits:
    """The largest step that vLLM's scheduler makes with this configuration; raises LimitsError where none fits.

    max_shared_blocks: None stands for `default_shared_blocks`.
    """
    scheduler = vllm_config.scheduler_config
    if max_shared_blocks is None:
        max_shared_blocks = default_shared_blocks(vllm_config.model_config.max_model_len, block_size)
    return Limits(
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=vllm_config.model_config.max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        contiguous=contiguous,
        max_shared_blocks=max_shared_blocks,
        max_selected_blocks=max_selected_blocks,
    )


def cost_model(vllm_config: VllmConfig, device: Device, block_size: int) -> CostModel:
    """What steps of the served model cost on the device, modelled."""
    model = ModelFigures.from_hf_config(vllm_config.model_config.hf_text_config.to_dict())
    return CostModel(_figures(device), model, block_size)


def choose_buckets(
    graphs: GraphsConfig, vllm_config: VllmConfig, limits: Limits, device: Device, num_tails: int = 0
) -> tuple[BucketSet, Steps | None]:
    """The buckets, and the steps of `ucm.graphs.trace` where there is one.

    On Gaudi they may bound how far rows look back on other new ones; elsewhere attention knows it from the data.
    Logs a warning where `max_graphs` leaves the largest bucket alone, which every step then takes.

    num_tails: graphs for prompt remainders, which are a part of `max_graphs`.

    Raises:
        ValueError: a file that is missing, malformed or made for other limits, or a strategy without its file.
    """
    cost = cost_model(vllm_config, device, limits.block_size)
    limits = replace(limits, causal_reach=device.kind == "hpu")
    usage = None
    if graphs.trace is not None:
        usage = _usage(graphs.trace, limits)
    strategy = strategy_name(graphs)
    most = most_buckets(graphs.max_graphs, strategy, num_tails)
    request = BucketRequest(limits, cost, most, graphs.buckets, usage)
    buckets = build_buckets(strategy, request)
    if strategy in BLIND_STRATEGIES and len(buckets.forward) == 1:
        _warn_of_one_bucket(strategy, request, graphs.max_graphs, num_tails)
    return buckets, usage


def most_buckets(max_graphs: int, strategy: str, num_tails: int) -> int:
    """What `ucm.graphs.max_graphs` leaves for buckets beside the graphs for prompt remainders.

    At least the two largest, and all of it for a bucket file, which was made without them.
    """
    return max_graphs if strategy == "file" or not num_tails else max(2, max_graphs - num_tails)


def _warn_of_one_bucket(strategy: str, request: BucketRequest, max_graphs: int, num_tails: int) -> None:
    needed = coarsest_grid(request).num_graphs + num_tails
    if max_graphs < needed:
        logger.warning(
            "ucm.graphs.max_graphs: found %d, expected at least %d for strategy %s%s%s: only the largest graph is "
            "left, and every step costs what it costs; raise max_graphs, or name a bucket file or a trace",
            max_graphs,
            needed,
            strategy,
            " with a sparse method" if request.limits.max_selected_blocks else "",
            f" and {num_tails} graphs for tails" if num_tails else "",
        )


def _usage(trace: Path, limits: Limits) -> Steps:
    """The steps of a phase log, of this server or of another one whose steps were no larger."""
    with PhaseLogReader(trace) as log:
        steps = steps_within(Steps.of(bucket_shapes(log.steps())), limits)
    try:
        check_steps(steps, limits)
    except LimitsError as error:
        raise LimitsError(f"ucm.graphs.trace: {trace}: {error}") from error
    return steps


def strategy_name(graphs: GraphsConfig) -> str:
    """The strategy, `auto` resolved; raises ValueError for one without its file."""
    needed = {"file": ("buckets", graphs.buckets), "trace": ("trace", graphs.trace)}
    if graphs.strategy == "auto":
        return next((name for name, (_, path) in needed.items() if path is not None), "padding_aware")
    if graphs.strategy in needed:
        key, path = needed[graphs.strategy]
        if path is None:
            raise ValueError(f"ucm.graphs.strategy: {graphs.strategy!r} needs the file ucm.graphs.{key}, found none")
    return graphs.strategy


def _figures(device: Device) -> DeviceFigures:
    name = device.name().lower() if device.kind == "hpu" else ""
    return device_figures(name if name in DEVICES else DEFAULT_FIGURES[device.kind])
