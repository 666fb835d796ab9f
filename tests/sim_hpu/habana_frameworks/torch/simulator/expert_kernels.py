"""`mixture_of_experts`: the sum of the chosen experts' outputs, of the experts that this card holds."""

from collections.abc import Callable, Sequence

from habana_frameworks.torch.simulator.duties import duties
from habana_frameworks.torch.simulator.kernel import Kernel
from habana_frameworks.torch.simulator.number_formats import largest, saturated
from habana_frameworks.torch.simulator.state import state

import torch
from torch import Tensor
from torch.nn import functional

EXPERTS = 30
NAME = "hpu.mixture_of_experts"
# Values of a 4-bit float, by its bits.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_FP4_GROUP = 32
_E8M0_BIAS = 127

Activation = Callable[[Tensor], Tensor]
_ACTIVATIONS: dict[str, Activation] = {
    "silu": functional.silu,
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "selu": functional.selu,
}
_TOKENS = "Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights, "
_HOW = "bool permuted_weights, str activation, int experts_min, int experts_max"
_CHUNKS = ", int chunk_size=0, int total_experts=0"


def plain(
    hidden_states: Tensor,
    expert_routing_table: Tensor,
    router_weights: Tensor,
    w1: Sequence[Tensor],
    w2: Sequence[Tensor],
    w3: Sequence[Tensor],
    permuted_weights: bool,
    activation: str,
    experts_min: int,
    experts_max: int,
    chunk_size: int = 0,
    total_experts: int = 0,
) -> Tensor:
    """Three matrices of each expert: gate, up, down. Arguments else as of `fused_weights`."""
    fused = [torch.cat([gate, up], 0 if permuted_weights else 1) for gate, up in zip(w1, w2, strict=True)]
    return fused_weights(
        hidden_states,
        expert_routing_table,
        router_weights,
        fused,
        w3,
        permuted_weights,
        activation,
        experts_min,
        experts_max,
    )


def fused_weights(
    hidden_states: Tensor,
    expert_routing_table: Tensor,
    router_weights: Tensor,
    w12: Sequence[Tensor],
    w3: Sequence[Tensor],
    permuted_weights: bool,
    activation: str,
    experts_min: int,
    experts_max: int,
    chunk_size: int = 0,
    total_experts: int = 0,
) -> Tensor:
    """[tokens, hidden] in the dtype of hidden_states: this card's part of the sum, of experts_min to experts_max.

    hidden_states: bf16 or f32 [tokens, hidden]. expert_routing_table: int64 [tokens, k], numbers of all experts.
    router_weights: [tokens, k] in the dtype of hidden_states, as the weights are. w12, w3: of each expert here
    [2 * inner, hidden] (gate, up) and [hidden, inner], transposed unless `permuted_weights`.
    chunk_size, total_experts: speed alone.
    """
    _check_routing(hidden_states, expert_routing_table, router_weights, torch.int64)
    _check_weights(hidden_states.dtype, w12, w3, experts_min, experts_max)
    act = _activation(activation)

    def expert(x: Tensor, number: int) -> Tensor:
        gate, up = _product(x, w12[number], permuted_weights).chunk(2, -1)
        return _product(act(gate) * up, w3[number], permuted_weights)

    return _sum(hidden_states, expert_routing_table, router_weights, expert, experts_min, experts_max)


def bias_fused_weights(
    hidden_states: Tensor,
    expert_routing_table: Tensor,
    router_weights: Tensor,
    w12: Sequence[Tensor],
    w3: Sequence[Tensor],
    w12_bias: Sequence[Tensor],
    w3_bias: Sequence[Tensor],
    *,
    permuted_weights: bool,
    experts_min: int,
    experts_max: int,
    chunk_size: int = 0,
    total_experts: int = 0,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """With biases, and the activation of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), both within the limit.

    Gate and up stand in alternate rows of w12 and its bias. Arguments else as of `fused_weights`.
    """
    _check_routing(hidden_states, expert_routing_table, router_weights, torch.int64)
    _check_weights(hidden_states.dtype, w12, w3, experts_min, experts_max)

    def expert(x: Tensor, number: int) -> Tensor:
        both = _product(x, w12[number], permuted_weights) + w12_bias[number]
        gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
        inner = (up + 1) * gate * torch.sigmoid(alpha * gate)
        return _product(inner, w3[number], permuted_weights) + w3_bias[number]

    return _sum(hidden_states, expert_routing_table, router_weights, expert, experts_min, experts_max)


def _scaled(values: Tensor, scale: Tensor, permuted_weights: bool) -> Tensor:
    """bf16 weights of 8-bit values, by their one scale or that of each output."""
    by_output = scale.float().reshape((-1, 1) if permuted_weights else (1, -1))
    return (values.float() * by_output).to(torch.bfloat16)


def fp8_fused_weights(
    hidden_states: Tensor,
    expert_routing_table: Tensor,
    router_weights: Tensor,
    w12: Sequence[Tensor],
    w3: Sequence[Tensor],
    d_scale_hidden_states: Tensor,
    d_scale_intermediate_hidden_states: Sequence[Tensor],
    d_scale_w12: Sequence[Tensor],
    d_scale_w3: Sequence[Tensor],
    permuted_weights: bool,
    activation: str,
    experts_min: int,
    experts_max: int,
    chunk_size: int = 0,
    total_experts: int = 0,
) -> Tensor:
    """8-bit activations and weights with the scales that bring them back; bf16 comes out.

    hidden_states: e4m3; d_scale_hidden_states: one, or [tokens, 1]. Of each expert: d_scale_intermediate_hidden_states
    one, d_scale_w12 and d_scale_w3 one, or one of each output. Arguments else as of `fused_weights`.
    """
    wide = torch.bfloat16
    x = (hidden_states.float() * d_scale_hidden_states.float()).to(wide)
    _check_routing(x, expert_routing_table, router_weights, torch.int64)
    _check_weights(hidden_states.dtype, w12, w3, experts_min, experts_max)
    act = _activation(activation)

    def expert(tokens: Tensor, number: int) -> Tensor:
        gate, up = _product(
            tokens, _scaled(w12[number], d_scale_w12[number], permuted_weights), permuted_weights
        ).chunk(2, -1)
        scale = d_scale_intermediate_hidden_states[number].float()
        inner = saturated((act(gate) * up).float() / scale, hidden_states.dtype)
        tokens = (inner.float() * scale).to(wide)
        return _product(tokens, _scaled(w3[number], d_scale_w3[number], permuted_weights), permuted_weights)

    return _sum(x, expert_routing_table, router_weights, expert, experts_min, experts_max)


def fp8_fused_weights_dynamic(
    hidden_states: Tensor,
    expert_routing_table: Tensor,
    router_weights: Tensor,
    w12: Sequence[Tensor],
    w3: Sequence[Tensor],
    d_scale_hidden_states: Tensor,
    d_scale_w12: Sequence[Tensor],
    d_scale_w3: Sequence[Tensor],
    permuted_weights: bool,
    activation: str,
    experts_min: int,
    experts_max: int,
    chunk_size: int = 0,
    total_experts: int = 0,
) -> Tensor:
    """As `fp8_fused_weights`; what lies between the products gets a scale for each row. For compiled regions alone.

    In eager mode the vendor's source multiplies by that scale where it should divide, and gives each half of w12 all of
    its scales.
    """
    name = f"{NAME}.fp8_fused_weights_dynamic"
    if state.region != "hpu_backend":
        duties.refuse(EXPERTS, name, "called outside of a compiled region", "compile the function that calls it")
    wide = torch.bfloat16
    x = (hidden_states.float() * d_scale_hidden_states.float()).to(wide)
    _check_routing(x, expert_routing_table, router_weights, torch.int64)
    _check_weights(hidden_states.dtype, w12, w3, experts_min, experts_max)
    act = _activation(activation)

    def expert(tokens: Tensor, number: int) -> Tensor:
        gate, up = _product(
            tokens, _scaled(w12[number], d_scale_w12[number], permuted_weights), permuted_weights
        ).chunk(2, -1)
        inner = (act(gate) * up).float()
        scale = (inner.abs().amax(-1, keepdim=True) + 1e-8) / largest(hidden_states.dtype)
        tokens = (saturated(inner / scale, hidden_states.dtype).float() * scale).to(wide)
        return _product(tokens, _scaled(w3[number], d_scale_w3[number], permuted_weights), permuted_weights)

    return _sum(x, expert_routing_table, router_weights, expert, experts_min, experts_max)


def mxfp4_fused_weights(
    hidden_states: Tensor,
    expert_routing_table: Tensor,
    router_weights: Tensor,
    w12: Sequence[Tensor],
    w3: Sequence[Tensor],
    w12_scale: Sequence[Tensor],
    w3_scale: Sequence[Tensor],
    *,
    block_size: int = _FP4_GROUP,
    permuted_weights: bool = True,
    activation: str = "silu",
    experts_min: int = 0,
    experts_max: int = 0,
    is_fp4: bool = True,
    chunk_size: int = 0,
    total_experts: int = 0,
) -> Tensor:
    """4-bit weights. expert_routing_table: int32. Exists in compiled regions only.

    w12, w3: uint8 [rows, columns / 2], two 4-bit floats in a byte; scales: uint8 [rows, columns / 32], powers of two.
    """
    if state.region != "hpu_backend":
        found = "called outside of a compiled region"
        duties.refuse(EXPERTS, f"{NAME}.mxfp4_fused_weights", found, "compile the function that calls it")
    if not permuted_weights or block_size != _FP4_GROUP:
        found = f"permuted_weights={permuted_weights}, block_size={block_size}"
        duties.refuse(EXPERTS, f"{NAME}.mxfp4_fused_weights", found, f"True and {_FP4_GROUP}")
    _check_routing(hidden_states, expert_routing_table, router_weights, torch.int32)
    wide = [
        [_from_fp4(*pair, hidden_states.dtype) for pair in zip(values, scales, strict=True)]
        for values, scales in ((w12, w12_scale), (w3, w3_scale))
    ]
    how = permuted_weights, activation, experts_min, experts_max
    return fused_weights(hidden_states, expert_routing_table.long(), router_weights, *wide, *how)


def _like_hidden(hidden_states: Tensor, *others: object, **named: object) -> Tensor:
    """The shape of the result, while torch.compile traces."""
    return torch.empty_like(hidden_states)


def _check_routing(hidden: Tensor, routing: Tensor, router: Tensor, index: torch.dtype) -> None:
    if routing.dtype != index:
        duties.refuse(EXPERTS, NAME, f"the routing table is {routing.dtype}", f"cast it to {index}")
    if router.dtype != hidden.dtype:
        found = f"router weights are {router.dtype}, activations {hidden.dtype}"
        duties.refuse(
            EXPERTS, NAME, found, "cast the router's weights: the graph compiler fails on a mix (synStatus 26)"
        )


def _check_weights(dtype: torch.dtype, w12: Sequence[Tensor], w3: Sequence[Tensor], first: int, last: int) -> None:
    for name, weights in (("w12", w12), ("w3", w3)):
        if len(weights) != last - first + 1:
            found = f"{len(weights)} matrices {name} for experts {first} to {last}"
            duties.refuse(EXPERTS, NAME, found, "give one of each expert here")
        for weight in weights:
            if weight.dtype != dtype:
                duties.refuse(EXPERTS, NAME, f"{name} is {weight.dtype}, activations {dtype}", "cast the weights")
            if weight.dim() != 2:
                duties.refuse(EXPERTS, NAME, f"{name} is {weight.dim()}-d", "give a list of 2-d matrices")


def _activation(name: str) -> Activation:
    if name not in _ACTIVATIONS:
        duties.refuse(EXPERTS, NAME, f"activation {name!r}", f"one of {sorted(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _product(x: Tensor, weight: Tensor, permuted: bool) -> Tensor:
    return torch.matmul(x, weight.t() if permuted else weight)


def _sum(
    hidden: Tensor,
    routing: Tensor,
    router: Tensor,
    expert: Callable[[Tensor, int], Tensor],
    first: int,
    last: int,
) -> Tensor:
    """Every expert computes all tokens and counts where it was chosen; sums in f32."""
    total = torch.zeros_like(hidden, dtype=torch.float32)
    for number in range(first, last + 1):
        chosen = torch.where(routing == number, router.float(), 0.0).sum(-1, keepdim=True)
        total = total + torch.where(chosen != 0, expert(hidden, number - first).float() * chosen, 0.0)
    return total.to(hidden.dtype)


def _from_fp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, columns] of packed [rows, columns / 2] (low half first) and scale [rows, columns / 32]."""
    table = torch.tensor(_FP4, dtype=torch.float32, device=packed.device)
    halves = torch.stack([packed & 0xF, packed >> 4], -1).flatten(-2)
    factor = torch.exp2(scale.float() - _E8M0_BIAS).repeat_interleave(_FP4_GROUP, -1)
    return (table[halves.int()] * factor[:, : halves.shape[1]]).to(dtype)


_FP8_SCALES = (
    "Tensor d_scale_hidden_states, Tensor[] d_scale_intermediate_hidden_states, Tensor[] d_scale_w12, "
    "Tensor[] d_scale_w3, "
)
KERNELS = (
    Kernel(
        f"mixture_of_experts({_TOKENS}Tensor[] w1, Tensor[] w2, Tensor[] w3, {_HOW}{_CHUNKS}) -> Tensor",
        plain,
    ),
    Kernel(
        f"mixture_of_experts.fused_weights({_TOKENS}Tensor[] w12, Tensor[] w3, {_HOW}{_CHUNKS}) -> Tensor",
        fused_weights,
    ),
    Kernel(
        f"mixture_of_experts.fp8_fused_weights({_TOKENS}Tensor[] w12, Tensor[] w3, {_FP8_SCALES}{_HOW}{_CHUNKS}) "
        "-> Tensor",
        fp8_fused_weights,
        lambda hidden_states, *others, **named: torch.empty_like(hidden_states, dtype=torch.bfloat16),
    ),
    Kernel(
        f"mixture_of_experts.fp8_fused_weights_dynamic({_TOKENS}Tensor[] w12, Tensor[] w3, "
        f"Tensor d_scale_hidden_states, Tensor[] d_scale_w12, Tensor[] d_scale_w3, {_HOW}{_CHUNKS}) -> Tensor",
        fp8_fused_weights_dynamic,
        lambda hidden_states, *others, **named: torch.empty_like(hidden_states, dtype=torch.bfloat16),
    ),
    Kernel(
        f"mixture_of_experts.bias_fused_weights({_TOKENS}Tensor[] w12, Tensor[] w3, Tensor[] w12_bias, "
        "Tensor[] w3_bias, *, bool permuted_weights, int experts_min, int experts_max, int chunk_size=0, "
        "int total_experts=0, float alpha=1.702, float limit=7.0) -> Tensor",
        bias_fused_weights,
        since="1.23.0.0",
    ),
    Kernel(
        f"mixture_of_experts.mxfp4_fused_weights({_TOKENS}Tensor[] w12, Tensor[] w3, Tensor[] w12_scale, "
        "Tensor[] w3_scale, *, int block_size=32, bool permuted_weights=True, str activation='silu', "
        "int experts_min=0, int experts_max=0, bool is_fp4=True, int chunk_size=0, int total_experts=0) -> Tensor",
        mxfp4_fused_weights,
        _like_hidden,
        since="1.24.0.0",
    ),
)
