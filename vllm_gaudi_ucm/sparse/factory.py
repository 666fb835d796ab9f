"""Creates sparse methods by name, including methods of third parties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from vllm_gaudi_ucm.registry import RegistryError
from vllm_gaudi_ucm.sparse.registry import SPARSE_METHODS, SparseMethodError, method_class

if TYPE_CHECKING:
    from vllm_gaudi_ucm.sparse.base import UcmSparseBase, UcmSparseRole
    from vllm_gaudi_ucm.sparse.options import MethodOptions
    from vllm_gaudi_ucm.sparse.sections import SparseConfig


@runtime_checkable
class HasSparseSections(Protocol):
    """The parts of a whole configuration that methods use."""

    @property
    def ucm_sparse_config(self) -> SparseConfig: ...


class UcmSparseFactory:
    """The interface of the seeds to the registry of methods. Registering imports nothing. Source: seed 000 (GSA), 9."""

    @staticmethod
    def register_sparse_method(name: str, module_path: str, class_name: str) -> None:
        """Registers a subclass of `UcmSparseBase` under a name, in this process.

        The engine's processes know it too if an entry point names it, or a plugin of vLLM registers it. Raises
        `SparseMethodError` if the name is already used for another class.
        """
        try:
            SPARSE_METHODS.register(name, f"{module_path}:{class_name}")
        except RegistryError as error:
            raise SparseMethodError(str(error)) from None

    @classmethod
    def create_sparse_method(
        cls,
        name: str,
        role: UcmSparseRole,
        config: HasSparseSections | MethodOptions | Mapping[str, Any] | None = None,
        **parts: Any,
    ) -> UcmSparseBase:
        """Creates a method object for one role.

        Args:
            name: a known method; otherwise `SparseMethodError` names the nearest one.
            role: the process in which it lives.
            config: the method's own options, or the whole configuration with `ucm_sparse_config` (whose sections are by
                method name), as a mapping or resolved. Raises `UcmConfigError`.
            parts: further arguments of the class's constructor that the server provides: `has_gaps` with KV offload.
        """
        from vllm_gaudi_ucm.sparse.sections import resolve_sparse_config

        method = method_class(name)
        if isinstance(config, HasSparseSections):
            return method(role, config.ucm_sparse_config.options(name), **parts)
        if isinstance(config, Mapping) and ("ucm_sparse_config" in config or "ucm_sparse_method" in config):
            sections = resolve_sparse_config(config.get("ucm_sparse_config", {}), "ucm.ucm_sparse_config")
            return method(role, sections.options(name), **parts)
        return method(role, config, **parts)
