"""Doctor's section on static shapes: which graphs a server would use, how their buckets are chosen, and from what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vllm_gaudi_ucm import envs
from vllm_gaudi_ucm.cli.doctor.check import Check
from vllm_gaudi_ucm.config.ucm_config import GraphsConfig, UcmConfig
from vllm_gaudi_ucm.execution.bucket_choice import strategy_name
from vllm_gaudi_ucm.execution.graph_kind import graph_kind
from vllm_gaudi_ucm.graphs.shapes.tail_shapes import MOST_TAILS
from vllm_gaudi_ucm.graphs.strategies.file import BucketFileError, read_bucket_file
from vllm_gaudi_ucm.observability.phase_log import PhaseLogError, read_phase_log
from vllm_gaudi_ucm.options.counted import counted

SECTION = "static shapes"
KINDS = {
    "off": "steps run at their true shapes",
    "eager": "padded to buckets, operator by operator",
    "cuda_graph": "CUDA graphs",
    "hpu_graph": "HPU graphs",
    "compile": "buckets through torch.compile",
}


def static_shape_checks(config: UcmConfig, device: str | None) -> Iterator[Check]:
    """The section's rows, for a server on `device` that is started without --enforce-eager."""
    if device is None:
        yield Check(SECTION, "ucm.graphs.mode", "info", f"{config.graphs.mode!r}; no device was chosen")
    else:
        yield _kind(config, device)
    yield _strategy(config.graphs)
    if config.memory_mode.enabled and _runs_static(config, device):
        yield _tails(config.graphs)
    if config.graphs.buckets is not None:
        yield _buckets(config.graphs.buckets)
    if config.graphs.trace is not None:
        yield _trace(config.graphs.trace)


def _kind(config: UcmConfig, device: str) -> Check:
    name = "ucm.graphs.mode"
    try:
        kind = graph_kind(config, device, envs.lazy_mode(), enforce_eager=False)
    except ValueError as error:
        return Check(SECTION, name, "fail", str(error), advice="correct it")
    return Check(SECTION, name, "ok", f"{config.graphs.mode!r} on {device}: {kind} ({KINDS[kind]})")


def _runs_static(config: UcmConfig, device: str | None) -> bool:
    try:
        return device is not None and graph_kind(config, device, envs.lazy_mode(), enforce_eager=False) != "off"
    except ValueError:
        return False  # the row of the mode says so


def _tails(graphs: GraphsConfig) -> Check:
    """Their number depends on --max-model-len, and whether they exist on --kv-transfer-config."""
    from_file = graphs.buckets is not None and graphs.strategy in ("auto", "file")
    beside = "beside those of the bucket file" if from_file else "a part of ucm.graphs.max_graphs"
    found = f"up to {MOST_TAILS} where UcmConnector loads prompts in part: warm before serving starts, {beside}"
    return Check(SECTION, "graphs for tails", "info", found)


def _strategy(graphs: GraphsConfig) -> Check:
    name = "ucm.graphs.strategy"
    try:
        strategy = strategy_name(graphs)
    except ValueError as error:
        return Check(SECTION, name, "fail", str(error), advice="give the file, or another strategy")
    return Check(SECTION, name, "ok", f"{graphs.strategy!r}: {strategy}, at most {graphs.max_graphs} graphs")


def _buckets(path: Path) -> Check:
    name = "ucm.graphs.buckets"
    try:
        limits, forward, logits = read_bucket_file(path)
    except BucketFileError as error:
        return Check(SECTION, name, "fail", str(error), advice="write one with `gaudi-ucm tune LOG -o FILE`")
    found = (
        f"{path}: {len(forward)} forward and {counted(len(logits), 'logits graph')}, for --max-num-batched-tokens "
        f"{limits.max_num_batched_tokens}, --max-num-seqs {limits.max_num_seqs}, --max-model-len "
        f"{limits.max_model_len}, --block-size {limits.block_size}"
    )
    return Check(SECTION, name, "ok", found)


def _trace(path: Path) -> Check:
    name = "ucm.graphs.trace"
    try:
        header, steps = read_phase_log(path)
    except PhaseLogError as error:
        return Check(SECTION, name, "fail", str(error), advice="give a phase log (ucm.phase_log, `gaudi-ucm trace`)")
    if not steps:
        return Check(SECTION, name, "fail", f"{path}: a log without steps", advice="give one of some traffic")
    return Check(
        SECTION, name, "ok", f"{path}: {counted(len(steps), 'step')} of {header.get('model', 'an unnamed model')}"
    )
