"""Doctor's section on sparse methods: whether one is active, with which options, and from which context on."""

from __future__ import annotations

import json
from collections.abc import Iterator

from vllm_gaudi_ucm.cli.doctor.check import Check
from vllm_gaudi_ucm.cli.doctor.store import checks_of_store
from vllm_gaudi_ucm.config.ucm_config import UcmConfig
from vllm_gaudi_ucm.kv_offload.options import MemoryModeOptions
from vllm_gaudi_ucm.options.counted import counted
from vllm_gaudi_ucm.sparse.base import UcmSparseRole
from vllm_gaudi_ucm.sparse.budget import block_budget, shortest_sparse_context
from vllm_gaudi_ucm.sparse.factory import UcmSparseFactory
from vllm_gaudi_ucm.sparse.options import BlockOptions
from vllm_gaudi_ucm.sparse.sections import SparseConfig

SECTION = "sparse"
METHOD = "ucm.ucm_sparse_method"
BLOCK_SIZE = 128
"""The default of `--block-size`, which the doctor does not know."""


def sparse_checks(config: UcmConfig) -> Iterator[Check]:
    """The section's rows."""
    name = config.ucm_sparse_method
    if name is None:
        yield Check(SECTION, METHOD, "info", "null: every request is dense", f"a method to be sparse: {_names()}")
    else:
        method = UcmSparseFactory.create_sparse_method(name, UcmSparseRole.SCHEDULER, config)
        options = method.options.model_dump(mode="json")
        yield Check(SECTION, METHOD, "ok", f"{name} is active for every request without extra_args.ucm_sparse = false")
        yield Check(SECTION, name, "ok", ", ".join(f"{key}={json.dumps(value)}" for key, value in options.items()))
        if isinstance(method.selecting_method.options, BlockOptions):
            yield _contexts(method.selecting_method.options)
    yield from _memory_mode(config.memory_mode)
    yield from _unused(config)


def _memory_mode(options: MemoryModeOptions) -> Iterator[Check]:
    key, off = "ucm.memory_mode", MemoryModeOptions()
    if not options.enabled:
        if options != off:
            advice = f"set {key}.enabled to true, or remove the section"
            yield Check(SECTION, key, "warn", "options of memory mode, which is off", "options of what is on", advice)
        return
    kind = "host memory" if options.store is None else f"a store of kind {options.store.kind}"
    found = f"on: {options.resident_ratio:.0%} of a context's full blocks stay on the device; copies in {kind}"
    yield Check(SECTION, key, "ok", found)
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
    return Check(SECTION, "contexts that are sparse", "ok", found)


def _unused(config: UcmConfig) -> Iterator[Check]:
    """Sections that were filled in for methods that are not on."""
    name = config.ucm_sparse_method
    used = {name, config.ucm_sparse_config.KVStar.base_method} if name == "KVStar" else {name}
    defaults = SparseConfig()
    for section, options in config.ucm_sparse_config:
        if section not in used and options != getattr(defaults, section, None):
            found = f"options of a method that is not on (the method is {json.dumps(name)})"
            advice = f"set {METHOD} to {section}, or remove the section"
            yield Check(SECTION, f"ucm.ucm_sparse_config.{section}", "warn", found, "options of the method", advice)


def _names() -> str:
    return ", ".join(UcmSparseFactory.known_methods())
