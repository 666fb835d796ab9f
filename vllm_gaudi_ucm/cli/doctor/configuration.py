"""Doctor's section on the configuration: every problem of the one given, or its values."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_gaudi_ucm import envs
from vllm_gaudi_ucm.cli.doctor.check import Check
from vllm_gaudi_ucm.cli.doctor.store import checks_of_store
from vllm_gaudi_ucm.cli.output import why_not_writable
from vllm_gaudi_ucm.config.graphs_config import GraphsConfig
from vllm_gaudi_ucm.config.ucm_config import UcmConfig, block_options, resolve_value
from vllm_gaudi_ucm.decisions.bucket_choice import strategy_name
from vllm_gaudi_ucm.decisions.graph_kind import graph_kind
from vllm_gaudi_ucm.decisions.recipe_cache import RecipeCacheError, check_recipe_cache
from vllm_gaudi_ucm.graphs.shapes.prompt_remainder import most_remainders
from vllm_gaudi_ucm.graphs.strategies.file import BucketFileError, read_bucket_file
from vllm_gaudi_ucm.memory_mode.options import MemoryModeOptions
from vllm_gaudi_ucm.observability.phase_log import PhaseLogError, read_phase_log
from vllm_gaudi_ucm.options.errors import UcmConfigError, counted
from vllm_gaudi_ucm.options.files import parse_json
from vllm_gaudi_ucm.sparse.base import UcmSparseRole
from vllm_gaudi_ucm.sparse.budget import block_budget, shortest_sparse_context
from vllm_gaudi_ucm.sparse.factory import UcmSparseFactory
from vllm_gaudi_ucm.sparse.options import BlockOptions
from vllm_gaudi_ucm.sparse.registry import SPARSE_METHODS, options_class

CONFIGURATION = "configuration"


def resolve_text(text: str | None) -> UcmConfig:
    """Resolves `--config`: JSON text, otherwise a path, as the value of `ucm`; None stands for all defaults."""
    if text is None:
        return UcmConfig()
    return resolve_value(parse_json(text) if text.lstrip().startswith("{") else text)


def _choice(name: str, choices: Sequence[str], choose: Callable[[], str]) -> Check:
    """A row for an environment variable with a few values."""
    expected = ", ".join(choices)
    try:
        return Check(CONFIGURATION, name, "info", choose(), expected)
    except ValueError as error:
        return Check(CONFIGURATION, name, "fail", str(error), expected, "correct or unset it")


def configuration_checks(text: str | None) -> Iterator[Check]:
    yield _choice(envs.DEVICE, envs.DEVICE_CHOICES, envs.device_choice)
    yield _choice(envs.KERNELS, envs.KERNEL_CHOICES, envs.kernel_choice)
    try:
        config = resolve_text(text)
    except UcmConfigError as error:
        for problem in error.problems:
            yield Check(
                CONFIGURATION, problem.key, "fail", problem.found, problem.expected, f"correct it{error.source}"
            )
        return
    changed = ", ".join(_changed(config))
    yield Check(CONFIGURATION, "ucm", "ok", changed or "all defaults, which `gaudi-ucm config` lists")


def _changed(config: UcmConfig) -> Iterator[str]:
    """`attention.causal_slice=1024`, one for each value that is not the default."""
    defaults = dict(_flat(UcmConfig().to_dict()))
    for key, value in _flat(config.to_dict()):
        if key not in defaults or defaults[key] != value:
            yield f"{key}={json.dumps(value)}"


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


FILES = "files"


def place_checks(config: UcmConfig, device: str | None) -> Iterator[Check]:
    """The section's rows, for a server on `device` that is started without --enforce-eager; none without options."""
    if config.phase_log is not None:
        yield _phase_log(config.phase_log)
    if config.graphs.recipe_cache is not None and device is not None:
        yield _recipe_cache(config, config.graphs.recipe_cache, device)


def _phase_log(path: Path) -> Check:
    name, why_not = "ucm.phase_log", why_not_writable(path)
    if why_not:
        expected = "a file name in a folder that exists and is writable"
        return Check(FILES, name, "fail", f"{path}: {why_not}", expected, "make the folder, or give another path")
    return Check(FILES, name, "ok", str(path))


def _recipe_cache(config: UcmConfig, folder: Path, device: str) -> Check:
    name = "ucm.graphs.recipe_cache"
    try:
        kind = graph_kind(config, device, envs.lazy_mode(), enforce_eager=False)
        check_recipe_cache(folder, device, kind)
    except RecipeCacheError as error:
        return Check(FILES, name, "fail", str(error))
    except ValueError:
        return Check(FILES, name, "info", f"{folder}, with a mode that the section on static shapes names")
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        found = f"{name}: cannot use {folder}: {there} is no folder that this user may write"
        return Check(FILES, name, "fail", found, "a folder, or a path where one can be made")
    return Check(FILES, name, "ok", str(folder))


SHAPES = "static shapes"
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
        yield Check(SHAPES, "ucm.graphs.mode", "info", f"{config.graphs.mode!r}; no device was chosen")
    else:
        yield _kind(config, device)
    yield _strategy(config.graphs)
    choosing = block_options(config)
    tiles = choosing is not None and choosing.prompt_ratio is not None
    if (tiles or config.memory_mode.enabled) and _runs_static(config, device):
        yield _remainders(config.graphs, tiles)
    if config.graphs.buckets is not None:
        yield _buckets(config.graphs.buckets)
    if config.graphs.trace is not None:
        yield _trace(config.graphs.trace)


def _kind(config: UcmConfig, device: str) -> Check:
    name = "ucm.graphs.mode"
    try:
        kind = graph_kind(config, device, envs.lazy_mode(), enforce_eager=False)
    except ValueError as error:
        return Check(SHAPES, name, "fail", str(error), advice="correct it")
    return Check(SHAPES, name, "ok", f"{config.graphs.mode!r} on {device}: {kind} ({KINDS[kind]})")


def _runs_static(config: UcmConfig, device: str | None) -> bool:
    try:
        return device is not None and graph_kind(config, device, envs.lazy_mode(), enforce_eager=False) != "off"
    except ValueError:
        return False  # the row of the mode reports it


def _remainders(graphs: GraphsConfig, tiles: bool) -> Check:
    """Returns the row of the graphs for prompt remainders. Their number depends on --max-model-len; without tiles
    --kv-transfer-config decides whether there are any.
    """
    from_file = graphs.buckets is not None and graphs.strategy in ("auto", "file")
    counted = "in addition to those of the bucket file" if from_file else "a part of ucm.graphs.max_graphs"
    when = "for chunks of prompts that choose (prompt_ratio)" if tiles else "if UcmConnector loads prompts in part"
    found = f"up to {most_remainders(tiles)} {when}: warm before serving starts, {counted}"
    return Check(SHAPES, "graphs for prompt remainders", "info", found)


def _strategy(graphs: GraphsConfig) -> Check:
    name = "ucm.graphs.strategy"
    try:
        strategy = strategy_name(graphs)
    except ValueError as error:
        return Check(SHAPES, name, "fail", str(error), advice="give the file, or another strategy")
    options = "".join(f" {key}={value}" for key, value in graphs.strategy_options.model_dump().items())
    found = f"{graphs.strategy!r}: {strategy}{options}, at most {graphs.max_graphs} graphs"
    return Check(SHAPES, name, "ok", found)


def _buckets(path: Path) -> Check:
    name = "ucm.graphs.buckets"
    try:
        limits, forward, logits = read_bucket_file(path)
    except BucketFileError as error:
        return Check(SHAPES, name, "fail", str(error), advice="write one with `gaudi-ucm tune LOG -o FILE`")
    found = (
        f"{path}: {len(forward)} forward and {counted(len(logits), 'logits graph')}, for --max-num-batched-tokens "
        f"{limits.max_num_batched_tokens}, --max-num-seqs {limits.max_num_seqs}, --max-model-len "
        f"{limits.max_model_len}, --block-size {limits.block_size}"
    )
    return Check(SHAPES, name, "ok", found)


def _trace(path: Path) -> Check:
    name = "ucm.graphs.trace"
    try:
        header, steps = read_phase_log(path)
    except PhaseLogError as error:
        return Check(SHAPES, name, "fail", str(error), advice="give a phase log (ucm.phase_log, `gaudi-ucm trace`)")
    if not steps:
        return Check(SHAPES, name, "fail", f"{path}: a log without steps", advice="give one of some traffic")
    return Check(
        SHAPES, name, "ok", f"{path}: {counted(len(steps), 'step')} of {header.get('model', 'an unnamed model')}"
    )


SPARSE = "sparse"
METHOD = "ucm.ucm_sparse_method"
BLOCK_SIZE = 128
"""The default of `--block-size`, which the doctor does not know."""


def sparse_checks(config: UcmConfig) -> Iterator[Check]:
    name = config.ucm_sparse_method
    if name is None:
        yield Check(SPARSE, METHOD, "info", "null: every request is dense", f"a method to be sparse: {_names()}")
    else:
        method = UcmSparseFactory.create_sparse_method(name, UcmSparseRole.SCHEDULER, config)
        options = method.options.model_dump(mode="json")
        yield Check(SPARSE, METHOD, "ok", f"{name} is active for every request without extra_args.ucm_sparse = false")
        yield Check(SPARSE, name, "ok", ", ".join(f"{key}={json.dumps(value)}" for key, value in options.items()))
        if isinstance(method.selecting_method.options, BlockOptions):
            yield _contexts(method.selecting_method.options)
    yield from _memory_mode(config.memory_mode)
    yield from _unused(config)


def _memory_mode(options: MemoryModeOptions) -> Iterator[Check]:
    key, off = "ucm.memory_mode", MemoryModeOptions()
    if not options.enabled:
        if options != off:
            advice = f"set {key}.enabled to true, or remove the section"
            yield Check(
                SPARSE, key, "warn", "options of memory mode, which is off", "options of active features", advice
            )
        return
    kind = "host memory" if options.store is None else f"a store of kind {options.store.kind}"
    found = f"on: {options.on_device_ratio:.0%} of a context's full blocks stay on the device; copies in {kind}"
    yield Check(SPARSE, key, "ok", found)
    if options.store is not None:
        yield from checks_of_store(options.store)


def _contexts(options: BlockOptions) -> Check:
    shortest = shortest_sparse_context(BLOCK_SIZE, options)
    budget = block_budget(shortest, BLOCK_SIZE, options)
    found = f"from {shortest:,} tokens (with --block-size {BLOCK_SIZE})"
    if budget is not None:
        live = shortest // BLOCK_SIZE - budget.num_candidates
        always = f"{counted(live, 'block')} {'is' if live == 1 else 'are'} always attended"
        found += f"; there {always} and {budget.num_selected} of {budget.num_candidates} chosen"
    return Check(SPARSE, "contexts that are sparse", "ok", found)


def _unused(config: UcmConfig) -> Iterator[Check]:
    """Sections that were filled in for methods that are not on."""
    name = config.ucm_sparse_method
    used = config.ucm_sparse_config.used_by(name)
    for section, options in config.ucm_sparse_config:
        if section not in used and options != options_class(section)():
            found = f"options of a method that is not on (the method is {json.dumps(name)})"
            advice = f"set {METHOD} to {section}, or remove the section"
            yield Check(SPARSE, f"ucm.ucm_sparse_config.{section}", "warn", found, "options of the method", advice)


def _names() -> str:
    return ", ".join(SPARSE_METHODS.names())
