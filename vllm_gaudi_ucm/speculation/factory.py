"""The proposer that the engine's configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_gaudi_ucm.runner.decoder import Decoder
from vllm_gaudi_ucm.runner.true_shape_execution import TrueShapeExecution
from vllm_gaudi_ucm.speculation.draft_model import DraftModelProposer
from vllm_gaudi_ucm.speculation.ngram import NgramProposer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.config import AttentionConfig
    from vllm_gaudi_ucm.runner.request_table import RequestTable
    from vllm_gaudi_ucm.speculation.proposer import DraftProposer


def make_proposer(
    vllm_config: VllmConfig,
    attention: AttentionConfig,
    draft_model: Decoder | None,
    table: RequestTable,
    block_size: int,
    device: torch.device,
) -> DraftProposer | None:
    """None without speculative decoding; features.py lets no other method pass.

    Args:
        vllm_config: the engine's.
        attention: kernels of a draft model, the target's.
        draft_model: where the method has one.
        table: the requests.
        block_size: tokens per cache block.
        device: where the draft model runs.
    """
    config = vllm_config.speculative_config
    if config is None:
        return None
    if draft_model is not None:
        execution = TrueShapeExecution(draft_model, attention, block_size, device)
        return DraftModelProposer(execution, table, block_size, config.draft_model_config.max_model_len)
    assert config.prompt_lookup_min is not None
    assert config.prompt_lookup_max is not None
    return NgramProposer(table, config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max)
