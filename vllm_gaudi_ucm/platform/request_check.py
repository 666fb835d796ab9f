"""What a request may ask for: sampling parameters that would be ignored, and our own keys among its extra arguments."""

from __future__ import annotations

from typing import Any

from vllm_gaudi_ucm.options.unsupported import UnsupportedRequestError
from vllm_gaudi_ucm.sparse.request_options import read_extra_args


def check_request(params: Any) -> None:
    """Raises ValueError that names the parameter, what was found and what to do. params: `SamplingParams`."""
    read_extra_args(getattr(params, "extra_args", None))
    for name in ("prompt_logprob_token_ids", "thinking_token_budget"):
        if getattr(params, name, None) is not None:
            raise UnsupportedRequestError(name)
    if getattr(params, "watermarking", None):
        raise UnsupportedRequestError("watermarking")
