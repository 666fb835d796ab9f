"""Doctor's section on extensions: the content of each registry, and additions by packages and plugins."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel

from vllm_gaudi_ucm.batch.row_input import ROW_INPUTS
from vllm_gaudi_ucm.cli.doctor.check import Check
from vllm_gaudi_ucm.execution.cache_group import CACHE_GROUPS
from vllm_gaudi_ucm.graphs.strategies import STRATEGIES
from vllm_gaudi_ucm.ops.block_selection.implementation import BLOCK_SELECTION
from vllm_gaudi_ucm.ops.kv_cache.implementation import KV_CACHE
from vllm_gaudi_ucm.ops.moe.implementation import MOE
from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION
from vllm_gaudi_ucm.registry import Registry, RegistryEntry, RegistryError
from vllm_gaudi_ucm.sparse.registry import SPARSE_METHODS
from vllm_gaudi_ucm.store.factory import STORES

EXTENSIONS = "extensions"
REGISTRIES: Sequence[Registry[Any]] = (
    SPARSE_METHODS,
    STRATEGIES,
    STORES,
    ROW_INPUTS,
    CACHE_GROUPS,
    ATTENTION,
    KV_CACHE,
    BLOCK_SELECTION,
    MOE,
)


@runtime_checkable
class HasOptions(Protocol):
    """A thing with a model of its options, as sparse methods and stores have."""

    Options: type[BaseModel]


def extension_checks() -> Iterator[Check]:
    for registry in REGISTRIES:
        yield from registry_rows(registry)


def registry_rows(registry: Registry[Any]) -> Iterator[Check]:
    """A row with the names that are built in, and one for each thing from outside, which is imported to see it."""
    entries = list(registry.entries())
    built_in = ", ".join(entry.name for entry in entries if entry.built_in)
    yield Check(EXTENSIONS, registry.kind, "ok", f"built in: {built_in or 'none'}")
    for entry in entries:
        if not entry.built_in:
            yield _from_outside(registry, entry)


def _from_outside(registry: Registry[Any], entry: RegistryEntry) -> Check:
    """Returns a row for an extension; a warning if it is unusable: a configuration with it fails on its own."""
    name, found = f"{registry.kind} {entry.name}", f"{entry.place} ({entry.origin})"
    if entry.hidden:
        found += f", but {entry.name!r} stands for {registry.place(entry.name)}"
        return Check(EXTENSIONS, name, "warn", found, "a name that is free", "choose another name, or uninstall one")
    try:
        options = option_names(registry.get(entry.name))
    except RegistryError as error:
        advice = "repair or uninstall the package that adds it"
        return Check(EXTENSIONS, name, "warn", f"{error} ({entry.origin})", "something that can be imported", advice)
    return Check(EXTENSIONS, name, "ok", f"{found}; options: {', '.join(options) or 'none'}")


def option_names(thing: object) -> list[str]:
    """Keys of a thing's options: of its model `Options`, or the fields of a dataclass."""
    if isinstance(thing, HasOptions):
        return list(thing.Options.model_fields)
    if isinstance(thing, type) and dataclasses.is_dataclass(thing):
        return [field.name for field in dataclasses.fields(thing)]
    return []
