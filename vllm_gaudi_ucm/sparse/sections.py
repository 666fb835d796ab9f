"""The sections of `ucm_sparse_config`: one per method, each checked by the method's own options."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError, shown, unknown_key
from vllm_gaudi_ucm.options.files import read_config_file
from vllm_gaudi_ucm.sparse.methods.gsa import GsaOptions
from vllm_gaudi_ucm.sparse.methods.kvstar import KVStarOptions
from vllm_gaudi_ucm.sparse.options import BlockOptions, MethodOptions
from vllm_gaudi_ucm.sparse.registry import SPARSE_METHODS, SparseMethodError, options_class


class SparseConfig(BaseModel):
    """Options by method, both ours and those of registered methods. Made by `resolve_sparse_config`."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    GSA: GsaOptions = Field(
        default=GsaOptions(), description="Blocks by their scores; prefetch, and reuse of a choice."
    )
    ESA: BlockOptions = Field(default=BlockOptions(), description="Blocks by their scores.")
    KVStar: KVStarOptions = Field(default=KVStarOptions(), description="Another method's choice, locked for steps.")

    def __hash__(self) -> int:
        return hash((self.GSA, self.ESA, self.KVStar, *sorted((self.__pydantic_extra__ or {}).items())))

    def options(self, name: str, key: str = "ucm.ucm_sparse_config") -> MethodOptions:
        """Returns the options to create a method with: KVStar's include its base method's.

        Raises `SparseMethodError` for an unknown method, `UcmConfigError` for sections that do not go together.
        """
        given = dict(self).get(name)
        own: MethodOptions = options_class(name)() if given is None else given
        return own.with_sections(self.options, key)

    def used_by(self, name: str | None) -> set[str]:
        """Returns the sections that a method reads: its own, and the section of the method that it wraps."""
        read = {name} if name is not None else set()

        def section_of(other: str, key: str) -> MethodOptions:
            read.add(other)
            return self.options(other, key)

        if name is not None:
            own: MethodOptions = dict(self).get(name) or options_class(name)()
            own.with_sections(section_of, "ucm.ucm_sparse_config")
        return read


def resolve_sparse_config(value: Any, key: str) -> SparseConfig:
    """Reads the sections from a mapping by method name, or from the YAML or JSON file at a path.

    Raises `UcmConfigError`, which lists every problem by its full name under `key`.
    """
    if isinstance(value, SparseConfig):
        return value
    if isinstance(value, str | Path):
        value = read_config_file(Path(value), key)
    if not isinstance(value, Mapping):
        wanted = "a mapping by sparse method, or the path of a YAML or JSON file"
        raise UcmConfigError([Problem(key, shown(value), wanted)])
    sections: dict[str, Any] = {}
    found: list[Problem] = []
    for name, section in value.items():
        try:
            sections[name] = _options_class(name, key).resolve(section, f"{key}.{name}")
        except UcmConfigError as error:
            found += error.problems
    if found:
        raise UcmConfigError(found)
    return SparseConfig(**sections)


def resolve_sparse_method(name: str | None, key: str) -> str | None:
    """Returns the name of a method that can be created, or None. Raises `UcmConfigError`."""
    if name is None:
        return None
    known = SPARSE_METHODS.names()
    if name not in known:
        nearest = unknown_key(name, "", known).expected
        raise UcmConfigError([Problem(key, repr(name), nearest.replace("valid key", "known method"))])
    try:
        options_class(name)
    except SparseMethodError as error:
        raise UcmConfigError([Problem(key, repr(name), f"a method that can be loaded ({error})")]) from error
    return name


def _options_class(name: Any, key: str) -> type[MethodOptions]:
    known = SPARSE_METHODS.names()
    if name not in known:
        raise UcmConfigError([unknown_key(str(name), key, known)])
    try:
        return options_class(name)
    except SparseMethodError as error:
        problem = Problem(f"{key}.{name}", "options", f"a method that can be loaded ({error})")
        raise UcmConfigError([problem]) from error
