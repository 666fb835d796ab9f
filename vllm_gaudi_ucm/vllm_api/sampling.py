"""Logits to tokens: `vllm.v1.sample`, `vllm.v1.structured_output`; and functions for what they lack.

Extension point: custom logits processors. `LogitsProcessor` is their base class; `BatchUpdate` and
`MoveDirectionality` are types of its methods.
Internal: `BUILTIN_LOGITS_PROCESSORS`, `LogitsProcessors` and `build_logitsprocs`, which make the processors of a batch;
`Sampler`, `SamplingMetadata` and `LogprobsMode`; `apply_grammar_bitmask` and
`strip_speculative_padding`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.config.model import LogprobsMode
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    BatchUpdate,
    LogitsProcessor,
    LogitsProcessors,
    MoveDirectionality,
    build_logitsprocs,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.sample.sampler import Sampler
from vllm.v1.structured_output.utils import apply_grammar_bitmask, strip_speculative_padding

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

__all__ = [
    "BUILTIN_LOGITS_PROCESSORS",
    "BatchUpdate",
    "LogitsProcessor",
    "LogitsProcessors",
    "LogprobsMode",
    "MoveDirectionality",
    "Sampler",
    "SamplingMetadata",
    "apply_grammar_bitmask",
    "apply_penalties",
    "build_logitsprocs",
    "host_sampler",
    "propose_ngram",
    "raise_if_nan_logits",
    "strip_speculative_padding",
]


def raise_if_nan_logits(counts: Mapping[str, int]) -> None:
    """Raises as vLLM's own runner does where `VLLM_RAISE_ON_LOGIT_NANS` is set. counts: NaNs by request id.

    Reason: the check is in an internal module of the GPU worker (`vllm.v1.worker.utils`), which moves.
    Remove when: vLLM checks the counts of `ModelRunnerOutput.num_nans_in_logits` itself.
    """
    from vllm.v1.worker.utils import raise_if_nan_logits as vllm_raise

    vllm_raise(counts)


def host_sampler(logprobs_mode: LogprobsMode, use_fp64_gumbel: bool) -> Sampler:
    """vLLM's sampler for logits on the CPU beside another device.

    Reason: vLLM's own choice (`apply_top_k_top_p`) takes Triton wherever that is installed, whatever the device; it
    cannot read the CPU's memory.
    Remove when: vLLM chooses by the device of the logits.
    """
    sampler = Sampler(logprobs_mode, use_fp64_gumbel)
    choose = sampler.topk_topp_sampler

    def masked(
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits = apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)
        return choose.forward_native(logits, generators, None, None)

    # the instance's attribute is where vLLM itself puts its choice
    choose.forward = masked
    return sampler


def apply_penalties(
    logits: torch.Tensor,
    prompt_token_ids: torch.Tensor,
    output_token_ids: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """vLLM's penalties as plain torch, out of place.

    Args:
        logits: float32 [rows, vocabulary].
        prompt_token_ids, output_token_ids: int64 [rows, width], padded with the vocabulary's size.
        presence, frequency, repetition: float32 [rows].

    Reason: `vllm.model_executor.layers.utils.apply_penalties` calls an operator of vLLM's CUDA library for logits on
    CUDA, which the build without a device does not have.
    Remove when: it asks whether that library is there.
    """
    from vllm._custom_ops import apply_repetition_penalties_torch
    from vllm.model_executor.layers.utils import get_token_bin_counts_and_mask

    rows, vocab_size = logits.shape
    _, in_prompt = get_token_bin_counts_and_mask(prompt_token_ids, vocab_size, rows)
    counts, in_output = get_token_bin_counts_and_mask(output_token_ids, vocab_size, rows)
    logits = logits.clone()
    apply_repetition_penalties_torch(logits, in_prompt, in_output, repetition)
    logits -= frequency.unsqueeze(1) * counts
    logits -= presence.unsqueeze(1) * in_output
    return logits


def propose_ngram(
    token_ids: NDArray[np.int32], min_n: int, max_n: int, max_model_len: int, num_drafts: int
) -> NDArray[np.int32]:
    """vLLM's n-gram search in one request, compiled by numba at its first call.

    Args:
        token_ids: [tokens] of the request.
        min_n, max_n: lengths of the n-grams.
        max_model_len: tokens of the longest request.
        num_drafts: most drafts.

    Returns:
        [at most num_drafts].

    Raises:
        ImportError: numba is not installed.

    Reason: `NgramProposer.propose` wants a copy of all token ids in batch order, has buffers for `max_num_seqs` rows
    only, which a table with preempted requests exceeds, and starts numba's threads, which take the cores of a model on
    the CPU, for a loop that vLLM itself runs on one.
    Remove when: it takes rows of a table, and starts none.
    """
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as search

    return search(token_ids, min_n, max_n, max_model_len, num_drafts)
