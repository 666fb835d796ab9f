"""The registry of sparse methods: by name, loaded when they are used, open to methods of third parties."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    from vllm_gaudi_ucm.sparse.base import UcmSparseBase, UcmSparseRole
    from vllm_gaudi_ucm.sparse.options import MethodOptions
    from vllm_gaudi_ucm.sparse.sections import SparseConfig

ENTRY_POINTS = "vllm_gaudi_ucm.sparse_methods"
"""Group of the entry points `NAME = "package.module:ClassName"` that name methods of installed packages."""


class SparseMethodError(ValueError):
    """A sparse method that is not known, cannot be loaded, or does not follow the interface."""


@runtime_checkable
class HasSparseSections(Protocol):
    """A whole configuration, as far as methods are concerned."""

    @property
    def ucm_sparse_config(self) -> SparseConfig: ...


class UcmSparseFactory:
    """Creates sparse methods by name. Registering imports nothing."""

    _methods: ClassVar[dict[str, tuple[str, str]]] = {
        "GSA": ("vllm_gaudi_ucm.sparse.methods.gsa", "GSA"),
        "ESA": ("vllm_gaudi_ucm.sparse.methods.esa", "ESA"),
        "KVStar": ("vllm_gaudi_ucm.sparse.methods.kvstar.kvstar", "KVStar"),
    }

    @classmethod
    def register_sparse_method(cls, name: str, module_path: str, class_name: str) -> None:
        """Makes a subclass of `UcmSparseBase` known under a name, in this process.

        The engine's processes know it too if it is named by an entry point, or registered by a plugin of vLLM.
        Raises `SparseMethodError` where the name already stands for another class.
        """
        found = cls._methods.setdefault(name, (module_path, class_name))
        if found != (module_path, class_name):
            raise SparseMethodError(
                f"sparse method {name!r}: found {'.'.join(found)} registered already, expected a name that is free; "
                f"choose another name for {module_path}.{class_name}"
            )

    @classmethod
    def known_methods(cls) -> list[str]:
        """Every name that a method can be created by, ours first."""
        return list(dict.fromkeys([*cls._methods, *(point.name for point in entry_points(group=ENTRY_POINTS))]))

    @classmethod
    def method_class(cls, name: str) -> type[UcmSparseBase]:
        """The class of a method, imported now. Raises `SparseMethodError`."""
        from vllm_gaudi_ucm.sparse.base import UcmSparseBase

        module_path, class_name = cls._location(name)
        place = f"sparse method {name!r}: {module_path}.{class_name}"
        try:
            found = getattr(importlib.import_module(module_path), class_name)
        except (ImportError, AttributeError) as error:
            raise SparseMethodError(f"{place} cannot be loaded ({error}); install or correct it") from error
        if not (isinstance(found, type) and issubclass(found, UcmSparseBase)):
            raise SparseMethodError(f"{place}: found {found!r}, expected a subclass of UcmSparseBase")
        return found

    @classmethod
    def options_class(cls, name: str) -> type[MethodOptions]:
        """The model of a method's options. Raises `SparseMethodError`."""
        from vllm_gaudi_ucm.sparse.options import MethodOptions

        options = cls.method_class(name).Options
        if not (isinstance(options, type) and issubclass(options, MethodOptions)):
            raise SparseMethodError(f"sparse method {name!r}: Options is {options!r}, expected a MethodOptions")
        return options

    @classmethod
    def create_sparse_method(
        cls,
        name: str,
        role: UcmSparseRole,
        config: HasSparseSections | MethodOptions | Mapping[str, Any] | None = None,
    ) -> UcmSparseBase:
        """A method object for one role.

        Args:
            name: a known method; `SparseMethodError` names the nearest otherwise.
            role: the process it lives in.
            config: the method's own options, or the whole configuration with `ucm_sparse_config` (whose sections are
                by method name), as a mapping or resolved. Raises `UcmConfigError`.
        """
        from vllm_gaudi_ucm.sparse.sections import resolve_sparse_config

        method = cls.method_class(name)
        if isinstance(config, HasSparseSections):
            return method(role, config.ucm_sparse_config.options(name))
        if isinstance(config, Mapping) and ("ucm_sparse_config" in config or "ucm_sparse_method" in config):
            sections = resolve_sparse_config(config.get("ucm_sparse_config", {}), "ucm.ucm_sparse_config")
            return method(role, sections.options(name))
        return method(role, config)

    @classmethod
    def _location(cls, name: str) -> tuple[str, str]:
        if name in cls._methods:
            return cls._methods[name]
        for point in entry_points(group=ENTRY_POINTS):
            if point.name == name:
                return point.module, point.attr
        known = cls.known_methods()
        nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
        hint = f"; the nearest is {nearest[0]}" if nearest else ""
        raise SparseMethodError(f"sparse method: found {name!r}, expected one of {', '.join(known)}{hint}")
