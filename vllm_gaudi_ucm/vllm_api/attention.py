"""Attention backends: `vllm.v1.attention`.

Extension point: a platform plugin brings a backend of its own. `AttentionBackend`, `AttentionImpl`,
`AttentionMetadata` and `AttentionMetadataBuilder` are its classes; `AttentionBackendEnum`, `AttentionLayer`,
`AttentionSelectorConfig`, `AttentionType` and `MultipleOf` are types of their methods.
"""

from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

__all__ = [
    "AttentionBackend",
    "AttentionBackendEnum",
    "AttentionImpl",
    "AttentionLayer",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionSelectorConfig",
    "AttentionType",
    "MultipleOf",
]
