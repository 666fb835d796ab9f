"""The modelled cost of a step on a device: the roofline of its parts. Look-up, strategies, tune and plan share it."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vllm_gaudi_ucm.graphs.cost.specs import DeviceSpec, ModelSpec
from vllm_gaudi_ucm.graphs.shapes import prompt_tiles
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape
from vllm_gaudi_ucm.graphs.shapes.group_room import most_blocks
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
    """The seconds that a search over buckets compares: they never decrease when a size grows or a part is added."""

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
        forward = shape.forward if isinstance(shape, Bucket) else shape
        return float(self.forward_seconds("c" in shape.phase, *forward.sizes))

    def step(self, bucket: Bucket) -> float:
        """Returns the seconds of the forward graph and of the logits graph of `bucket`."""
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
        """Returns the seconds of forward graphs; the arguments broadcast."""
        flags = np.asarray(causal, np.float64)
        q, s, u = (np.asarray(size, np.float64) for size in (query, shared, unique))
        parts = 1 + flags + (s > 0) + (u > 0)
        causal_seconds = flags * self._causal(q, np.asarray(max_tiles, np.float64))
        seconds = self._linear(q) + causal_seconds + self._shared(q, s) + self._unique(u) + self.reduction_seconds(q)
        if self.model.window_layers:
            seconds = seconds + self._in_windows(q, s, u)
        return parts * self.device.launch_seconds + seconds + self.selected_seconds(selected)

    def reduction_seconds(self, query: ArrayLike) -> Floats:
        """Returns the seconds that devices sharing layers take to add up their results: twice per layer, in a ring."""
        m = self.model
        rows = np.asarray(query, np.float64)
        sent = 2 * (m.tensor - 1) / m.tensor * rows * m.hidden * m.dtype_bytes
        each = self.device.launch_seconds + sent / self.device.link
        return 2 * m.layers * each if m.tensor > 1 else np.zeros_like(rows)

    def selected_seconds(self, selected: ArrayLike) -> Floats:
        """The seconds that a selected part adds to a forward graph of any other sizes: scoring, then attention."""
        blocks = np.asarray(selected, np.float64)
        m = self.model
        summaries = CANDIDATES_PER_SELECTED * SUMMARY_VECTORS
        computing = self._computing(2.0 * summaries * m.heads * m.head_dim)
        scoring = m.layers * max(computing, self._moving(summaries * m.kv_heads * m.head_dim * m.dtype_bytes))
        seconds = 2 * self.device.launch_seconds + scoring * blocks + self._unique(blocks)
        return np.where(blocks > 0, seconds, 0.0)

    def logits_seconds(self, logits: ArrayLike) -> Floats:
        """Returns the seconds of the output head and of sampling over its rows; without logits there is no graph."""
        rows = np.asarray(logits, np.float64)
        m = self.model
        of_row = m.vocab * m.tensor
        computing = rows * self._computing(2.0 * m.hidden * m.vocab)
        moving = self._moving(m.hidden * m.vocab * m.dtype_bytes) + rows * self._moving(4.0 * PARTIAL_BYTES * of_row)
        received = rows * ((m.tensor - 1) / m.tensor * of_row * m.dtype_bytes / self.device.link)
        return np.where(rows > 0, self.device.launch_seconds + np.maximum(computing, moving) + received, 0.0)

    def _linear(self, q: Floats) -> Floats:
        m = self.model
        activations = 4 * m.hidden + m.mlp_activations + m.kv_elements + m.heads * (m.head_dim + m.value_dim)
        of_row = q * self._moving(activations * m.dtype_bytes)
        moving = of_row + self._moving(m.layer_weights * m.dtype_bytes)
        seconds = (m.layers - m.expert_layers) * np.maximum(q * self._computing(2.0 * m.layer_weights), moving)
        if m.experts is None:
            return seconds
        per_size, besides = m.mlp_matrices * m.hidden, m.layer_weights - m.mlp_matrices * m.hidden * m.intermediate
        computing = (q * besides + per_size * m.experts.computed(q)) * self._computing(2.0)
        moving = of_row + (besides + per_size * m.experts.read(q)) * self._moving(m.dtype_bytes)
        return seconds + m.experts.layers * np.maximum(computing, moving)

    def _causal(self, q: Floats, max_tiles: Floats) -> Floats:
        longest = np.minimum(q, max_tiles * prompt_tiles.TILE_ROWS)
        m = self.model
        whole = (m.layers - m.window_layers) * self._causal_layer(q, longest)
        if not m.window_layers:
            return whole
        return whole + m.window_layers * self._causal_layer(q, np.minimum(longest, m.window + CAUSAL_SLICE))

    def _causal_layer(self, q: Floats, longest: Floats) -> Floats:
        m = self.model
        # two FLOPs for each of (longest + a slice) / 2 keys
        computing = (longest + np.minimum(longest, CAUSAL_SLICE)) * self._computing(m.heads * m.new_pair)
        moving = self._moving(m.kv_elements * m.dtype_bytes + m.heads * m.value_dim * PARTIAL_BYTES)
        return q * np.maximum(computing, moving)

    def _in_windows(self, q: Floats, s: Floats, u: Floats) -> Floats:
        """The seconds for cached blocks of the layers with a window; `group_room` gives their number in a bucket."""
        m = self.model
        most = q * most_blocks(m.window, self.block_size)
        shared, unique = np.minimum(s, most), np.minimum(s + u, most)
        return m.window_layers * (self._shared_layer(q, shared) + unique * self._unique_block())

    def _shared(self, q: Floats, s: Floats) -> Floats:
        return (self.model.layers - self.model.window_layers) * self._shared_layer(q, s)

    def _shared_layer(self, q: Floats, s: Floats) -> Floats:
        m = self.model
        computing = q * s * self._computing(self._pair_flops() * self.block_size)
        out = np.where(s > 0, q, 0.0) * self._moving(m.heads * m.value_dim * PARTIAL_BYTES)
        return np.maximum(computing, s * self._moving(self._block_bytes()) + out)

    def _unique(self, u: Floats) -> Floats:
        return u * ((self.model.layers - self.model.window_layers) * self._unique_block())

    def _unique_block(self) -> float:
        """Returns the seconds that a layer takes for a block of one row."""
        m = self.model
        moving = self._moving(self._block_bytes() + m.heads * m.value_dim * PARTIAL_BYTES)
        return max(self._computing(self._pair_flops() * self.block_size), moving)

    def _pair_flops(self) -> float:
        """Returns the FLOPs of a row and a token."""
        m = self.model
        return 2.0 * m.heads * (m.head_dim + m.value_dim)

    def _block_bytes(self) -> float:
        """Returns the bytes of the keys and values of a block in one layer."""
        return self.block_size * self.model.kv_elements * self.model.dtype_bytes

    def _computing(self, flops: float) -> float:
        return flops / self.device.flops

    def _moving(self, size: float) -> float:
        """Returns the seconds to move this many bytes."""
        return size / self.device.bandwidth
