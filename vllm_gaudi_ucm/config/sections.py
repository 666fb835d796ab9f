"""Sections of the configuration that no room registers: attention, CPU, several workers, KV cache, preemption."""

from typing import Annotated, Literal

from pydantic import Field

from vllm_gaudi_ucm.ops.registry import AUTO
from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION
from vllm_gaudi_ucm.options.errors import NOTE
from vllm_gaudi_ucm.options.section import Section
from vllm_gaudi_ucm.options.values import BYTES_NOTE, ByteSize, NameOf


class AttentionConfig(Section):
    """Options of Unified Attention and its three parts."""

    implementation: Annotated[str, NameOf(ATTENTION, AUTO)] = Field(
        default="auto",
        description="Kernels to use. `auto` takes the fastest for the device; `reference` defines the semantics and "
        "runs everywhere, slower; `cpu` is torch on a CPU, `native` C++ there, from a wheel or built here; "
        "`hpu` is laid out for Gaudi and runs everywhere; `cuda` is Triton on an NVIDIA GPU.",
    )
    contiguous_pa: Literal["auto"] | bool = Field(
        default="auto",
        description="Unique part: `true` reads one contiguous slice of the KV cache, `false` gathers blocks by id, "
        "`auto` takes the cheaper one in every step.",
    )
    causal_slice: Annotated[int, Field(ge=16, le=8192)] = Field(
        default=512,
        description="Rows per slice of the causal part. Larger slices launch less work more efficiently, smaller ones "
        "skip more of the masked keys.",
    )


class CpuConfig(Section):
    """Options of the CPU as the reference device."""

    threads: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Threads of torch in the worker. Without it `OMP_NUM_THREADS`, and on a CPU without either one for "
        "each core that the worker may use: affinity, a container's quota and other workers of the server count.",
    )
    packed_weights: bool = Field(
        default=True,
        description="Reorder linear weights for oneDNN when the model is loaded: two to five times faster, for a "
        "second copy of the output head and about a second of start-up.",
    )
    compact_weights: bool = Field(
        default=True,
        description="Keep packed weights whose values fit in fewer bits (16, or 4 or 8 bits and a scale for "
        "every 32 inputs) in those too, for steps of few rows; in those alone where the CPU has a matrix unit or "
        "AVX-512. No value changes; takes up to half of the weights' memory more, or as much less.",
    )
    matrix_unit: bool = Field(
        default=True,
        description="Multiply float32 on the CPU's matrix unit (AMX), where it has one, as sums of bfloat16 that are "
        "as exact as float32 arithmetic: linear layers and attention. The last digits differ from those without it.",
    )
    native_graphs: bool = Field(
        default=True,
        description="Record the native kernels of a step of up to 64 rows the first time, and run them without Python "
        "from the third time on. No bit changes.",
    )


class DistributedConfig(Section):
    """Options for several workers of one engine."""

    check_ranks: bool = Field(
        default=False,
        description="Compare in every step what the workers are about to run (step, bucket, blocks) and what they have "
        "sampled, and end the engine at the first difference, which the error names. For finding faults: each "
        "comparison waits for the slowest worker.",
    )


class KvCacheConfig(Section):
    """Options that decide which blocks of the KV cache requests get."""

    partial_hits: bool = Field(
        default=False,
        description="Prefix caching to the token: a request takes the part of a block that agrees with its prompt, as "
        "a copy, where it would compute up to a block's tokens again. For parallel sampling, beam search and prompts "
        "with a common start.",
    )
    granularity: Literal["block", "token"] = Field(
        default="block",
        description="What a request is given of the KV cache. `block`: blocks of `--block-size` tokens, the last one "
        "partly empty. `token`: a slot for each token, nothing rounded up; prefixes are shared to the token. More work "
        "for the scheduler. `--block-size` is then only what attention reads at once.",
    )
    max_total_token_num: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="With `granularity` `token`: slots of the KV cache, allocated at start. Without it as many as its "
        "memory holds.",
    )
    kept_states: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Prefix caching for models with layers that keep a state (Mamba-2, gated delta nets, short "
        "convolutions): states that are kept behind blocks, the ones used last. Each takes the memory of a running "
        "request's state. 0: prefix caching is off for these models.",
    )
    compaction: bool = Field(
        default=False,
        description="Requests get blocks that follow each other where there are any, and before a step a few blocks in "
        "use move down, at most a hundredth of the KV cache, so that attention goes on reading one slice of it "
        "(`ucm.attention.contiguous_pa`) after hours of arrivals and ends.",
    )


class PreemptionConfig(Section):
    """Options for the KV of preempted requests."""

    mode: Literal["recompute", "swap", "auto"] = Field(
        default="recompute",
        description="`recompute` computes a preempted request again when it resumes, as vLLM does. `swap` copies its "
        "blocks to host memory, and back when it resumes. `auto` takes for each request what is faster, by the "
        "measured speeds of the copies and of prompts.",
    )
    host_memory: ByteSize = Field(
        default=4 << 30,
        description="With `swap` and `auto`: most bytes of host memory for blocks, of all workers together, taken as "
        "needed; page-locked where the device copies faster from such. When it is full, requests are computed again.",
        json_schema_extra={NOTE: BYTES_NOTE},
    )

    @property
    def swaps(self) -> bool:
        """Returns whether blocks may go to host memory."""
        return self.mode != "recompute"
