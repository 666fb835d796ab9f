"""What a cost depends on beside the parts: how the attention layers of a model look."""

from __future__ import annotations

from typing import NamedTuple


class LayerShape(NamedTuple):
    """All attention layers of a model, which are alike.

    heads, kv_heads, dim, value_dim: of the query, of the cache, of a key and of a value.
    element_size: bytes of a number in the cache.
    layers: how many there are; what is derived once per step is divided among them.
    """

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    element_size: int
    layers: int = 1

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.heads // self.kv_heads

    @property
    def width(self) -> int:
        """Numbers of a key and its value."""
        return self.dim + self.value_dim
