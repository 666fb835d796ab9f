"""Completes `--kv-transfer-config` where it leaves something to the platform."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, SerializeAsAny, field_validator

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.options.errors import WORDS, Problem, UcmConfigError, UnsupportedFeatureError
from vllm_gaudi_ucm.options.section import Section
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.store.base import StoreOptions
from vllm_gaudi_ucm.store.factory import resolve_store_options

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

EXTRA_CONFIG = "kv_connector_extra_config"


class ConnectorOptions(Section):
    """Strict, immutable; made from a mapping by `ConnectorOptions.resolve(mapping, key)`."""

    store: SerializeAsAny[StoreOptions] = Field(
        description="Where blocks are kept, and its options: see docs/guides/stores.md.",
        json_schema_extra={WORDS: "a store (docs/guides/stores.md)"},
    )
    prefetch: PrefetchOptions = Field(
        default=PrefetchOptions(), description="The engine that loads blocks: see docs/guides/kv-transfer.md."
    )
    load_deadline: Annotated[float, Field(gt=0, le=3600)] = Field(
        default=10.0,
        description="Seconds that a request waits for its blocks; those that are late are computed instead.",
    )
    lookup_deadline: Annotated[float, Field(gt=0, le=60)] = Field(
        default=1.0, description="Seconds that a request waits for the store to say what it holds; then it is a miss."
    )
    load_failure: Literal["recompute", "fail"] = Field(
        default="recompute",
        description="What becomes of a request with blocks that could not be loaded. Takes the place of vLLM's "
        "kv_load_failure_policy, whose default would fail it.",
    )
    min_hit_blocks: Annotated[int, Field(ge=1)] = Field(
        default=1, description="Fewest blocks that are worth loading; with fewer hits the prompt is computed."
    )
    partial_loads: bool = Field(
        default=True,
        description="Under memory mode a prompt remainder of at most one block of tokens gets only the blocks that its "
        "first step is likely to choose; false loads all. Needs `load_failure` recompute.",
    )
    save: bool = Field(default=True, description="Keep new full blocks; false only reads what others have stored.")
    save_queue: Annotated[int, Field(ge=1, le=65536)] = Field(
        default=64,
        description="Most blocks in host memory on their way to the store; what comes while it is full is not stored.",
    )
    save_patience: Annotated[float, Field(ge=0, le=60)] | Literal["auto"] = Field(
        default="auto",
        description="Seconds that a block may wait for the engine to be idle before it is stored while steps run; 0: "
        "none waits. `auto`: 1 on a CPU, where it takes time from steps, else 0.",
    )
    save_workers: Annotated[int, Field(ge=1, le=64)] = Field(default=2, description="Threads that store blocks.")

    def patience(self, device_kind: str) -> float:
        """Returns `save_patience` in seconds on a device of this kind."""
        if self.save_patience == "auto":
            return 1.0 if device_kind == "cpu" else 0.0
        return self.save_patience

    @property
    def loads_partly(self) -> bool:
        """True if loads may leave blocks in the store, if there is memory mode."""
        return self.partial_loads and self.load_failure == "recompute"

    @property
    def asks_for_partial_loads(self) -> bool:
        """True if the option was given, and not only its default."""
        return self.loads_partly and "partial_loads" in self.model_fields_set

    @field_validator("store", mode="before")
    @classmethod
    def _resolve_store(cls, value: Any) -> Any:
        return resolve_store_options(value, f"{EXTRA_CONFIG}.store")


logger = plugin_logger(__name__)

OURS, OFFLOADING, NIXL, LMCACHE = "UcmConnector", "OffloadingConnector", "NixlConnector", "LMCacheConnectorV1"
BETWEEN_STEPS = (OURS, NIXL, LMCACHE)
"""Connectors that have no work inside of a step, between layers."""
_MULTI = "MultiConnector"
_MODULE, _ROOM = "kv_connector_module_path", "vllm_gaudi_ucm.connector"
_OFFLOADING_MODULE = f"{_ROOM}.offloading_connector"
_OUR_FORMS = {
    OFFLOADING: _OFFLOADING_MODULE,
    NIXL: f"{_ROOM}.nixl_connector",
    LMCACHE: f"{_ROOM}.lmcache_connector",
}
_OFFLOADING_SPEC = {"spec_name": "UcmOffloadingSpec", "spec_module_path": _OFFLOADING_MODULE}
_PACKAGES = {
    NIXL: ("nixl", 'pip install "vllm-gaudi-ucm[nixl]"'),
    # what it declares would replace packages of vLLM, and bring CUDA's
    LMCACHE: ("lmcache", 'pip install --no-deps "lmcache>=0.5.6" aiofile caio'),
}
"""Connectors that need a package: its name in Python, and how to install it."""
_TAKES_PAIRS = "takes_kv_pairs"


class ConfiguredConnector(NamedTuple):
    """A connector in the configuration. name: its name in vLLM. module: its module; None: in vLLM. extra: its options,
        which may be changed in place.

    key: their key. set_module: makes vLLM take the connector of this name from another module.
    """

    name: str | None
    module: str | None
    extra: dict[str, Any]
    key: str
    set_module: Callable[[str], None]

    @property
    def needs_one_tensor(self) -> bool:
        """True if it reads a layer's keys and values from one tensor: all connectors of vLLM except those for which we
        have our own form, and each one from outside that does not declare `takes_kv_pairs = True`.
        """
        if self.module is None:
            return self.name not in (None, OURS, *_OUR_FORMS)
        if self.name is None or self.module == _ROOM or self.module in _OUR_FORMS.values():
            return False
        try:
            found = getattr(import_module(self.module), self.name)
        except (ImportError, AttributeError):
            return False  # vLLM will not find it either, and says so
        return getattr(found, _TAKES_PAIRS, False) is not True


def configured_connectors(config: KVTransferConfig | None) -> Iterator[ConfiguredConnector]:
    """Returns the connector, or instead of vLLM's MultiConnector its children, recursively.

    Raises UcmConfigError if children are not connectors.
    """
    if config is not None:
        extra, module = config.kv_connector_extra_config, config.kv_connector_module_path
        outer = ConfiguredConnector(config.kv_connector, module, extra, EXTRA_CONFIG, partial(setattr, config, _MODULE))
        yield from _unfold(outer)


def connector_names(vllm_config: VllmConfig) -> list[str]:
    """Returns the names of an engine's connectors, also the one of `--kv-offloading-size`, which vLLM sets later."""
    names = [one.name for one in configured_connectors(vllm_config.kv_transfer_config) if one.name is not None]
    return names if vllm_config.cache_config.kv_offloading_size is None else [*names, OFFLOADING]


def has_connector(vllm_config: VllmConfig) -> bool:
    """Returns whether an engine has a KV connector, be it the one of `--kv-offloading-size`, which vLLM sets later."""
    return vllm_config.kv_transfer_config is not None or vllm_config.cache_config.kv_offloading_size is not None


def _unfold(one: ConfiguredConnector) -> Iterator[ConfiguredConnector]:
    if one.name != _MULTI:
        yield one
        return
    children, key = one.extra.get("connectors"), f"{one.key}.connectors"
    if not isinstance(children, list) or not children:
        raise UcmConfigError([Problem(key, repr(children), "a list of connectors, each a mapping with kv_connector")])
    for number, child in enumerate(children):
        if not isinstance(child, dict) or not isinstance(child.get("kv_connector"), str):
            raise UcmConfigError([Problem(f"{key}[{number}]", repr(child), "a mapping with kv_connector")])
        extra, place = child.setdefault(EXTRA_CONFIG, {}), f"{key}[{number}].{EXTRA_CONFIG}"
        set_module = partial(child.__setitem__, _MODULE)
        yield from _unfold(ConfiguredConnector(child["kv_connector"], child.get(_MODULE), extra, place, set_module))


def is_ours_among(config: KVTransferConfig | None) -> bool:
    """True if our connector is on, alone or as a child."""
    return any(one.name == OURS for one in configured_connectors(config))


def loads_partly(vllm_config: VllmConfig) -> bool:
    """True if our connector is on and may leave blocks in its store, if there is memory mode."""
    config = vllm_config.kv_transfer_config
    if config is None or config.kv_connector != OURS or not config.is_kv_consumer:
        return False
    return ConnectorOptions.resolve(config.kv_connector_extra_config, EXTRA_CONFIG).loads_partly


def complete_transfer_config(vllm_config: VllmConfig) -> None:
    """Checks the options of our connector, and makes vLLM use our forms of its own connectors.

    Raises UcmConfigError for options that cannot be used, UnsupportedFeatureError for a connector without its package.
    """
    if vllm_config.kv_transfer_config is None and vllm_config.cache_config.kv_offloading_size is not None:
        from vllm.config import KVTransferConfig

        # vLLM names the connector of --kv-offloading-size in this field after the platform has seen the configuration
        vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector_module_path=_OFFLOADING_MODULE, kv_connector_extra_config=dict(_OFFLOADING_SPEC)
        )
    config = vllm_config.kv_transfer_config
    if config is None:
        return
    found = list(configured_connectors(config))
    ours = [one for one in found if one.name == OURS]
    if len(ours) > 1:
        raise UcmConfigError(
            [Problem(f"{EXTRA_CONFIG}.connectors", f"{OURS} {len(ours)} times", "once, with one store")]
        )
    for one in ours:
        policy = ConnectorOptions.resolve(one.extra, one.key).load_failure
        if config.kv_load_failure_policy != policy:
            logger.info("kv_load_failure_policy is %r: it is set by the option load_failure of %s", policy, OURS)
            config.kv_load_failure_policy = policy
    for one in found:
        if one.module is None and one.name in _OUR_FORMS:
            one.set_module(_OUR_FORMS[one.name])
        if one.name == OFFLOADING and "spec_name" not in one.extra:
            one.extra.update(_OFFLOADING_SPEC)
        if one.module is None and one.name in _PACKAGES:
            package, command = _PACKAGES[one.name]
            if find_spec(package) is None:
                what = f"the KV connector {one.name} without the package {package} ({command})"
                raise UnsupportedFeatureError(what, "--kv-transfer-config")
