"""Modelled seconds of vllm-gaudi's prefills and decodes, padded and as they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import TILE_ROWS

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ShapeCost:
    """Seconds of a roofline model: linear layers of all rows, attention of each row to its padded context."""

    model: CostModel

    def prefill(self, batch: ArrayLike, rows: ArrayLike, longest: ArrayLike, context: ArrayLike) -> Floats:
        """Returns the seconds of prompts with `rows` tokens together; arguments broadcast. context: blocks of each."""
        tiles = np.ceil(np.asarray(longest, np.float64) / TILE_ROWS)
        return self.model.forward_seconds(1, rows, context, 0, 0, tiles) + self.model.logits_seconds(batch)

    def decode(self, rows: ArrayLike, blocks: ArrayLike) -> Floats:
        """Returns the seconds of decodes. blocks: of all rows together."""
        return self.model.forward_seconds(0, rows, 0, blocks) + self.model.logits_seconds(rows)
