"""vLLM's sampling."""

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
from vllm.v1.sample.ops.topk_topp_sampler import random_sample
from vllm.v1.sample.sampler import Sampler
from vllm.v1.structured_output.utils import apply_grammar_bitmask, strip_speculative_padding

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
    "build_logitsprocs",
    "random_sample",
    "strip_speculative_padding",
]
