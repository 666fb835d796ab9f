"""Requests with keys in scattered blocks, and what block selection must find in them, in float64 numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.block_selection.api import block_scores, new_summaries, prepare_spans, write_summaries
from vllm_gaudi_ucm.ops.block_selection.features import REST_WEIGHT, SummaryKind, projection
from vllm_gaudi_ucm.ops.block_selection.implementation import Prepared

KINDS = tuple(SummaryKind)


@dataclass(frozen=True)
class Case:
    """spans: (rows, candidates) of each request with a choice; `before` rows of others lie in front of each."""

    spans: tuple[tuple[int, int], ...] = ((1, 5), (3, 4), (1, 1), (2, 7))
    before: int = 1
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    block_size: int = 8
    dtype: torch.dtype = torch.float32
    pads: int = 3
    poison: float = float("nan")
    seed: int = 0


@dataclass
class Candidates:
    """The arguments of `block_scores`, and of each span the (rows, entries) that they mean."""

    query: Tensor
    key_cache: Tensor
    blocks: Tensor
    spans: Tensor
    first_rows: Tensor
    num_rows: Tensor
    max_rows: int
    scale: float
    meant: list[tuple[range, list[int]]]

    def scores(
        self,
        kind: SummaryKind,
        *,
        summaries: Tensor | None = None,
        implementation: str = "reference",
        prepared: Prepared | None = None,
    ) -> Tensor:
        """Of summaries of the candidates alone, all others being whatever they are."""
        summaries = self.summaries(kind) if summaries is None else summaries
        rest = (self.blocks, self.spans, self.first_rows, self.num_rows, self.max_rows, self.scale)
        return block_scores(self.query, summaries, *rest, kind, implementation=implementation, prepared=prepared)

    def prepare(self, implementation: str) -> Prepared | None:
        rows = self.spans, self.first_rows, self.num_rows, self.max_rows
        return prepare_spans(*rows, self.num_rows, self.num_rows, 1, implementation=implementation)

    def summaries(self, kind: SummaryKind) -> Tensor:
        summaries = new_summaries(self.key_cache, kind)
        write_summaries(self.key_cache, self.blocks, summaries, kind)
        return summaries


def build(case: Case) -> Candidates:
    """Entries of a span in any order; rows, blocks and pads that are nobody's hold poison."""
    random = torch.Generator().manual_seed(case.seed)
    used = sum(candidates for _, candidates in case.spans)
    free = (1 + torch.randperm(used + 2, generator=random)).tolist()
    total = sum(rows + case.before for rows, _ in case.spans) + case.before
    query = torch.full((total, case.heads, case.dim), case.poison, dtype=case.dtype)
    cache = torch.full((used + 3, case.block_size, case.kv_heads, case.dim), case.poison, dtype=case.dtype)
    meant: list[tuple[range, list[int]]] = []
    blocks: list[int] = []
    spans: list[int] = []
    row = 0
    for span, (rows, candidates) in enumerate(case.spans):
        row += case.before
        query[row : row + rows] = torch.randn(rows, case.heads, case.dim, generator=random) * 2
        mine = [free.pop() for _ in range(candidates)]
        cache[mine] = torch.randn(candidates, case.block_size, *cache.shape[2:], generator=random).to(case.dtype)
        meant.append((range(row, row + rows), list(range(len(blocks), len(blocks) + candidates))))
        blocks += mine
        spans += [span] * candidates
        row += rows
    first = torch.tensor([rows.start for rows, _ in meant] + [total - 1])
    count = torch.tensor([len(rows) for rows, _ in meant] + [0])
    ids, owners = (
        torch.tensor(entries + [pad] * case.pads, dtype=torch.int64)
        for entries, pad in ((blocks, 0), (spans, len(meant)))
    )
    most = max((rows for rows, _ in case.spans), default=1)
    return Candidates(query, cache, ids, owners, first, count, most, case.dim**-0.5, meant)


def expected_scores(candidates: Candidates, kind: SummaryKind) -> np.ndarray:
    """float64 [candidates]: the definition, candidate by candidate, row by row and head by head."""
    result = np.zeros(candidates.blocks.shape[0])
    query, keys = candidates.query.double().numpy(), candidates.key_cache.double().numpy()
    heads, kv_heads = query.shape[1], keys.shape[2]
    for rows, entries in candidates.meant:
        for row in rows:
            for head in range(heads):
                own = [keys[int(candidates.blocks[entry]), :, head * kv_heads // heads] for entry in entries]
                estimates = np.array([_estimate(query[row, head], key, candidates.scale, kind) for key in own])
                share = np.exp(estimates - estimates.max(initial=-np.inf))
                result[entries] += share / share.sum() / (len(rows) * heads)
    return result


def true_mass(candidates: Candidates) -> np.ndarray:
    """float64 [candidates]: the attention that each block gets among the candidates, averaged over rows and heads."""
    result = np.zeros(candidates.blocks.shape[0])
    query, keys = candidates.query.double().numpy(), candidates.key_cache.double().numpy()
    heads, kv_heads = query.shape[1], keys.shape[2]
    for rows, entries in candidates.meant:
        blocks = candidates.blocks[entries].numpy()
        for row in rows:
            for head in range(heads):
                scores = keys[blocks, :, head * kv_heads // heads] @ query[row, head] * candidates.scale
                weights = np.exp(scores - scores.max()).sum(1)
                result[entries] += weights / weights.sum() / (len(rows) * heads)
    return result


def _estimate(query: np.ndarray, keys: np.ndarray, scale: float, kind: SummaryKind) -> float:
    """The block's log-mean-exp of scores, as far as the summary of its keys [tokens, dim] tells."""
    if kind is SummaryKind.MINMAX:
        bound = np.maximum(query * keys.min(0), query * keys.max(0)).sum()
        return float((bound + query @ (keys.min(0) + keys.max(0)) / 2) / 2 * scale)
    if kind is SummaryKind.CODES:
        near = _near_keys(keys, projection(keys.shape[1], torch.device("cpu")).double().numpy())
        scores = near @ query * scale
        return float(np.log(np.exp(scores - scores.max()).mean()) + scores.max())
    means = _means(keys, kind)
    weights = np.array([REST_WEIGHT, *[1] * (len(means) - 1)]) / (REST_WEIGHT + len(means) - 1)
    if kind is SummaryKind.HASH:
        rotation = projection(keys.shape[1], torch.device("cpu")).double().numpy()
        codes, level = _codes(means @ rotation.T)
        gain = 2.0 ** (np.round(level) / 16)
        scores = np.where(codes >= 0, 1.0, -1.0) @ (rotation @ query) * gain * scale
    else:
        scores = means @ query * scale
    return float(np.log(weights @ np.exp(scores - scores.max())) + scores.max())


def _means(keys: np.ndarray, kind: SummaryKind) -> np.ndarray:
    """The mean of each box of a block's keys [tokens, dim]."""
    far = np.argsort(-((keys - keys.mean(0)) ** 2).sum(1), kind="stable")[: kind.vectors(len(keys)) - 1]
    rest = [token for token in range(len(keys)) if token not in far]
    return np.concatenate([keys[rest].mean(0, keepdims=True), keys[far]])


def _near_keys(keys: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    """The keys [tokens, dim] that mean, codes and gains stand for."""
    rotated = keys @ rotation.T
    mean = rotated.mean(0)
    codes, level = _codes(rotated - mean)
    gain = np.where(level < -127.5, 0, 2.0 ** (np.round(level) / 16))
    steps, step = _mean_steps(mean)
    return ((np.round(steps) * step).ravel() + np.where(codes >= 0, 1, -1) * gain[:, None]) @ rotation


def _mean_steps(mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A rotated mean in eight pieces, in steps that are not yet rounded, and the size of a step of each piece.

    The largest element of a piece is about 124 steps; a piece whose elements are all below 2^-8 is 0.
    """
    pieces = mean.reshape(8, -1)
    level = np.round(16 * np.log2(np.maximum(np.abs(pieces).max(1, keepdims=True), 1e-30)))
    step = 2.0 ** (np.maximum(level, -128) / 16) / 124
    return np.where(level <= -128, 0, pieces / step), step


def _codes(rotated: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Vectors in the directions of the projection, and their gains in steps, not yet rounded."""
    norm = np.maximum(np.abs(rotated).sum(1), 1e-30)
    return rotated, 16 * np.log2(np.maximum((rotated**2).sum(1) / norm, 1e-30))


def may_round_differently(candidates: Candidates, kind: SummaryKind = SummaryKind.HASH) -> bool:
    """Returns whether float32 may round a sign, a gain or a mean of sign codes to another side than float64."""
    keys = candidates.key_cache.double().numpy()[candidates.blocks.unique().numpy()]
    rotation = projection(keys.shape[-1], torch.device("cpu")).double().numpy()
    for own in keys.transpose(0, 2, 1, 3).reshape(-1, keys.shape[1], keys.shape[3]):
        rotated = (_means(own, kind) if kind is SummaryKind.HASH else own) @ rotation.T
        mean = np.zeros(rotated.shape[1]) if kind is SummaryKind.HASH else rotated.mean(0)
        codes, level = _codes(rotated - mean)
        codes, level = codes[level > -127], level[level > -127]
        if (np.abs(level % 1 - 0.5) < 1e-4).any() or (np.abs(codes) < 1e-6).any():
            return True
        if kind is SummaryKind.CODES and own.any() and _is_close_to_a_step(mean):
            return True
    return False


def _is_close_to_a_step(mean: np.ndarray) -> bool:
    steps, step = _mean_steps(mean)
    level = 16 * np.log2(np.abs(steps * step).max(1).clip(1e-30))
    return any((np.abs(numbers % 1 - 0.5) < 1e-4).any() for numbers in (steps, level))
