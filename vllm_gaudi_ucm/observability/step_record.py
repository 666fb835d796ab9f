"""The record of an executed step, which the phase log writes and its summary counts."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One executed step: its shape, its size, and its times.

    A pair is one (row, token) product of one attention head that a part really computed, so the pair counts
    compare the attention work of the parts.
    """

    step: int
    bucket: Bucket
    """The true shape of the step."""
    padded: Bucket
    """The shape it ran in."""
    requests: int
    prompts: int
    """Requests with more than one scheduled token."""
    tokens: int
    causal_pairs: int
    shared_pairs: int
    unique_pairs: int
    plan_ms: float
    forward_ms: float
    sample_ms: float
    selected_pairs: int = 0
    sparse: int = 0
    """Requests that attended to a selection of their context."""
    loaded_blocks: int = 0
    """Blocks that a connector has filled since the step before."""
    saved_blocks: int = 0
    """Blocks that it has stored since then."""
    transfer_ms: float = 0.0
    """Duration of its calls in the step since then; not included in the other times."""
    prompt_remainder: int = 0
    """1 if it ran in a graph for prompt remainders, not in a bucket."""
    host_reads: int = 0
    """Reads of the device that it waited for, counted at static shapes."""
    host_stages: tuple[str, ...] = ()
    """Stages that ran on the host."""
    copied_blocks: int = 0
    """Blocks copied before the step, for requests that go on writing them (partial hits)."""
    moved_blocks: int = 0
    """Blocks that compaction moved."""
    swapped_out_blocks: int = 0
    """Blocks of preempted requests that went to host memory."""
    swapped_in_blocks: int = 0
    """Blocks that came back."""
    time: float = 0.0
    """When it ended, in seconds since 1970; 0: it was only modelled."""
