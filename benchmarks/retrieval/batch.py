"""Sequences of the retrieval task as tensors, and the model's answers to them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.retrieval.data import Task, make_sequence, spread_positions


class Batch(NamedTuple):
    """int64: tokens and positions `[sequences, length]`, rows and answers `[sequences, look-ups]`."""

    tokens: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    answers: torch.Tensor


def make_batch(task: Task, sequences: int, rng: np.random.Generator, max_positions: int | None = None) -> Batch:
    """A batch with true positions, or with positions spread over as many as `max_positions`."""
    drawn = [make_sequence(task, rng) for _ in range(sequences)]
    spans = [task.length if max_positions is None else int(rng.integers(task.length, max_positions + 1)) for _ in drawn]
    positions = [spread_positions(one.starts, span, rng) for one, span in zip(drawn, spans, strict=True)]
    columns = ([one.tokens for one in drawn], positions, [one.rows for one in drawn], [one.answers for one in drawn])
    return Batch(*(torch.from_numpy(np.stack(column)) for column in columns))


def answer_logits(model: Any, batch: Batch) -> torch.Tensor:
    """Logits `[sequences, look-ups, vocabulary]` of the asked rows, all tokens attended densely."""
    # The explicit mask of ones says that a gap between positions does not start another sequence.
    mask = torch.ones_like(batch.tokens)
    hidden = model.model(input_ids=batch.tokens, position_ids=batch.positions, attention_mask=mask).last_hidden_state
    asked = hidden.gather(1, batch.rows[..., None].expand(-1, -1, hidden.shape[-1]))
    return model.lm_head(asked)


@torch.inference_mode()
def accuracy(model: Any, task: Task, sequences: int, seed: int) -> float:
    """Share of look-ups answered rightly, at true positions, one sequence at a time."""
    rng = np.random.default_rng(seed)
    right = [
        (answer_logits(model, batch).argmax(-1) == batch.answers).float().mean()
        for batch in (make_batch(task, 1, rng) for _ in range(sequences))
    ]
    return float(torch.stack(right).mean())
