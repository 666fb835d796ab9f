"""The gated delta rule on CUDA: decodes in one Triton launch, and prompts in two.

Kernels are imported where they are launched, because triton is optional.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.gated_delta.impl.cuda.tiles import covers, scan_prompts
from vllm_gaudi_ucm.ops.gated_delta.impl.tiled import TiledDelta
from vllm_gaudi_ucm.ops.gated_delta.implementation import DeltaRows
from vllm_gaudi_ucm.ops.registry import why_not_triton
from vllm_gaudi_ucm.ops.state_rows import StateRows, rows_together

STATE, WARPS = 4096, 4  # elements of a state that a program keeps in registers, and its warps
GATES = 256  # gates of a program


class CudaDelta(TiledDelta):
    """By Triton kernels; if chosen by name, also on a CPU under Triton's interpreter. Prompts in heads of other
    sizes than `covers` says, or in another dtype than bfloat16, take torch's products.
    """

    devices: ClassVar[frozenset[str] | None] = frozenset({"cuda"})
    priority: ClassVar[int] = 20
    traceable: ClassVar[bool] = False

    def unavailable(self, device: str) -> str | None:
        return why_not_triton(device)

    def scan(self, rows: DeltaRows, states: Tensor, step: StateRows, *, normalise: bool) -> Tensor:
        if torch.float64 in (rows.v.dtype, states.dtype):
            return super().scan(rows, states, step, normalise=normalise)
        if step.tile_rows.numel() and not covers(states.shape[2], states.shape[3], rows.v.dtype):
            # results of requests with few rows are written over
            prompts = step._replace(few_rows=step.few_rows[:0])
            found = super().scan(rows, states, prompts, normalise=normalise)
        else:
            # pads of a step have rows, too
            found = torch.zeros(rows.v.shape, dtype=rows.v.dtype, device=rows.v.device)
            if step.tile_rows.numel():
                scan_prompts(rows, states, step, found, normalise=normalise)
        update_few(rows, states, step, found, normalise=normalise)
        return found

    def gates(self, a: Tensor, b: Tensor, a_log: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        rows, parts, part = a.shape
        if not rows or a.stride(2) != 1 or b.stride() != a.stride():
            return super().gates(a, b, a_log, bias)
        from vllm_gaudi_ucm.ops.gated_delta.impl.cuda.triton import update as kernels

        heads = parts * part
        log_decay, beta = torch.empty((2, rows, heads), dtype=torch.float32, device=a.device)
        kernels.open_gates[(-(-rows * heads // GATES),)](
            *(a, b, a_log, bias, log_decay, beta, rows * heads, a.stride(0), a.stride(1)),
            HEADS=heads,
            PART=part,
            BLOCK=GATES,
            num_warps=WARPS,
        )
        return log_decay, beta


def update_few(rows: DeltaRows, states: Tensor, step: StateRows, found: Tensor, *, normalise: bool) -> None:
    """Computes requests with few rows, and writes their results to `found`, [rows, heads, value_dim], contiguous."""
    from vllm_gaudi_ucm.ops.gated_delta.impl.cuda.triton import update as kernels

    requests, few = step.few_rows.shape
    if not requests * few:
        return
    _, heads, key_dim, value_dim = states.shape
    q, k, v = (rows_together(each) for each in (rows.q, rows.k, rows.v))
    keys = 1 << (key_dim - 1).bit_length()
    values = min(1 << (value_dim - 1).bit_length(), max(STATE // keys, 1))
    kernels.update_deltas[(requests * heads * -(-value_dim // values),)](
        *(q, k, v, rows.log_decay.float().contiguous(), rows.beta.float().contiguous()),
        *(states, found, step.few_rows, step.few_sources, step.few_targets),
        *(key_dim**-0.5, q.stride(0), k.stride(0), v.stride(0)),
        HEADS=heads,
        REPEATS=heads // k.shape[1],
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        FEW=few,
        NORMALISE=normalise,
        KEYS=keys,
        VALUES=values,
        num_warps=WARPS,
    )
