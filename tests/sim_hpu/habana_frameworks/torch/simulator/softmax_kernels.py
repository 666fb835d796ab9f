"""Softmax in parts: `softmax_fa2` over keys, `block_softmax` and its adjustment over KV blocks. Gaudi 3's."""

import math

from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.duties import duties
from habana_frameworks.torch.simulator.kernel import Kernel

import torch
from torch import Tensor

GAUDI3 = 29
ROWS_PER_VECTOR = 8
# Numbers in a vector register, by dtype.
VECTORS = {torch.bfloat16: 128, torch.float32: 64}


def softmax_fa2(
    input: Tensor,
    *,
    inputM: Tensor,
    inputL: Tensor,
    dim: int = -1,
    experimental_mode: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One step of a softmax that goes over keys in parts.

    input: scores, bf16 or f32 [..., rows, keys]. inputM, inputL: the same dtype [..., padded]: maximum and sum of the
        parts before (-inf and 0 at first), where row r stands at r // 8 * 128 + r % 8 (64 for f32), and
        padded = ceil(rows / 8) * 128. dim: the last. experimental_mode: of fp8, which this stand-in lacks.

    Returns exp(scores - max) [..., rows, keys], and max, sum and exp(inputM - max) [..., padded]. What stands between
    the rows is not defined (NaN here). Source: the bridge's own test of this kernel.
    """
    _check_softmax_fa2(input, inputM, inputL)
    rows, vector = input.shape[-2], VECTORS[input.dtype]
    before, total = unpad(inputM, rows, vector), unpad(inputL, rows, vector)
    top = torch.maximum(before, input.amax(-1))
    weights = torch.exp(input - top[..., None])
    fixup = torch.exp(before - top)
    total = fixup * total + weights.sum(-1)
    return weights, _pad(top, vector), _pad(total, vector), _pad(fixup, vector)


def _check_softmax_fa2(scores: Tensor, before: Tensor, total: Tensor) -> None:
    name = "hpu.softmax_fa2"
    _check_gaudi3(name)
    vector = VECTORS.get(scores.dtype)
    if vector is None:
        duties.refuse(GAUDI3, name, f"scores are {scores.dtype}", "use bfloat16 or float32")
        return
    padded = (*scores.shape[:-2], padded_rows(scores.shape[-2], vector))
    for argument, tensor in (("inputM", before), ("inputL", total)):
        if tuple(tensor.shape) != padded or tensor.dtype != scores.dtype:
            found = f"{argument} is {tensor.dtype} {tuple(tensor.shape)}, expected {scores.dtype} {padded}"
            duties.refuse(GAUDI3, name, found, "eight rows stand at the beginning of each vector register")


def _check_gaudi3(name: str) -> None:
    if not card.is_gaudi3():
        duties.refuse(GAUDI3, name, f"needs a Gaudi 3, this card is {card.device_type}", "use the plain operators")


def padded_rows(rows: int, vector: int) -> int:
    """Entries that the maxima of so many rows take."""
    return math.ceil(rows / ROWS_PER_VECTOR) * vector


def _pad(values: Tensor, vector: int) -> Tensor:
    rows = values.shape[-1]
    padded = values.new_full((*values.shape[:-1], padded_rows(rows, vector)), float("nan"))
    vectors = padded.unflatten(-1, (-1, vector))
    filled = torch.nn.functional.pad(values, (0, -rows % ROWS_PER_VECTOR), value=float("nan"))
    vectors[..., :ROWS_PER_VECTOR] = filled.unflatten(-1, (-1, ROWS_PER_VECTOR))
    return padded


def unpad(padded: Tensor, rows: int, vector: int) -> Tensor:
    """The rows of padded maxima or sums."""
    return padded.unflatten(-1, (-1, vector))[..., :ROWS_PER_VECTOR].flatten(-2)[..., :rows]


def block_softmax(attn: Tensor, block_bias: Tensor, block_groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Exponentials of each block about its own maximum.

    attn: scores, bf16 or f32 [blocks, kv_heads, heads of each, rows, block size]. block_bias: added, broadcast over it.
    block_groups: int [blocks], -1 for blocks that do not count: their exponentials are zeros.

    Returns exponentials like attn, and maxima and sums [blocks, padded], where the first kv_heads * heads * rows are
    true, and nothing is (NaN here) in blocks that do not count. Source: the bridge's own test.
    """
    if attn.dim() != 5:
        duties.refuse(GAUDI3, "hpu.block_softmax", f"{attn.dim()}-d scores", "reshape them to 5-d")
    scores = attn.float() + block_bias.float()
    top = scores.amax(-1, keepdim=True)
    exponentials = torch.exp(scores - top)
    counts = (block_groups >= 0).reshape(-1, 1, 1, 1, 1)
    total = exponentials.sum(-1, keepdim=True)
    exponentials = torch.where(counts, exponentials, torch.zeros_like(exponentials))
    width = math.prod(attn.shape[1:4])
    padding = (0, -width % VECTORS.get(attn.dtype, 128))

    def flat(values: Tensor) -> Tensor:
        shown = torch.where(counts, values, torch.full_like(values, float("nan"))).flatten(1)
        return torch.nn.functional.pad(shown, padding, value=float("nan")).to(attn.dtype)

    return exponentials.to(attn.dtype), flat(top), flat(total)


def block_softmax_adjustment(
    block_max: Tensor,
    block_sums: Tensor,
    block_groups: Tensor,
    batch_size: int,
    out_shape: list[int] | None = None,
) -> Tensor:
    """exp(maximum of a block - maximum of its group) / sum of its group: what a block's exponentials are multiplied by.

    block_max, block_sums: bf16 or f32, 5-d [blocks, kv_heads, heads of each, rows, 1], or padded as `block_softmax`
        returns them, with out_shape. block_groups: int [blocks], group of each, below batch_size; -1: NaN comes back.
    out_shape: of the result, its first dimension the blocks.
    """
    name = "hpu.block_softmax_adjustment"
    _check_gaudi3(name)
    if out_shape is None and block_max.dim() != 5:
        found = f"If no out_shape provided, block_maxes tensor must be 5-dimensional, got {block_max.dim()}"
        duties.refuse(GAUDI3, name, found, "give out_shape")
    shape = list(block_max.shape) if out_shape is None else out_shape
    width = math.prod(shape[1:])
    top, total = (tensor.flatten(1)[:, :width].float() for tensor in (block_max, block_sums))
    counts = (block_groups >= 0)[:, None]
    # one group more, for blocks that do not count
    group = torch.where(block_groups >= 0, block_groups, batch_size).long()[:, None].expand_as(top)
    groups = top.new_full((batch_size + 1, width), float("-inf"))
    highest = groups.scatter_reduce(0, group, torch.where(counts, top, float("-inf")), "amax").gather(0, group)
    scaled = torch.exp(top - highest)
    sums = torch.zeros_like(groups).scatter_add(0, group, torch.where(counts, scaled * total, 0.0)).gather(0, group)
    rescale = torch.where(counts, scaled / sums, float("nan"))
    return rescale.reshape(shape).to(block_max.dtype)


KERNELS = (
    Kernel(
        "softmax_fa2(Tensor input, *, Tensor inputM, Tensor inputL, int dim=-1, bool experimental_mode=False) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        softmax_fa2,
        since="1.24.0.279",
    ),
    Kernel(
        "block_softmax(Tensor attn, Tensor block_bias, Tensor block_groups) -> (Tensor, Tensor, Tensor)",
        block_softmax,
        since="1.22.0.494",
    ),
    Kernel(
        "block_softmax_adjustment(Tensor block_max, Tensor block_sums, Tensor block_groups, int batch_size, "
        "int[]? out_shape=None) -> Tensor",
        block_softmax_adjustment,
        since="1.22.0.494",
    ),
)
