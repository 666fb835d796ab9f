"""Stores by name: a new one is a file with a `ConfiguredStore` and its options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError, shown, unknown_key
from vllm_gaudi_ucm.options.files import parse_json, read_config_file
from vllm_gaudi_ucm.options.values import may_hold_password, shown_url
from vllm_gaudi_ucm.registry import Registry, RegistryError
from vllm_gaudi_ucm.store.base import ConfiguredStore, KvStore, StoreOptions

if TYPE_CHECKING:
    from vllm_gaudi_ucm.store.medium import Medium

STORES: Registry[type[ConfiguredStore]] = Registry(
    "store",
    "vllm_gaudi_ucm.stores",
    memory="vllm_gaudi_ucm.store.memory:SharedMemoryStore",
    file="vllm_gaudi_ucm.store.file:FileStore",
    redis="vllm_gaudi_ucm.store.redis:RedisStore",
    tiered="vllm_gaudi_ucm.store.tiered:TieredStore",
)


def store_class(kind: str) -> type[ConfiguredStore]:
    """Returns the class behind a name, imported now. Raises RegistryError."""
    found = STORES.get(kind)
    if not (isinstance(found, type) and issubclass(found, ConfiguredStore)):
        place = STORES.place(kind)
        raise RegistryError(f"store {kind!r}: {place}: found {found!r}, expected a subclass of ConfiguredStore")
    if not (isinstance(found.Options, type) and issubclass(found.Options, StoreOptions)):
        raise RegistryError(f"store {kind!r}: Options is {found.Options!r}, expected a subclass of StoreOptions")
    return found


def lasting_kinds() -> list[str]:
    """Returns the names of stores whose blocks outlast the process, or are visible to others."""
    return [kind for kind in STORES.names() if not store_class(kind).Options.ends_with_process]


def resolve_store_options(value: Any, key: str = "store") -> StoreOptions:
    """Returns the options in a mapping with the key `kind`, or in the YAML or JSON file at a path, or options as they
    are.

    Raises `UcmConfigError` that lists every problem by its full name under `key`.
    """
    if isinstance(value, StoreOptions):
        return value
    if isinstance(value, str) and may_hold_password(value) and not os.path.isfile(value):
        expected = "a mapping such as {kind: redis, url: ...}, or the path of a file with one"
        raise UcmConfigError([Problem(key, shown_url(value), expected)])
    if isinstance(value, str | Path):
        value = read_config_file(Path(value), key)
    kinds = " or ".join(f'"{kind}"' for kind in STORES.names())
    if not isinstance(value, Mapping):
        raise UcmConfigError([Problem(key, shown(value), f"a mapping with the key kind ({kinds}), or a file's path")])
    if "kind" not in value:
        raise UcmConfigError([Problem(f"{key}.kind", "no value", kinds)])
    kind = value["kind"]
    if not isinstance(kind, str) or kind not in STORES:
        nearest = unknown_key(str(kind), "", STORES.names()).expected.replace("valid key", "kind of store")
        raise UcmConfigError([Problem(f"{key}.kind", repr(kind), nearest)])
    try:
        options = store_class(kind).Options
    except RegistryError as error:
        raise UcmConfigError([Problem(f"{key}.kind", repr(kind), f"a store that can be loaded ({error})")]) from error
    return options.resolve(value, key)


def open_store(options: StoreOptions, block_bytes: int, evicts: bool = True) -> KvStore:
    """Opens a store of blocks of `block_bytes` bytes; the caller closes it.

    Raises ValueError (`UcmConfigError`) for a place that cannot be used, or a capacity below one block; a server that
    does not answer is not an error.

    evicts: whether blocks leave to make room for new ones. If not, a store in this process is not shared; a server has
        a policy of its own.
    """
    return store_class(options.kind).open(options, block_bytes, evicts)


def resolve_store_text(text: str) -> StoreOptions:
    """The options in JSON text or in the file at a path. Raises `UcmConfigError`."""
    return resolve_store_options(parse_json(text, key="store") if text.lstrip().startswith("{") else text)


def open_medium(options: StoreOptions, create: bool = True, evicts: bool = True) -> Medium:
    """Opens the medium under a store, for all block sizes and without protection; without memory in front of it.

    Raises ValueError for a store without a medium, and (`UcmConfigError`) for a folder that cannot be used.

    create: whether a missing folder is made. evicts: as for `open_store`.
    """
    from vllm_gaudi_ucm.store.guarded import MediumStore

    options = options.lasting
    store = store_class(options.kind)
    if not issubclass(store, MediumStore):
        others = [kind for kind in STORES.names() if issubclass(store_class(kind), MediumStore)]
        where = "a store of this kind exists only inside its engine"
        raise ValueError(f"store.kind: found {options.kind!r}, expected {' or '.join(others)}: {where}")
    return store.open_medium(options, create, evicts)
