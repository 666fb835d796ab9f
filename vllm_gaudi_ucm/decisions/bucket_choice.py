"""The buckets of a server: its limits, its cost model and the strategy that the configuration names."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.decisions.step_memory import StepMemory, as_served
from vllm_gaudi_ucm.graphs.cost.specs import DEFAULT_SPECS, DEVICES, DeviceSpec, ModelSpec, device_spec
from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.few_shapes import decodes_of_all_kinds, lacks_sparse_decodes
from vllm_gaudi_ucm.graphs.shapes.limits import Limits, LimitsError, strip_size
from vllm_gaudi_ucm.graphs.shapes.steps import Steps, check_steps, steps_within
from vllm_gaudi_ucm.graphs.strategies import STRATEGIES, automatic_strategy
from vllm_gaudi_ucm.graphs.strategies.base import BucketRequest, BucketStrategy
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.observability.phase_log import PhaseLogReader, bucket_shapes
from vllm_gaudi_ucm.ops.registry import AUTO

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.batch.window import Window
    from vllm_gaudi_ucm.config.graphs_config import GraphsConfig
    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.device import Device

logger = plugin_logger(__name__)


def server_limits(
    vllm_config: VllmConfig,
    block_size: int,
    num_blocks: int,
    contiguous: bool,
    max_shared_blocks: int | None,
    max_selected_blocks: int = 0,
    memory: StepMemory | None = None,
    *,
    own_blocks: bool = False,
    by_token: bool = False,
    window: Window | None = None,
) -> Limits:
    """The largest step that vLLM's scheduler makes with this configuration; raises LimitsError if none fits.

    max_shared_blocks: None stands for a server's default (`as_served`).
    own_blocks: see `reads_own_blocks`.
    by_token: each token has a slot of its own, so that ranges of blocks are counted.
    window: how far back rows see; None: whole contexts.
    """
    scheduler = vllm_config.scheduler_config
    limits = Limits(
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=vllm_config.model_config.max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        contiguous=contiguous,
        max_shared_blocks=max_shared_blocks,
        max_selected_blocks=max_selected_blocks,
        strip=strip_size(block_size) if by_token else 0,
        window=0 if window is None else window.tokens,
    )
    return as_served(limits, memory, own_blocks)


def reads_own_blocks(config: UcmConfig, device: str) -> bool:
    """True if attention of a request reads the shared blocks that it uses alone. device: `cpu`, `cuda` or `hpu`."""
    return device == "cuda" and config.attention.implementation in (AUTO, "cuda")


def step_memory(vllm_config: VllmConfig, config: UcmConfig, device: str) -> StepMemory | None:
    """Returns the bound on a step's memory; None if attention needs none. device: `cpu`, `cuda` or `hpu`."""
    name = config.attention.implementation
    if name != "hpu" and (name != AUTO or device != "hpu"):
        return None
    return StepMemory(_model_spec(vllm_config), config.graphs.step_memory)


def cost_model(vllm_config: VllmConfig, device: Device, block_size: int) -> CostModel:
    """Returns the modelled cost of the served model's steps on the device."""
    return CostModel(_device_spec(device), _model_spec(vllm_config), block_size)


def _model_spec(vllm_config: VllmConfig) -> ModelSpec:
    """Returns the spec of this worker's part; parts are alike except for remainders of a division."""
    parallel = vllm_config.parallel_config
    model = vllm_config.model_config
    config = model.hf_text_config.to_dict()
    if not model.use_mla and config.get("kv_lora_rank"):
        # VLLM_MLA_DISABLE: keys and values of each head are cached
        config |= {"kv_lora_rank": None, "head_dim": model.get_head_size()}
    if (config.get("index_topk") or 0) >= model.max_model_len:
        # no context is longer than what a row may choose: there are no indexers
        config |= {"index_topk": None}
    spec = ModelSpec.from_hf_config(config)
    return spec.shard(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)


def choose_buckets(
    graphs: GraphsConfig,
    vllm_config: VllmConfig,
    limits: Limits,
    device: Device,
    num_remainders: int = 0,
    live_blocks: int = 0,
    rows_each: int = 1,
) -> tuple[BucketSet, Steps | None]:
    """Returns the buckets, and the steps of `ucm.graphs.trace` if there is one.

    On Gaudi they may bound how far rows look back on other new ones; elsewhere attention knows it from the data. Logs a
    warning if `max_graphs` leaves phases without a bucket of their own. If dense decodes have one, decodes with chosen
    blocks have one, too: as prompts they would be slower than dense.

    num_remainders: graphs for prompt remainders, which are a part of `max_graphs`.
    live_blocks, rows_each: of a sparse request and of a request that decodes, see BucketRequest.

    Raises:
        ValueError: a file that is missing, malformed or made for other limits, or a strategy without its file.
    """
    cost = cost_model(vllm_config, device, limits.block_size)
    # rows of an encoder look forward, too
    limits = replace(limits, bounds_prompt_tiles=device.kind == "hpu" and limits.has_cache)
    usage = None
    if graphs.trace is not None:
        usage = _usage(graphs.trace, limits)
    name = strategy_name(graphs)
    strategy = STRATEGIES.get(name)(**graphs.strategy_options.model_dump())
    most = most_buckets(graphs.max_graphs, name, num_remainders)
    request = BucketRequest(limits, cost, most, graphs.buckets, usage, live_blocks=live_blocks, rows_each=rows_each)
    buckets = strategy.choose(request)
    if lacks_sparse_decodes(buckets):
        buckets = _with_sparse_decodes(buckets, strategy, request, name)
    _check_max_graphs(graphs.max_graphs, strategy.least_graphs(request), name, buckets, num_remainders)
    return buckets, usage


def _with_sparse_decodes(buckets: BucketSet, strategy: BucketStrategy, request: BucketRequest, name: str) -> BucketSet:
    """Adds a bucket for decodes with chosen blocks: instead of another one, but on top of all buckets of a file."""
    most = request.max_graphs
    if name != "file" and most is not None and buckets.num_graphs >= most:
        buckets = strategy.choose(replace(request, max_graphs=max(2, most - 1)))
    added = decodes_of_all_kinds(buckets.limits)
    logger.info("Bucket %s is added to those of strategy %s: for decodes with chosen blocks", added.to_list(), name)
    return BucketSet([*buckets.forward, added], buckets.logits, buckets.limits, buckets.cost)


def most_buckets(max_graphs: int, strategy: str, num_remainders: int) -> int:
    """Returns how many buckets `ucm.graphs.max_graphs` allows in addition to the graphs for prompt remainders.

    At least the two largest, and all of it for a bucket file, which was made without them.
    """
    return max_graphs if strategy == "file" or not num_remainders else max(2, max_graphs - num_remainders)


def _check_max_graphs(max_graphs: int, least: int, strategy: str, buckets: BucketSet, num_remainders: int) -> None:
    """Warns if the strategy needs more graphs for a bucket of each phase.

    least: without graphs for prompt remainders; 0: no bound.
    """
    needed = least + num_remainders
    if not least or max_graphs >= needed:
        return
    alone = len(buckets.forward) == 1
    logger.warning(
        "ucm.graphs.max_graphs: found %d, expected at least %d for strategy %s%s%s: %s; raise max_graphs, or name a "
        "bucket file or a trace",
        max_graphs,
        needed,
        strategy,
        " with a sparse method" if buckets.limits.max_selected_blocks else "",
        f" and {num_remainders} graphs for prompt remainders" if num_remainders else "",
        "only the largest graph is left, and every step costs what it costs"
        if alone
        else "decodes have graphs, and most prompts cost what the largest graph costs",
    )


def _usage(trace: Path, limits: Limits) -> Steps:
    """The steps of a phase log, of this server or of another one whose steps were no larger."""
    with PhaseLogReader(trace) as log:
        steps = steps_within(Steps.from_buckets(bucket_shapes(log.steps())), limits)
    try:
        check_steps(steps, limits)
    except LimitsError as error:
        raise LimitsError(f"ucm.graphs.trace: {trace}: {error}") from error
    return steps


def strategy_name(graphs: GraphsConfig) -> str:
    """The strategy, `auto` resolved; raises ValueError for one without its file."""
    files = {"buckets": graphs.buckets, "trace": graphs.trace}
    if graphs.strategy == "auto":
        return automatic_strategy([key for key, path in files.items() if path is not None])
    needs = STRATEGIES.get(graphs.strategy).needs
    if needs is not None and files[needs] is None:
        raise ValueError(f"ucm.graphs.strategy: {graphs.strategy!r} needs the file ucm.graphs.{needs}, found none")
    return graphs.strategy


def _device_spec(device: Device) -> DeviceSpec:
    name = device.name().lower() if device.kind == "hpu" else ""
    return device_spec(name if name in DEVICES else DEFAULT_SPECS[device.kind])
