"""Draws one random token for each row, among those that temperature, min-p, top-k and top-p leave."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.execution.graph_manager import Compile, Stage, uncompiled
from vllm_gaudi_ucm.ops.likeliest_tokens import likeliest_tokens, within
from vllm_gaudi_ucm.ops.rejection_sampling.api import accept_or_draw
from vllm_gaudi_ucm.ops.row_noise.api import exponential_noise, token_mixes
from vllm_gaudi_ucm.sampling.draft_probabilities import ProposedRows
from vllm_gaudi_ucm.sampling.slot_noise import noise_keys, slot_uniforms
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


class VerifiedRows(NamedTuple):
    """The drafts that random rows verify; see `ProposedRows`.

    tokens, places: int64 [rows]; -1 and 0 in rows without a draft. uniforms: float32 [rows]. probabilities: float32
    [places, vocabulary].
    """

    tokens: torch.Tensor
    places: torch.Tensor
    uniforms: torch.Tensor
    probabilities: torch.Tensor


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
        self._drafts = StagedRows((max_rows,), np.int64, -1, device)
        self._places = StagedRows((max_rows,), np.int64, 0, device)
        self._uniforms = StagedRows((max_rows,), np.float32, 0.5, device)
        self._mixes = torch.from_numpy(token_mixes(vocab_size)).to(device)

    def random(self, logits: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """int64 [rows], and the logits that they were drawn from, [rows, vocabulary], if they are wanted.

        batch: on the host; greedy rows may be among the random ones, and rows may verify drafts.
        """
        rows, metadata = len(logits), batch.metadata
        keys = self._keys.stage(noise_keys(batch.slots), rows)
        only_top = metadata.top_k is not None or metadata.top_p is not None or bool(batch.min_p.any())
        return self._run(logits, self._stage_batch(batch, rows), keys, only_top, self._stage_drafts(batch, rows))

    def warm(self, logits: torch.Tensor, draft_probabilities: torch.Tensor | None = None) -> None:
        """Executes both stages once, of pads. draft_probabilities: as they verify drafts that were drawn from these."""
        rows = len(logits)
        parts = (self._temperature, self._top_k, self._top_p, self._min_p, self._keys)
        *factors, keys = (part.stage(np.zeros(0), rows) for part in parts)
        pads = RandomRows(*factors)
        drafts = None
        if draft_probabilities is not None:
            none = np.zeros(0, np.int64)
            drafts = self._staged_drafts(ProposedRows(none, none, draft_probabilities), np.zeros(0, np.float32), rows)
        self._run(logits, pads, keys, False, drafts)
        self._run(logits, pads, keys, True, drafts)

    def refill(self) -> None:
        parts = (self._temperature, self._top_k, self._top_p, self._min_p, self._keys)
        for rows in (*parts, self._drafts, self._places, self._uniforms):
            rows.refill()

    def _run(
        self,
        logits: torch.Tensor,
        rows: RandomRows,
        keys: torch.Tensor,
        only_top: bool,
        drafts: VerifiedRows | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        label = "random, top-k, top-p or min-p" if only_top else "random"
        with self._stage(label if drafts is None else f"{label}, of drafts"):
            run = self._draw_top if only_top else self._draw
            drawn: tuple[torch.Tensor, torch.Tensor | None] = run(
                logits, rows, keys, self._mixes, self._returns_logits, drafts
            )
            return drawn

    def _stage_drafts(self, batch: SamplingBatch, rows: int) -> VerifiedRows | None:
        proposed = batch.verified.rows
        if proposed is None:
            return None
        return self._staged_drafts(proposed, slot_uniforms(batch.slots), rows)

    def _staged_drafts(self, proposed: ProposedRows, uniforms: NDArray[np.float32], rows: int) -> VerifiedRows:
        return VerifiedRows(
            self._drafts.stage(proposed.tokens, rows),
            self._places.stage(proposed.places, rows),
            self._uniforms.stage(uniforms, rows),
            proposed.probabilities,
        )

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
    logits: torch.Tensor,
    rows: RandomRows,
    keys: torch.Tensor,
    mixes: torch.Tensor,
    returns_logits: bool,
    drafts: VerifiedRows | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens, and the logits that they were drawn from.

    Args:
        logits: float32 [rows, vocabulary].
        rows: of these.
        keys, mixes: of the noise, see `exponential_noise`.
        returns_logits: whether the logits are wanted.
        drafts: None if no row has any.
    """
    scaled = temper(logits, rows.temperature)
    tokens = _drawn(scaled, logits, rows, exponential_noise(keys, mixes), drafts)
    return tokens, scaled if returns_logits else None


def draw_from_top(
    logits: torch.Tensor,
    rows: RandomRows,
    keys: torch.Tensor,
    mixes: torch.Tensor,
    returns_logits: bool,
    drafts: VerifiedRows | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draws only from the tokens that min-p, top-k and top-p leave."""
    scaled = temper(logits, rows.temperature)
    probabilities = scaled.softmax(dim=-1)
    least = probabilities.amax(dim=-1, keepdim=True) * rows.min_p.unsqueeze(1)
    scaled = scaled.masked_fill(probabilities < least, -float("inf"))
    top = top_tokens(scaled, rows.top_k, rows.top_p)
    tokens = _drawn(top, logits, rows, exponential_noise(keys, mixes), drafts)
    return tokens, top if returns_logits else None


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


def temper(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Returns logits divided by the temperature of their row, float32 [rows]; greedy rows are unchanged."""
    return logits / torch.where(temperature < _GREEDY_BELOW, 1.0, temperature).unsqueeze(1)


def choose_by_noise(
    probabilities: torch.Tensor, logits: torch.Tensor, temperature: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """Returns int64 [rows], a token drawn from each row's distribution, or the likeliest one of a greedy row.

    probabilities, logits, noise: float32 [rows, vocabulary]. temperature: float32 [rows].
    """
    return _or_likeliest((probabilities / noise).argmax(dim=-1), logits, temperature)


def _drawn(
    scaled: torch.Tensor, logits: torch.Tensor, rows: RandomRows, noise: torch.Tensor, drafts: VerifiedRows | None
) -> torch.Tensor:
    probabilities = scaled.softmax(dim=-1, dtype=torch.float32)
    if drafts is None:
        return choose_by_noise(probabilities, logits, rows.temperature, noise)
    proposed = drafts.probabilities.index_select(0, drafts.places)
    tokens = accept_or_draw(probabilities, drafts.tokens, proposed, drafts.uniforms, noise)
    return _or_likeliest(tokens, logits, rows.temperature)


def _or_likeliest(tokens: torch.Tensor, logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    tokens = within(tokens, logits)
    # no `where`: Gaudi's compiler is known to get it wrong for integers
    return tokens + (likeliest_tokens(logits) - tokens) * (temperature < _GREEDY_BELOW)
