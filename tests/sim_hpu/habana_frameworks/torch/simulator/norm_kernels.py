"""`rms_norm` and `rotary_pos_embedding`."""

from habana_frameworks.torch.simulator.duties import duties
from habana_frameworks.torch.simulator.kernel import Kernel, same_dtype

import torch
from torch import Tensor

WIDTH = 31
BLOCKWISE, PAIRWISE = 0, 1
_FLOATS = (torch.bfloat16, torch.float32)


def rms_norm(data_in: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(normalised x times gamma in x's dtype, 1 / root mean square in f32 [..., 1]).

    data_in: bf16 or f32 [..., hidden]; 3-d and more. gamma: [hidden], the same dtype.
    """
    _check_norm(data_in, gamma)
    x = data_in.float()
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    return (x * inverse * gamma.float()).to(data_in.dtype), inverse


def _shape_of_norm(data_in: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    _check_norm(data_in, gamma)
    return torch.empty_like(data_in), data_in.new_empty((*data_in.shape[:-1], 1), dtype=torch.float32)


def _check_norm(data_in: Tensor, gamma: Tensor) -> None:
    name = "hpu.rms_norm"
    if data_in.dtype not in _FLOATS:
        duties.refuse(WIDTH, name, f"the input is {data_in.dtype}", "use bfloat16 or float32")
    same_dtype(WIDTH, name, data_in, gamma=gamma)
    if data_in.dim() < 3:
        duties.warn(WIDTH, name, f"a {data_in.dim()}-d input; only 3-d ones are known to work", "reshape it to 3-d")


def rotary_pos_embedding(
    input: Tensor, sin: Tensor, cos: Tensor, position_ids: Tensor | None, offset: int, mode: int
) -> Tensor:
    """Rotated queries or keys; sin stands before cos.

    input: bf16 or f32 [tokens, heads, width] (4-d with a batch). sin, cos: [..., width], broadcast over the heads: the
        halves concatenated twice (mode 0, BLOCKWISE), or each entry twice in a row (mode 1, PAIRWISE).
    position_ids: int [batch, tokens] where sin and cos are whole tables. offset: first row of sin and cos, without ids.
    """
    _check_rotary(input, sin, cos, mode)
    if position_ids is not None:
        sin, cos = (table.squeeze(1).squeeze(0)[position_ids].unsqueeze(1) for table in (sin, cos))
    elif offset:
        sin, cos = (table.narrow(0, offset, input.shape[0]) for table in (sin, cos))
    x = input.float()
    return (x * cos.float() + _turned(x, mode) * sin.float()).to(input.dtype)


def _shape_of_rotary(
    input: Tensor, sin: Tensor, cos: Tensor, position_ids: Tensor | None, offset: int, mode: int
) -> Tensor:
    _check_rotary(input, sin, cos, mode)
    return torch.empty_like(input)


def _check_rotary(input: Tensor, sin: Tensor, cos: Tensor, mode: int) -> None:
    name = "hpu.rotary_pos_embedding"
    for argument, table in (("sin", sin), ("cos", cos)):
        if table.shape[-1] != input.shape[-1]:
            found = f"{argument} is {table.shape[-1]} wide, the rotated part {input.shape[-1]}"
            duties.refuse(WIDTH, name, found, "give tables of the full width: each half or each entry twice")
    same_dtype(WIDTH, name, input, sin=sin, cos=cos)
    if mode not in (BLOCKWISE, PAIRWISE):
        duties.refuse(WIDTH, name, f"mode {mode}", "0 (BLOCKWISE) or 1 (PAIRWISE)")


def _turned(x: Tensor, mode: int) -> Tensor:
    """Each number's partner in its plane, with the sign of a quarter turn."""
    if mode == BLOCKWISE:
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


KERNELS = (
    Kernel("rms_norm(Tensor data_in, Tensor gamma, float epsilon) -> (Tensor, Tensor)", rms_norm, _shape_of_norm),
    Kernel(
        "rotary_pos_embedding(Tensor input, Tensor sin, Tensor cos, Tensor? position_ids, int offset, int mode) "
        "-> Tensor",
        rotary_pos_embedding,
        _shape_of_rotary,
    ),
)
