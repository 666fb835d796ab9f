"""Single rows of few tokens: a program per row and kv head writes the result directly, instead of sharing work
evenly.
"""

from __future__ import annotations

from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.layer import Layer, multiprocessors
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.plan import Lists, spans_tile
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.triton.softmax import attend_rows
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.work import Work

# Up to this many tokens in total, a program per row and kv head without a merge is faster than many programs and a
# merge (H200, one request of 128 tokens 7.5 -> 4.5 us, of 256 7.6 -> 6.2, of 512 8.3 -> 9.9).
FINAL_TOKENS = 256
# The same if no row has more tokens, however many rows there are (64 rows of 128 tokens 0.0175 -> 0.0088 ms), and up to
# this many tokens per row if rows alone fill the GPU (64 of 1024 tokens 0.076 -> 0.069 ms, but 16 0.0266 -> 0.0268).
FINAL_OF_MANY, FILLED = 1152, 3


def is_short(layer: Layer, tokens: int, of_row: int) -> bool:
    """True if a program per row and kv head is faster than even shares and a merge.

    of_row: no row has more tokens; 0: not known.
    """
    if tokens <= FINAL_TOKENS or 0 < of_row <= FINAL_TOKENS:
        return True
    fills = layer.rows * layer.kv_heads >= FILLED * multiprocessors(layer.query.device)
    return fills and 0 < of_row <= FINAL_OF_MANY


def finished(layer: Layer, lists: Lists, block_size: int) -> Work:
    """Launches one program per row with all of its blocks, which writes the result directly."""
    sizes = {**layer.sizes(), **spans_tile(layer, 1).sizes(), "BLOCK_SIZE": block_size}

    def launch() -> None:
        attend_rows[(layer.rows, layer.kv_heads)](
            layer.query, layer.key_cache, layer.value_cache, lists.blocks, lists.lo, lists.hi, lists.offsets,
            layer.out, layer.sinks, layer.scale, lists.num_lists,
            *layer.query.stride()[:2], *layer.cache_strides(), *layer.out.stride()[:2], **sizes,
            SINKS=layer.sinks is not None,
        )  # fmt: skip

    return Work(launch, None)
