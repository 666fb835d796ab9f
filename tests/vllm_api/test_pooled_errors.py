"""A pooled request that failed: vLLM's output processor would take an output without a vector for one with tokens."""

from __future__ import annotations

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_gaudi_ucm.vllm_api.blocks import pool_nothing


def test_a_failed_request_gets_an_empty_vector_and_others_keep_theirs() -> None:
    failed, other = (EngineCoreOutput(name, [], finish_reason=FinishReason.ERROR) for name in ("failed", "other"))
    outputs = {0: EngineCoreOutputs(outputs=[failed]), 3: EngineCoreOutputs(outputs=[other])}
    pool_nothing(outputs, {"failed", "aborted"})
    assert other.pooling_output is None
    # the engine's process sends it
    sent = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs[0]))
    assert sent.outputs[0].pooling_output.shape == (0,)
    assert sent.outputs[0].finish_reason is FinishReason.ERROR
