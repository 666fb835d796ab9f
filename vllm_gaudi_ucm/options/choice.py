"""A field whose values are the names of a registry, so that what is registered from outside can be chosen, too."""

from __future__ import annotations

from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from vllm_gaudi_ucm.registry import Registry


class NameOf:
    """As `Annotated[str, NameOf(registry, "auto")]`: a name of the registry, or one of the others."""

    def __init__(self, registry: Registry[Any], *others: str) -> None:
        self._registry = registry
        self._others = others

    def names(self) -> list[str]:
        """Those that exist now."""
        return [*self._others, *self._registry.names()]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: str) -> str:
        if value not in self.names():
            raise ValueError(f"expected one of {', '.join(self.names())}")
        return value
