"""A trace mix so small that a tiny model on a CPU serves it."""

from __future__ import annotations

from dataclasses import replace

from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm_tools.traffic.simulation import Lengths, Mix

# A step then takes a millisecond or two, and has as many blocks per request as before.
TOKENS_SCALE = 16
REQUESTS_SCALE = 4


def scaled(mix: Mix, more: int = 1) -> Mix:
    """Scales down tokens per block and per request, and requests; phases and sharing stay the same.

    more: divides all of them once more.
    """
    limits = mix.limits
    tokens, requests = TOKENS_SCALE * more, REQUESTS_SCALE * more

    def shorter(lengths: Lengths) -> Lengths:
        median, sigma, low, high = lengths
        return Lengths(max(1, median // tokens), sigma, max(1, low // tokens), max(1, high // tokens))

    return replace(
        mix,
        limits=Limits(
            max_num_batched_tokens=limits.max_num_batched_tokens // tokens,
            max_num_seqs=limits.max_num_seqs // requests,
            max_model_len=limits.max_model_len // tokens,
            block_size=limits.block_size // tokens,
            num_blocks=limits.num_blocks // requests,
            contiguous=limits.contiguous,
        ),
        clients=mix.clients // requests,
        # an answer takes that much less time, so clients that waited as long as before would hardly ever meet
        think=mix.think / tokens,
        period=mix.period / tokens,
        prefix_length=shorter(mix.prefix_length),
        prompt=shorter(mix.prompt),
        output=shorter(mix.output),
    )
