"""vLLM's own loader fills the parameters of quantised experts, on one rank or two; what they say is exact."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.engine.quantised_models import (
    SCHEMES,
    Quantise,
    Tensors,
    awq,
    compressed_tensors,
    fp8_block,
    gptq,
    mxfp4,
)
from tests.layers.quantised_configs import arguments
from vllm_gaudi_ucm.layers.quantised.configs import format_of_scheme
from vllm_gaudi_ucm.layers.quantised.expert_formats import ExpertSizes
from vllm_gaudi_ucm.layers.quantised.experts import ExpertStacks, _for_gaudi
from vllm_gaudi_ucm.layers.quantised.formats import AwqFormat, GptqFormat, Mxfp4Format, ScaledFormat, WeightFormat
from vllm_gaudi_ucm.ops.moe.codes import CodedExperts, ExpertCodes
from vllm_gaudi_ucm.ops.moe.spec import MoeSpec
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.vllm_api.quantisation import RoutedExperts
from vllm_gaudi_ucm_tools.buckets.expert_codes import CodeSpec

EXPERTS, HIDDEN = 3, 64
SHARDS = {"w1": "w13", "w3": "w13", "w2": "w2"}


def padded_blocks(size: int) -> Quantise:
    """Of weights that no whole number of blocks covers."""

    def quantise(weight: Tensor) -> tuple[Tensors, Tensor]:
        rows, columns = (-length % size for length in weight.shape)
        found, meant = fp8_block("weight_scale_inv", size)(functional.pad(weight, (0, columns, 0, rows)))
        ends = tuple(slice(length) for length in weight.shape)
        return {**found, "weight": found["weight"][ends]}, meant[ends]

    return quantise


def of_scheme(name: str) -> tuple[WeightFormat, Quantise]:
    quantise, group = SCHEMES[name]
    found = {
        key: None if given is None else arguments(given["type"], given["num_bits"], **given)
        for key, given in group.items()
        if key != "format"
    }
    return format_of_scheme({"format": group["format"], **found}), quantise


E4M3 = torch.float8_e4m3fn
FORMATS: dict[str, tuple[WeightFormat, Quantise]] = {
    **{name: of_scheme(name) for name in SCHEMES if name != "fp8 per block"},
    "blocks": (ScaledFormat(E4M3, "block", (32, 32), "weight_scale_inv"), padded_blocks(32)),
    "gptq": (GptqFormat(4, 16), gptq(4, 16)),
    "gptq of 8 bits per channel": (GptqFormat(8, None), gptq(8, None)),
    "awq": (AwqFormat(16, has_zeros=True), awq(16)),
}


# what a checkpoint says of them
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: compressed_tensors({r".*_proj": name})[0] for name in SCHEMES},
    "blocks": {"quant_method": "fp8", "weight_block_size": [32, 32]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 16},
    "gptq of 8 bits per channel": {"quant_method": "gptq", "bits": 8, "group_size": -1},
    "awq": {"quant_method": "awq", "group_size": 16, "zero_point": True},
}


def loading_layer(stacks: ExpertStacks, ranks: int, rank: int) -> Any:
    """A layer of vLLM's with as much of it as its loader reads."""
    layer: Any = RoutedExperts.__new__(RoutedExperts)
    nn.Module.__init__(layer)
    parallel = SimpleNamespace(tp_size=ranks, tp_rank=rank)
    layer.moe_config = SimpleNamespace(
        is_act_and_mul=True, moe_parallel_config=parallel, tp_rank=rank, tp_shard_with_padding=False
    )
    layer.layer_name = "model.layers.0.mlp.experts"
    layer.quant_config = layer._fused_shared_expert_quantizer = None
    layer.quant_method = SimpleNamespace(weight_scale_refine=stacks.refine)
    layer._map_global_expert_id_to_local_expert_id = lambda expert: expert
    stacks.create(layer, EXPERTS, layer.weight_loader)
    return layer


def load(layer: Any, shard: str, expert: int, parts: Tensors) -> None:
    for end, tensor in parts.items():
        name = f"{SHARDS[shard]}_{end}"
        parameter = getattr(layer, name)
        assert parameter.weight_loader(parameter, tensor, name, shard, expert, return_success=True), name


def written_out(codes: ExpertCodes, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.stack([codes.write_out(expert, dtype) for expert in range(EXPERTS)])


def bits_of(form: WeightFormat) -> int:
    """Codes in memory take as many as in the checkpoint."""
    return 4 if isinstance(form, Mxfp4Format) else getattr(form, "bits", 4 if isinstance(form, AwqFormat) else 8)


@pytest.mark.parametrize(("ranks", "inner"), [(1, 80), (1, 96), (2, 96)])
@pytest.mark.parametrize("name", FORMATS)
def test_experts_are_exact_on_every_rank(name: str, ranks: int, inner: int) -> None:
    form, quantise = FORMATS[name]
    group = getattr(form, "group", None)
    if group and (inner // ranks) % group:
        sizes = ExpertSizes(HIDDEN, inner // ranks, inner, ranks, inner // ranks)
        with pytest.raises(ValueError, match=rf"which is not a multiple of the group size {group}; take fewer ranks"):
            ExpertStacks(form, sizes)
        return
    torch.manual_seed(0)
    quantised = {
        (shard, expert): quantise(torch.randn(*((HIDDEN, inner) if shard == "w2" else (inner, HIDDEN))))
        for shard in SHARDS
        for expert in range(EXPERTS)
    }
    found: dict[str, list[Tensor]] = {"w13": [], "w2": []}
    for rank in range(ranks):
        stacks = ExpertStacks(form, ExpertSizes(HIDDEN, inner // ranks, inner, ranks, inner // ranks))
        layer = loading_layer(stacks, ranks, rank)
        for (shard, expert), (parts, _) in quantised.items():
            load(layer, shard, expert, parts)
        for matrix in stacks.matrices:
            codes = stacks.read(layer, matrix)
            assert codes.codes.nbytes == EXPERTS * matrix.outputs * matrix.inputs * bits_of(form) // 8
            planned = CodeSpec.of_experts({"quantization_config": CONFIGS[name]}, 1)
            assert planned is not None
            planned = planned.within(inner // ranks)
            halves = matrix.halves * planned.bytes(matrix.outputs // matrix.halves, matrix.inputs)
            assert codes.nbytes == EXPERTS * halves, "as `gaudi-ucm plan` counts them"
            assert codes.for_kernels is planned.has_kernel(matrix.inputs)
            found[matrix.name].append(written_out(codes))
        assert not dict(layer.named_parameters())
    gates_and_ups = torch.cat([part.unflatten(1, (2, -1)) for part in found["w13"]], 2)
    for (shard, expert), (_, meant) in quantised.items():
        written = torch.cat(found["w2"], 2) if shard == "w2" else gates_and_ups[:, int(shard == "w3")]
        assert torch.equal(written[expert], meant), (shard, expert)


# what each of the 16 codes of a 4-bit float is
TABLE = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


def test_blocks_of_gpt_oss() -> None:
    """[experts, outputs, blocks, 16 bytes], low half first; the scale of a block is 2 ** (exponent - 127).

    Of three blocks the second of two ranks has one, and zeros that no scale spoils.
    """
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(256, (EXPERTS, HIDDEN, 3, 16), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(120, 131, (EXPERTS, HIDDEN, 3), dtype=torch.uint8, generator=generator)
    expected = torch.zeros(EXPERTS, HIDDEN, 128)
    for place in range(96):
        codes = blocks[:, :, place // 32, place % 32 // 2] >> 4 * (place % 2) & 15
        expected[:, :, place] = torch.tensor(TABLE)[codes.int()] * 2.0 ** (exponents[:, :, place // 32].float() - 127)
    for rank, filled in enumerate((64, 32)):
        stacks = ExpertStacks(Mxfp4Format(codes="weight"), ExpertSizes(HIDDEN, 64, 96, 2, filled))
        layer = loading_layer(stacks, 2, rank)
        first = 2 * rank
        layer.w2_weight[:, :, : filled // 2] = blocks[:, :, first : first + filled // 32].flatten(2)
        layer.w2_weight_scale[:, :, : filled // 32] = exponents[:, :, first : first + filled // 32]
        written = written_out(stacks.read(layer, stacks.matrices[1]))
        assert torch.equal(written, expected[:, :, 64 * rank : 64 * rank + 64])
        # gates and ups in turn
        layer.w13_weight_scale[:, : 2 * filled] = 127
        written = written_out(stacks.read(layer, stacks.matrices[0]))
        assert written.isfinite().all()
        assert not written[:, 2 * filled :].any()


def test_values_are_rounded_once() -> None:
    parts, meant = mxfp4(torch.randn(HIDDEN, 64, generator=torch.Generator().manual_seed(2)) * 0.01)
    stacks = ExpertStacks(Mxfp4Format(), ExpertSizes(HIDDEN, 64, 64, 1, 64))
    layer = loading_layer(stacks, 1, 0)
    for expert in range(EXPERTS):
        load(layer, "w2", expert, parts)
    (_, matrix) = stacks.matrices
    written = written_out(stacks.read(layer, matrix), torch.bfloat16)
    assert torch.equal(written, meant.to(torch.bfloat16).expand(EXPERTS, -1, -1))
    with pytest.raises(ValueError, match="w13_weight_scale: scales of experts are missing in the checkpoint"):
        stacks.read(layer, stacks.matrices[0])


def test_codes_on_a_gaudi() -> None:
    """Refused by the option's name where its product of experts has other weights, or is missing."""
    codes = ExpertCodes(torch.zeros(1, 8, 32, dtype=torch.uint8), torch.ones(1, 8, 2), (1, 32), "uint4", 32)
    weights = CodedExperts(codes, codes, torch.bfloat16)
    with pytest.raises(
        UnsupportedFeatureError, match=r"`codes` of these.*takes 8-bit floats \(take `plain`\).*ucm\.quan"
    ):
        _for_gaudi(weights, MoeSpec())
    codes = ExpertCodes(torch.zeros(1, 8, 32).to(E4M3), torch.ones(1, 8, 1), (1, 32), "whole", 32)
    weights = CodedExperts(codes, codes, torch.bfloat16)
    with pytest.raises(UnsupportedFeatureError, match=r"on a Gaudi: .*habana_frameworks.*\(take `plain`\)"):
        _for_gaudi(weights, MoeSpec())


def test_blocks_that_ranks_cannot_share() -> None:
    with pytest.raises(ValueError, match="cannot be shared by 2 ranks; take --enable-expert-parallel"):
        ExpertStacks(ScaledFormat(E4M3, "block", (32, 32)), ExpertSizes(HIDDEN, 40, 80, 2, 40))
