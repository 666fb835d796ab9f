"""The modelled cost of a step on a device: the roofline of its parts. Look-up, strategies, tune and plan share it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vllm_gaudi_ucm.graphs.cost.specs import DeviceSpec, ModelSpec
from vllm_gaudi_ucm.graphs.shapes import prompt_tiles
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import ALL_TILES

Floats = NDArray[np.float64]

# Rows of a causal slice, which sees the keys up to its own end.
CAUSAL_SLICE = 512
# Partial results (max, sum, out) are float32.
PARTIAL_BYTES = 4
# Scored blocks for each selected one, and vectors of a block's summary.
CANDIDATES_PER_SELECTED = 8
SUMMARY_VECTORS = 2


class Cost(Protocol):
    """The seconds that a search over buckets compares: never fewer when a size grows or a part is added."""

    def forward_seconds(
        self,
        causal: ArrayLike,
        query: ArrayLike,
        shared: ArrayLike,
        unique: ArrayLike,
        selected: ArrayLike = 0,
        max_tiles: ArrayLike = ALL_TILES,
    ) -> Floats: ...

    def logits_seconds(self, logits: ArrayLike) -> Floats: ...


@dataclass(frozen=True)
class CostModel:
    """Roofline: each part takes max(FLOPs / peak, bytes / bandwidth), parts follow one another.

    A bucket pays for everything that its static shapes compute: an empty part costs the same as a full one.
    """

    device: DeviceSpec
    model: ModelSpec
    block_size: int

    def forward(self, shape: ForwardShape | Bucket) -> float:
        """Seconds of the forward graph of `shape`."""
        forward = shape.forward if isinstance(shape, Bucket) else shape
        return float(self.forward_seconds("c" in shape.phase, *forward.sizes))

    def step(self, bucket: Bucket) -> float:
        """Seconds of the forward graph and of the logits graph of `bucket`."""
        return self.forward(bucket) + float(self.logits_seconds(bucket.logits))

    def forward_seconds(
        self,
        causal: ArrayLike,
        query: ArrayLike,
        shared: ArrayLike,
        unique: ArrayLike,
        selected: ArrayLike = 0,
        max_tiles: ArrayLike = ALL_TILES,
    ) -> Floats:
        """Seconds of forward graphs; the arguments broadcast."""
        flags = np.asarray(causal, np.float64)
        q, s, u = (np.asarray(size, np.float64) for size in (query, shared, unique))
        parts = 1 + flags + (s > 0) + (u > 0)
        causal_seconds = flags * self._causal(q, np.asarray(max_tiles, np.float64))
        seconds = self._linear(q) + causal_seconds + self._shared(q, s) + self._unique(u)
        return parts * self.device.launch_seconds + seconds + self.selected_seconds(selected)

    def selected_seconds(self, selected: ArrayLike) -> Floats:
        """Seconds that a selected part adds to a forward graph of any other sizes: scoring, then attention."""
        blocks = np.asarray(selected, np.float64)
        m = self.model
        summaries = blocks * CANDIDATES_PER_SELECTED * SUMMARY_VECTORS
        flops = 2.0 * summaries * m.heads * m.head_dim
        scoring = m.layers * self._roofline(flops, summaries * m.kv_heads * m.head_dim * m.dtype_bytes)
        return np.where(blocks > 0, 2 * self.device.launch_seconds + scoring + self._unique(blocks), 0.0)

    def logits_seconds(self, logits: ArrayLike) -> Floats:
        """Seconds of the output head and of sampling over its rows; no logits, no graph."""
        rows = np.asarray(logits, np.float64)
        m = self.model
        flops = 2.0 * rows * m.hidden * m.vocab
        bytes_moved = m.hidden * m.vocab * m.dtype_bytes + 4.0 * PARTIAL_BYTES * rows * m.vocab
        return np.where(rows > 0, self.device.launch_seconds + self._roofline(flops, bytes_moved), 0.0)

    def _linear(self, q: Floats) -> Floats:
        m = self.model
        activations = 4 * m.hidden + m.mlp_matrices * m.intermediate + 2 * (m.heads + m.kv_heads) * m.head_dim
        bytes_moved = (m.layer_weights + q * activations) * m.dtype_bytes
        return m.layers * self._roofline(2.0 * q * m.layer_weights, bytes_moved)

    def _causal(self, q: Floats, max_tiles: Floats) -> Floats:
        longest = np.minimum(q, max_tiles * prompt_tiles.TILE_ROWS)
        keys = 0.5 * (longest + np.minimum(longest, CAUSAL_SLICE))
        m = self.model
        bytes_moved = q * (2 * m.kv_heads * m.dtype_bytes + m.heads * PARTIAL_BYTES) * m.head_dim
        return m.layers * self._roofline(4.0 * m.heads * m.head_dim * q * keys, bytes_moved)

    def _shared(self, q: Floats, s: Floats) -> Floats:
        m = self.model
        tokens = s * self.block_size
        out = np.where(s > 0, q * m.heads * m.head_dim * PARTIAL_BYTES, 0.0)
        return m.layers * self._roofline(4.0 * m.heads * m.head_dim * q * tokens, self._kv_bytes(tokens) + out)

    def _unique(self, u: Floats) -> Floats:
        m = self.model
        tokens = u * self.block_size
        out = u * m.heads * m.head_dim * PARTIAL_BYTES
        return m.layers * self._roofline(4.0 * m.heads * m.head_dim * tokens, self._kv_bytes(tokens) + out)

    def _kv_bytes(self, tokens: Floats) -> Floats:
        """Bytes of keys and values of `tokens` in one layer."""
        m = self.model
        return tokens * (2 * m.kv_heads * m.head_dim * m.dtype_bytes)

    def _roofline(self, flops: Floats, bytes_moved: Floats) -> Floats:
        return np.maximum(flops / self.device.flops, bytes_moved / self.device.bandwidth)
