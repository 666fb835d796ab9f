"""The KV connector: KV blocks come from a store instead of being computed, and new ones go there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_gaudi_ucm.connector.connector import UcmConnector

__all__ = ["UcmConnector"]


def __getattr__(name: str) -> Any:
    """Imports the connector lazily: vLLM finds it by this package's name, and its options are read without vLLM."""
    if name == "UcmConnector":
        from vllm_gaudi_ucm.connector.connector import UcmConnector

        return UcmConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
