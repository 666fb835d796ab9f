"""Presence, frequency and repetition penalties at one width, whatever the lengths of prompts and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.request_table import UNKNOWN_TOKEN, LiveRequest
from vllm_gaudi_ucm.execution.graph_manager import Compile, Stage, uncompiled
from vllm_gaudi_ucm.sampling.sampling import SamplingBatch, has_penalty
from vllm_gaudi_ucm.sampling.stages.staged_rows import StagedRows
from vllm_gaudi_ucm.vllm_api.sampling import apply_penalties

if TYPE_CHECKING:
    from vllm_gaudi_ucm.execution.carried_tokens import CarriedTokens


class Penalties:
    """The stage on the device.

    Args:
        max_rows: most logits rows of a step.
        carried: tokens of the previous step, if the host may not know them.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        stage: Stage,
        region: Compile = uncompiled,
        carried: CarriedTokens | None = None,
    ) -> None:
        self._stage = stage
        self._penalise = region(penalised)
        self._counts = TokenCounts(max_rows, vocab_size, device, stage, region, carried)
        self._presence = StagedRows((max_rows,), np.float32, 0.0, device)
        self._frequency = StagedRows((max_rows,), np.float32, 0.0, device)
        self._repetition = StagedRows((max_rows,), np.float32, 1.0, device)

    def apply(
        self, logits: torch.Tensor, batch: SamplingBatch, slots_before: Mapping[LiveRequest, int]
    ) -> torch.Tensor:
        """Leaves the logits as they are and returns penalised ones. slots_before: see TokenCounts."""
        rows, metadata, key = len(logits), batch.metadata, batch.membership
        self._presence.keep(key, rows, metadata.presence_penalties.numpy)
        self._frequency.keep(key, rows, metadata.frequency_penalties.numpy)
        self._repetition.keep(key, rows, metadata.repetition_penalties.numpy)
        wanted = [request if has_penalty(request.sampling_params) else None for request in batch.slots]
        return self._run(logits, self._counts.stage(wanted, rows, slots_before))

    def warm(self, logits: torch.Tensor) -> None:
        for part in (self._presence, self._frequency, self._repetition):
            part.stage(np.zeros(0, np.float32), len(logits))
        self._counts.warm()
        self._run(logits, self._counts.stage((), len(logits), {}))

    def refill(self) -> None:
        self._counts.refill()
        for rows in (self._presence, self._frequency, self._repetition):
            rows.refill()

    def _run(self, logits: torch.Tensor, counted: CountedRows) -> torch.Tensor:
        factors = (part.staged(len(logits)) for part in (self._presence, self._frequency, self._repetition))
        with self._stage("penalties"):
            found: tuple[torch.Tensor, torch.Tensor] = self._penalise(logits, self._counts.table, counted, *factors)
        self._counts.keep(counted, found[1])
        return found[0]


def penalised(
    logits: torch.Tensor,
    table: torch.Tensor,
    rows: CountedRows,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits with penalties, and the lines to keep. table, rows: see TokenCounts. presence, frequency, repetition:
    float32 [rows]."""
    lines = count_tokens(table, rows)
    counts, in_prompt = read_lines(lines)
    return apply_penalties(logits, in_prompt, counts, presence, frequency, repetition), lines


class CountedRows(NamedTuple):
    """lines: int64 [rows], of the table; the last line is of pads and has nothing. tokens: int64 [rows], a token that
    is counted in the line before it is read. times: int32 [rows], how often, 0 or 1."""

    lines: torch.Tensor
    tokens: torch.Tensor
    times: torch.Tensor


class TokenCounts:
    """Lines of counts for requests that need them, kept as long as there is room, through every change of slots.

    A line costs one token in a step. It is rewritten, counted on the host, for a request that is new, or that got
    several tokens or lost some since it was last read. Outputs may be cut, but are never replaced at once: a preempted
    request comes back with the same ones.

    Args:
        max_rows: most logits rows of a step.
        carried: tokens of the previous step, of which the host knows only the slots.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        stage: Stage,
        region: Compile = uncompiled,
        carried: CarriedTokens | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._stage = stage
        self._write = region(write_lines)
        self._carried = carried
        # twice a token's count, and 1 if it is in the prompt
        self.table = torch.zeros(max_rows + 1, vocab_size, dtype=torch.int32, device=device)
        self._pad = max_rows
        # requests that have ended take their entries with them
        self._line_of: WeakKeyDictionary[LiveRequest, int] = WeakKeyDictionary()
        self._counted: WeakKeyDictionary[LiveRequest, int] = WeakKeyDictionary()
        self._lines = StagedRows((max_rows,), np.int64, max_rows, device)
        self._tokens = StagedRows((max_rows,), np.int64, vocab_size - 1, device)
        self._times = StagedRows((max_rows,), np.int32, 0, device)
        # of this step and the one before, whose copies may still be under way
        self._written: tuple[list[NDArray], list[NDArray]] = ([], [])

    def stage(
        self, slots: Sequence[LiveRequest | None], rows: int, slots_before: Mapping[LiveRequest, int]
    ) -> CountedRows:
        """Stages the lines of rows. slots: the slot of row i; None if no line is needed. slots_before: previous slots
        of tokens that the host does not know yet.
        """
        self._written = ([], self._written[0])
        wanted = {request for request in slots if request is not None}
        lines, tokens, times = np.full(len(slots), self._pad), np.full(len(slots), self._vocab_size - 1), []
        for row, request in enumerate(slots):
            if request is None:
                times.append(0)
                continue
            lines[row], tokens[row] = self._line(request, wanted), 0
            last, outputs = self._known(request), request.output_token_ids
            times.append(len(outputs) - last)
            if len(outputs) > last:
                tokens[row] = -1 - slots_before[request] if outputs[-1] == UNKNOWN_TOKEN else outputs[-1]
            self._counted[request] = len(outputs)
        counted = CountedRows(
            self._lines.stage(lines, rows),
            self._tokens.stage(tokens, rows),
            self._times.stage(np.array(times, np.int32), rows),
        )
        if self._carried is None:
            return counted
        return counted._replace(tokens=self._carried.fill_in(counted.tokens))

    def keep(self, rows: CountedRows, lines: torch.Tensor) -> None:
        """Lines in which a token has been counted: int32 [rows, vocabulary]."""
        with self._stage("lines of token counts"):
            self._write(self.table, rows.lines, lines)

    def warm(self) -> None:
        self._write_line(self._pad, np.zeros(self._vocab_size, np.int32))

    def refill(self) -> None:
        """Everything that outlives a step, after a warm-up that computed nothing."""
        self.table.zero_()
        self._counted.clear()
        for rows in (self._lines, self._tokens, self._times):
            rows.refill()

    def _line(self, request: LiveRequest, wanted: set[LiveRequest]) -> int:
        if request not in self._line_of:
            self._line_of[request] = self._free_line(wanted)
        return self._line_of[request]

    def _free_line(self, wanted: set[LiveRequest]) -> int:
        """One without a request, or of a request that this step does not sample."""
        free = set(range(self._pad)).difference(self._line_of.values())
        if free:
            return free.pop()
        other = next(other for other in self._line_of if other not in wanted)
        self._counted.pop(other, None)
        return self._line_of.pop(other)

    def _known(self, request: LiveRequest) -> int:
        """Returns how many outputs its line has counted: all or all but the last. Rewrites the line if needed."""
        outputs = request.output_token_ids
        known, end = self._counted.get(request, -1), len(outputs)
        if known in (end - 1, end) and known >= 0:
            return known
        known = end - 1 if end and outputs[-1] == UNKNOWN_TOKEN else end
        row = 2 * np.bincount(np.array(outputs[:known], np.int64), minlength=self._vocab_size)
        row[np.array(request.prompt_token_ids, np.int64)] += 1
        self._write_line(self._line_of[request], row.astype(np.int32))
        return known

    def _write_line(self, line: int, row: NDArray[np.int32]) -> None:
        place = np.array([line])
        self._written[0].extend((place, row))
        on_device = (torch.from_numpy(array).to(self._device, non_blocking=True) for array in (place, row[np.newaxis]))
        with self._stage("lines of token counts"):
            self._write(self.table, *on_device)


def write_lines(table: torch.Tensor, lines: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes lines in place. table: int32 [lines, vocabulary], with a storage of its own, which only this function
    writes; a region that read it as well would copy all of it on a Gaudi. lines: int64 [n]. rows: int32 [n,
    vocabulary].
    """
    table.index_copy_(0, lines, rows)


def count_tokens(table: torch.Tensor, rows: CountedRows) -> torch.Tensor:
    """Returns the rows' lines with a token counted in each: int32 [rows, vocabulary]. The table does not change."""
    lines = table.index_select(0, rows.lines)
    return lines.scatter_add(1, rows.tokens.unsqueeze(1), 2 * rows.times.unsqueeze(1))


def read_lines(lines: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [rows, vocabulary] twice: int32 counts of tokens among the outputs, and whether the prompt has them."""
    return lines >> 1, (lines & 1) != 0
