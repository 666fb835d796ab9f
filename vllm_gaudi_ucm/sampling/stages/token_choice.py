"""Draws one random token for each row, among those that temperature, min-p, top-k and top-p leave."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm_gaudi_ucm.execution.graph_manager import Compile, Stage, uncompiled
from vllm_gaudi_ucm.ops.likeliest_tokens import likeliest_tokens, within
from vllm_gaudi_ucm.ops.row_noise.api import exponential_noise, token_mixes
from vllm_gaudi_ucm.sampling.slot_noise import noise_keys
from vllm_gaudi_ucm.sampling.stages.staged_rows import StagedRows

if TYPE_CHECKING:
    from vllm_gaudi_ucm.sampling.sampling import SamplingBatch

# vLLM's own bound between greedy and random rows
_GREEDY_BELOW = 1e-5

# vLLM masks the tokens whose cumulative probability is at most 1 - top_p, which for top_p = 1 are the tokens that
# underflow to 0; if it skips the mask, it skips these too.
_NO_TOP_P = 2.0


class RandomRows(NamedTuple):
    """The parameters of random rows, except for their keys.

    temperature: float32 [rows], 0 in greedy rows and pads. top_k: int64 [rows]. top_p, min_p: float32 [rows].
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


class TokenChoice:
    """The stages on the device.

    Noise is a function of a row's key, which is staged in each step: a region need not advance a generator's state.

    Args:
        max_rows: most logits rows of a step.
        vocab_size: the top-k of rows without one.
        returns_logits: random stages return the logits that they drew from.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        stage: Stage,
        returns_logits: bool,
        region: Compile = uncompiled,
    ) -> None:
        self._stage = stage
        self._vocab_size = vocab_size
        self._returns_logits = returns_logits
        self._draw, self._draw_top = region(draw), region(draw_from_top)
        self._temperature = StagedRows((max_rows,), np.float32, 0.0, device)
        self._top_k = StagedRows((max_rows,), np.int64, 1, device)
        self._top_p = StagedRows((max_rows,), np.float32, 1.0, device)
        self._min_p = StagedRows((max_rows,), np.float32, 0.0, device)
        self._keys = StagedRows((max_rows,), np.int32, 0, device)
        self._mixes = torch.from_numpy(token_mixes(vocab_size)).to(device)

    def random(self, logits: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """int64 [rows], and the logits that they were drawn from, [rows, vocabulary], if they are wanted.

        batch: on the host; greedy rows may be among the random ones.
        """
        rows, metadata = len(logits), batch.metadata
        keys = self._keys.stage(noise_keys(batch.slots), rows)
        only_top = metadata.top_k is not None or metadata.top_p is not None or bool(batch.min_p.any())
        return self._run(logits, self._stage_batch(batch, rows), keys, only_top)

    def warm(self, logits: torch.Tensor) -> None:
        parts = (self._temperature, self._top_k, self._top_p, self._min_p, self._keys)
        *factors, keys = (part.stage(np.zeros(0), len(logits)) for part in parts)
        pads = RandomRows(*factors)
        self._run(logits, pads, keys, only_top=False)
        self._run(logits, pads, keys, only_top=True)

    def refill(self) -> None:
        for rows in (self._temperature, self._top_k, self._top_p, self._min_p, self._keys):
            rows.refill()

    def _run(
        self, logits: torch.Tensor, rows: RandomRows, keys: torch.Tensor, only_top: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        with self._stage("random, top-k, top-p or min-p" if only_top else "random"):
            run = self._draw_top if only_top else self._draw
            drawn: tuple[torch.Tensor, torch.Tensor | None] = run(logits, rows, keys, self._mixes, self._returns_logits)
            return drawn

    def _stage_batch(self, batch: SamplingBatch, rows: int) -> RandomRows:
        """Stages the batch once, as long as its slots stay the same."""
        metadata, count, key = batch.metadata, len(batch.slots), batch.membership
        assert metadata.temperature is not None, "a batch with random rows has temperatures"
        top_k, top_p = metadata.top_k, metadata.top_p
        return RandomRows(
            self._temperature.keep(key, rows, metadata.temperature.numpy),
            self._top_k.keep(key, rows, lambda: np.full(count, self._vocab_size) if top_k is None else top_k.numpy()),
            self._top_p.keep(key, rows, lambda: np.full(count, _NO_TOP_P) if top_p is None else top_p.numpy()),
            self._min_p.keep(key, rows, lambda: batch.min_p),
        )


def draw(
    logits: torch.Tensor, rows: RandomRows, keys: torch.Tensor, mixes: torch.Tensor, returns_logits: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens, and the logits that they were drawn from.

    Args:
        logits: float32 [rows, vocabulary].
        rows: of these.
        keys, mixes: of the noise, see `exponential_noise`.
        returns_logits: whether the logits are wanted.
    """
    return _drawn(_tempered(logits, rows), logits, rows, exponential_noise(keys, mixes), returns_logits)


def draw_from_top(
    logits: torch.Tensor, rows: RandomRows, keys: torch.Tensor, mixes: torch.Tensor, returns_logits: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draws only from the tokens that min-p, top-k and top-p leave."""
    scaled = _tempered(logits, rows)
    probabilities = scaled.softmax(dim=-1)
    least = probabilities.amax(dim=-1, keepdim=True) * rows.min_p.unsqueeze(1)
    scaled = scaled.masked_fill(probabilities < least, -float("inf"))
    top = top_tokens(scaled, rows.top_k, rows.top_p)
    return _drawn(top, logits, rows, exponential_noise(keys, mixes), returns_logits)


def top_tokens(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """-inf outside of top-k and top-p, equal bit for bit to vLLM's `apply_top_k_top_p_pytorch`, which writes a Python
    bool into a slice: Gaudi's compiler takes neither. Its sort is not stable, so it stays on the device."""
    width = logits.shape[1]
    ascending, tokens = logits.sort(dim=-1)
    ascending = ascending.masked_fill(ascending < ascending.gather(1, (width - top_k).unsqueeze(1)), -float("inf"))
    mass = ascending.softmax(dim=-1).cumsum(dim=-1)
    # the last one always stays
    before_last = torch.arange(width, device=logits.device) < width - 1
    ascending = ascending.masked_fill((mass <= 1 - top_p.unsqueeze(1)) & before_last, -float("inf"))
    return logits.scatter(-1, tokens, ascending)


def _tempered(logits: torch.Tensor, rows: RandomRows) -> torch.Tensor:
    is_greedy = rows.temperature < _GREEDY_BELOW
    return logits / torch.where(is_greedy, 1.0, rows.temperature).unsqueeze(1)


def _drawn(
    scaled: torch.Tensor, logits: torch.Tensor, rows: RandomRows, noise: torch.Tensor, returns_logits: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    probabilities = scaled.softmax(dim=-1, dtype=torch.float32)
    tokens = within((probabilities / noise).argmax(dim=-1), logits)
    # no `where`: Gaudi's compiler is known to get it wrong for integers
    tokens = tokens + (likeliest_tokens(logits) - tokens) * (rows.temperature < _GREEDY_BELOW)
    return tokens, scaled if returns_logits else None
