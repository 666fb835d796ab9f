"""The configuration under `ucm` in vLLM's `--additional-config`, typed, checked and documented in one place."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from vllm_gaudi_ucm.config.exclusions import TOKEN_SLOTS, excluded_options
from vllm_gaudi_ucm.config.graphs_config import GraphsConfig, strategy_section
from vllm_gaudi_ucm.config.scheduler_config import SchedulerConfig
from vllm_gaudi_ucm.config.sections import (
    AttentionConfig,
    CpuConfig,
    DistributedConfig,
    KvCacheConfig,
    PreemptionConfig,
)
from vllm_gaudi_ucm.graphs.strategies import STRATEGIES
from vllm_gaudi_ucm.memory_mode.options import MemoryModeOptions
from vllm_gaudi_ucm.options.errors import (
    NOTE,
    Problem,
    UcmConfigError,
    expected,
    problems,
    section,
    shown,
    unknown_key,
)
from vllm_gaudi_ucm.options.files import read_config_file
from vllm_gaudi_ucm.options.section import Section
from vllm_gaudi_ucm.options.values import BYTES_NOTE, parse_bytes
from vllm_gaudi_ucm.prefetch.options import EngineOptions, PrefetchOptions
from vllm_gaudi_ucm.sparse.base import UcmSparseRole
from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.sparse.factory import UcmSparseFactory
from vllm_gaudi_ucm.sparse.methods.gsa import GsaOptions
from vllm_gaudi_ucm.sparse.options import BlockOptions
from vllm_gaudi_ucm.sparse.registry import SPARSE_METHODS, options_class
from vllm_gaudi_ucm.sparse.sections import SparseConfig, resolve_sparse_config, resolve_sparse_method


def block_options(config: UcmConfig) -> BlockOptions | None:
    """Returns the options of `ucm_sparse_method`, or of its base method; None if no method selects blocks."""
    if config.ucm_sparse_method is None:
        return None
    method = UcmSparseFactory.create_sparse_method(config.ucm_sparse_method, UcmSparseRole.WORKER, config)
    selecting = method.selecting_method
    return selecting.block_options if isinstance(selecting, BlockSparse) else None


def check_memory_mode(
    memory_mode: MemoryModeOptions, method: str | None, sparse_config: SparseConfig, key: str
) -> None:
    """Raises `UcmConfigError` for memory mode without a method that chooses blocks, with less room than it needs, or
    with prompts that choose.
    """
    if method is None:
        raise UcmConfigError([Problem(f"{key}.enabled", "true", "false without ucm.ucm_sparse_method")])
    options = sparse_config.options(method).selecting
    if not isinstance(options, BlockOptions):
        wanted = f"false with {method!r}, which does not choose blocks by their scores"
        raise UcmConfigError([Problem(f"{key}.enabled", "true", wanted)])
    if memory_mode.on_device_ratio < options.sparse_ratio:
        wanted = f"at least the method's sparse_ratio {options.sparse_ratio}"
        raise UcmConfigError([Problem(f"{key}.on_device_ratio", str(memory_mode.on_device_ratio), wanted)])
    if options.prompt_ratio is not None:
        wanted = f"false with {method}'s prompt_ratio, because blocks that a prompt leaves out would leave the device"
        raise UcmConfigError([Problem(f"{key}.enabled", "true", wanted)])


ROOT = "ucm"


def check_policies(config: UcmConfig) -> None:
    """Raises `UcmConfigError` for options that exclude each other, or need slots for tokens and lack them."""
    found = list(excluded_options(config))
    slots = config.kv_cache.max_total_token_num
    if slots is not None and not TOKEN_SLOTS.is_on(config):
        wanted = f"null without {TOKEN_SLOTS.words}; --num-gpu-blocks-override counts blocks"
        found.append(Problem(f"{ROOT}.kv_cache.max_total_token_num", str(slots), wanted))
    if found:
        raise UcmConfigError(found)


class UcmConfig(Section):
    """The whole configuration. Immutable, hashable, and equal to another exactly if all values are equal."""

    phase_log: Path | None = Field(
        default=None,
        strict=False,
        description="JSON-lines file that gets one line for every step: its phase tuple, sizes and milliseconds. With "
        "data parallelism engine 0 writes it, engine 1 `NAME.1.jsonl`, and so on.",
    )
    phase_log_size: Annotated[int, Field(ge=1 << 16), BeforeValidator(parse_bytes)] = Field(
        default=256 << 20,
        description="Bytes of a phase log, about a million steps in 256 MiB. A file that is as long is kept as "
        "`NAME.previous`, and the next one begins.",
        json_schema_extra={NOTE: BYTES_NOTE},
    )
    phase_log_generations: int = Field(
        default=5,
        ge=1,
        le=99,
        description="Phase logs that are kept in addition to the newest one, of this run and of those before it: "
        "`NAME.previous`, `NAME.previous.2`, and so on. The oldest goes first.",
    )
    attention: AttentionConfig = Field(default=AttentionConfig(), description="Unified Attention.")
    graphs: GraphsConfig = Field(default=GraphsConfig(), description="Static shapes and captured graphs.")
    cpu: CpuConfig = Field(default=CpuConfig(), description="The CPU as the reference device.")
    quantised_experts: Literal["auto", "codes", "plain"] = Field(
        default="auto",
        description="Experts that a checkpoint has in 4 or 8 bits. `codes` keeps them so: a half to an eighth of the "
        "memory, and each expert is written out whenever it is used, but on CUDA, whose kernels read codes, and in "
        "compile mode on Gaudi, which takes 8-bit floats with a scale per matrix or output. `plain` writes them out "
        "when the model is loaded. `auto` is `codes` on CUDA and `plain` elsewhere.",
    )
    distributed: DistributedConfig = Field(default=DistributedConfig(), description="Several workers of one engine.")
    scheduler: SchedulerConfig = Field(default=SchedulerConfig(), description="Which waiting requests begin.")
    kv_cache: KvCacheConfig = Field(default=KvCacheConfig(), description="Which blocks of the KV cache requests get.")
    preemption: PreemptionConfig = Field(
        default=PreemptionConfig(), description="What becomes of the KV of requests that are preempted."
    )
    ucm_sparse_method: str | None = Field(
        default=None,
        description="Sparse method: `GSA`, `ESA`, `KVStar`, or a registered one. Without it every request is dense.",
    )
    ucm_sparse_config: SparseConfig = Field(default=SparseConfig(), description="Options of the sparse methods.")
    memory_mode: MemoryModeOptions = Field(
        default=MemoryModeOptions(), description="Blocks that leave the device while their request decodes."
    )
    allow_untested_vllm: bool = Field(
        default=False,
        description="Starts with a vLLM outside the tested versions, and warns. What vLLM has changed may end the "
        "engine, or give wrong tokens.",
    )

    @field_validator("ucm_sparse_method", mode="after")
    @classmethod
    def _known_method(cls, value: str | None) -> str | None:
        return resolve_sparse_method(value, f"{ROOT}.ucm_sparse_method")

    @field_validator("ucm_sparse_config", mode="before")
    @classmethod
    def _sections_of_methods(cls, value: Any) -> SparseConfig:
        return resolve_sparse_config(value, f"{ROOT}.ucm_sparse_config")

    @model_validator(mode="after")
    def _sections_go_together(self) -> Self:
        if self.ucm_sparse_method is not None:
            self.ucm_sparse_config.options(self.ucm_sparse_method, f"{ROOT}.ucm_sparse_config")
        if self.memory_mode.enabled:
            check_memory_mode(self.memory_mode, self.ucm_sparse_method, self.ucm_sparse_config, f"{ROOT}.memory_mode")
        check_policies(self)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Returns the values as JSON types; resolving them gives an equal object, but for passwords in URLs."""
        return self.model_dump(mode="json")


class OptionRow(NamedTuple):
    """One row of the configuration table."""

    key: str
    type: str
    default: str
    description: str


def resolve_config(additional_config: object) -> UcmConfig:
    """Returns the configuration in vLLM's `additional_config`, whose key `ucm` is a mapping or the path of a file with
    one.

    Raises `UcmConfigError`, which lists every problem.
    """
    if additional_config is None:
        return UcmConfig()
    if not isinstance(additional_config, Mapping):
        raise UcmConfigError(
            [Problem("--additional-config", shown(additional_config), "a JSON object with the key ucm")]
        )
    unknown = [unknown_key(str(key), "", [ROOT]) for key in additional_config if key != ROOT]
    if unknown:
        raise UcmConfigError(unknown)
    return resolve_value(additional_config[ROOT]) if ROOT in additional_config else UcmConfig()


def resolve_value(value: Any) -> UcmConfig:
    """Returns the configuration in the value of the key `ucm`: a mapping, or the path of a YAML or JSON file."""
    source = ""
    if isinstance(value, str | Path):
        source = f" (file {value})"
        value = read_config_file(Path(value))
    if value is None:
        return UcmConfig()
    if not isinstance(value, Mapping):
        raise UcmConfigError([Problem(ROOT, shown(value), "a mapping, or the path of a YAML or JSON file")], source)
    try:
        return UcmConfig.model_validate(dict(value))
    except ValidationError as error:
        raise UcmConfigError(list(problems(error, UcmConfig, ROOT)), source) from None


def describe(config: type[UcmConfig] = UcmConfig) -> list[OptionRow]:
    """Returns every key with its type, default and description, as declared; registered methods come last."""
    return _rows([*_leaves(config, ROOT), *_registered()])


def describe_section(model: type[BaseModel], key: str) -> list[OptionRow]:
    """Returns the same for the options under `key`."""
    return _rows(_leaves(model, key))


def sections(rows: Iterable[OptionRow]) -> dict[str, list[OptionRow]]:
    """Groups rows by the key of their section."""
    found: dict[str, list[OptionRow]] = {}
    for row in rows:
        found.setdefault(row.key.rpartition(".")[0], []).append(row)
    return found


def section_description(key: str) -> str:
    """Returns the description of a section; "" for the root, and for sections that others have registered."""
    model: type[BaseModel] = UcmConfig
    about = ""
    for name in key.split(".")[1:]:
        field = model.model_fields.get(name)
        inner = None if field is None else section(field)
        if field is None or inner is None:
            return ""
        model, about = inner, field.description or ""
    return about


def _rows(leaves: Iterable[tuple[str, FieldInfo]]) -> list[OptionRow]:
    return [OptionRow(key, expected(field), _default(field), field.description or "") for key, field in leaves]


def markdown_table(rows: Sequence[OptionRow] | None = None) -> str:
    """Returns rows as Markdown, in the form of the reference; without rows, the whole configuration."""
    lines = ["| key | type | default | what it does |", "|---|---|---|---|"]
    for row in describe() if rows is None else rows:
        lines.append(f"| `{row.key}` | {row.type} | `{row.default}` | {row.description} |")
    return "\n".join(lines)


def _registered() -> Iterator[tuple[str, FieldInfo]]:
    """Yields the options of sparse methods that others have registered."""
    for name in SPARSE_METHODS.names():
        if name not in SparseConfig.model_fields:
            yield from _leaves(options_class(name), f"{ROOT}.ucm_sparse_config.{name}")


def _leaves(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        inner = section(field)
        if inner is None or inner is Section:
            yield f"{prefix}.{name}", field
        else:
            yield from _leaves(inner, f"{prefix}.{name}")
        if inner is Section:
            for strategy in STRATEGIES.names():
                yield from _leaves(strategy_section(strategy), f"{prefix}.{name}")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "none: required"
    default = field.get_default(call_default_factory=False)
    if isinstance(default, Section):
        return "{}"
    if isinstance(default, tuple):
        return str([*default])
    # in the notation of YAML and JSON
    return json.dumps(default) if default is None or isinstance(default, bool) else str(default)


def connector_prefetch(options: PrefetchOptions, config: UcmConfig) -> PrefetchOptions:
    """Returns the connector's options, completed by those of GSA if that method selects; given options are kept."""
    section = _gsa_section(config)
    if section is None:
        return options
    given = section.model_dump(include=set(EngineOptions.model_fields) - options.model_fields_set)
    return options.model_copy(update=given)


def memory_mode_prefetch(config: UcmConfig) -> PrefetchOptions:
    """Returns the options of GSA if that method selects, else the defaults; host memory only for moving blocks."""
    options = connector_prefetch(PrefetchOptions(), config)
    useful = 2 * config.memory_mode.moves_per_step + blocks_ahead(config)
    return options.model_copy(update={"prefetch_cache_size": min(options.prefetch_cache_size, useful)})


def blocks_ahead(config: UcmConfig) -> int:
    """Returns how many blocks that wait to come back may be brought to host memory meanwhile.

    `prefetch_ahead` counts them in steps' worth of moves. Copies in host memory need no prefetch.
    """
    if config.memory_mode.is_in_host_memory:
        return 0
    return connector_prefetch(PrefetchOptions(), config).prefetch_ahead * config.memory_mode.moves_per_step


def idle_options(config: UcmConfig) -> list[str]:
    """Returns the prefetch options in GSA's section that differ from the defaults and have no effect without our
    connector.

    Memory mode uses them: only the threads if copies are in host memory, otherwise all of them.
    """
    section, memory_mode = _gsa_section(config), config.memory_mode
    if section is None or (memory_mode.enabled and not memory_mode.is_in_host_memory):
        return []
    used = {"prefetch_workers"} if memory_mode.enabled else set()
    shared = section.model_dump(include=set(EngineOptions.model_fields) - used)
    return [name for name, value in shared.items() if value != EngineOptions.model_fields[name].default]


def _gsa_section(config: UcmConfig) -> GsaOptions | None:
    """Returns the options of GSA, also if it is KVStar's base method; None if it does not select."""
    if config.ucm_sparse_method is None:
        return None
    selecting = config.ucm_sparse_config.options(config.ucm_sparse_method).selecting
    return selecting if isinstance(selecting, GsaOptions) else None
