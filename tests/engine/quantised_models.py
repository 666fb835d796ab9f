"""Checkpoints with quantised weights, written as the tools of each format write them, and the same weights plainly."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
# a weight [outputs, inputs] -> the tensors of a checkpoint, by the end of their names, and the weight that they mean
Quantise = Callable[[Tensor], tuple[Tensors, Tensor]]
_BLOCKS = r"self_attn|mlp|mlp\.experts\.\d+|mlp\.shared_(?:experts?|mlp)"
_MIXTRAL = r"block_sparse_moe\.experts\.\d+\.w[123]"
_OPT = r"model\.decoder\.layers\.\d+\.(?:self_attn\.\w+_proj|fc[12])"
_BLOOM = r"transformer\.h\.\d+\.(?:self_attention|mlp)\.(?:query_key_value|dense\w*)"
_GPT2 = r"transformer\.h\.\d+\.(?:attn|mlp)\.c_\w+"
# of models with pictures: their decoder
_LAYER = r"(?:language_model\.)?model\.(?:language_model\.)?layers\.\d+"
_LLAMA = rf"{_LAYER}\.(?:(?:{_BLOCKS})\.\w+_proj(?:_with_mqa)?|{_MIXTRAL})"
_FEED_FORWARD = r"feed_forward\.(?:(?:experts\.\d+\.)?w[123]|(?:shared_expert\.)?\w+_proj)"
_HYBRID = rf"{_LAYER}\.(?:(?:mamba|conv|linear_attn)\.(?:in|out)_proj\w*|{_FEED_FORWARD})"
_ZAMBA = rf"{_LAYER}\.(?:mamba_decoder\.mamba|shared_transformer\.(?:self_attn|feed_forward))\.\w+_proj"
_NEMOTRON = r"backbone\.layers\.\d+\.mixer\.\w+_proj"
_LINEAR = re.compile(rf"({_LLAMA}|{_OPT}|{_BLOOM}|{_GPT2}|{_HYBRID}|{_ZAMBA}|{_NEMOTRON})\.weight")
# experts in one tensor, which quantised checkpoints have one by one
_EXPERTS = re.compile(rf"({_LAYER}\.(?:feed_forward\.)?experts)\.(gate_up|down)_proj")
_GRANITE = re.compile(rf"({_LAYER}\.block_sparse_moe)\.(input|output)_linear\.weight")


class Scheme(NamedTuple):
    """How a linear layer is quantised, and what a compressed-tensors configuration says of it."""

    quantise: Quantise
    group: dict[str, Any]


def write_quantised(
    plain: Path, folder: Path, config: dict[str, Any], choose: Callable[[str], Quantise | None]
) -> tuple[Path, Path]:
    """The quantised model, and one with the weights that it means.

    choose: by the name of a linear layer; None: it stays as it is.
    """
    tensors = load_file(plain / "model.safetensors")
    turns = json.loads((plain / "config.json").read_text())["model_type"] == "gpt2"
    written: Tensors = {}
    for name, tensor in tensors.items():
        found, experts = _LINEAR.fullmatch(name), _experts_of(name)
        quantise = choose(found[1]) if found else choose(f"{experts}.0.down_proj") if experts else None
        # [inputs, outputs]
        turned = (turns and ".c_" in name) or (experts and ".feed_forward." in name)
        if quantise is None:
            written[name] = tensor
            continue
        weight = tensor.transpose(-1, -2) if turned else tensor
        if found:
            parts, meant = quantise(weight)
            if turned:
                parts["weight"] = parts["weight"].t()
            written |= {f"{found[1]}.{end}": part.contiguous() for end, part in parts.items()}
        else:
            names = ("gate_proj", "up_proj") if "gate_up" in name or "input" in name else ("down_proj",)
            each = [_one_expert(f"{experts}.{number}", one, names, quantise) for number, one in enumerate(weight)]
            written |= {key: part for parts, _ in each for key, part in parts.items()}
            meant = torch.stack([one for _, one in each])
        tensors[name] = meant.transpose(-1, -2).contiguous() if turned else meant
    return _write(plain, folder, config, written, tensors)


def _experts_of(name: str) -> str:
    """Returns the name of the layer whose experts a tensor has; "" if it has none."""
    if found := _EXPERTS.fullmatch(name):
        return found[1]
    found = _GRANITE.fullmatch(name)
    return f"{found[1]}.experts" if found else ""


def _one_expert(name: str, weight: Tensor, matrices: Sequence[str], quantise: Quantise) -> tuple[Tensors, Tensor]:
    """Returns the tensors of an expert, and the weight that they mean. weight: its matrices, one above the other."""
    parts: Tensors = {}
    meant = []
    for own, matrix in zip(matrices, weight.chunk(len(matrices)), strict=True):
        found, exact = quantise(matrix)
        parts |= {f"{name}.{own}.{end}": part.contiguous() for end, part in found.items()}
        meant.append(exact)
    return parts, torch.cat(meant)


def write_gpt_oss(plain: Path, folder: Path) -> tuple[Path, Path]:
    """The same for a gpt-oss, whose experts become MXFP4 as its real checkpoints have them."""
    tensors = load_file(plain / "model.safetensors")
    written: Tensors = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            written[name] = tensor
            continue
        weight = tensor.transpose(1, 2)
        parts, meant = mxfp4(weight.flatten(0, 1))
        tensors[name] = meant.view(weight.shape).transpose(1, 2).contiguous()
        # blocks of 32 elements in 16 bytes, the scale of each, all of [experts, outputs]
        written[f"{name}_blocks"] = parts["weight_packed"].view(*weight.shape[:2], -1, 16)
        written[f"{name}_scales"] = parts["weight_scale"].view(*weight.shape[:2], -1)
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    return _write(plain, folder, config, written, tensors)


def _write(plain: Path, folder: Path, config: dict[str, Any], written: Tensors, tensors: Tensors) -> tuple[Path, Path]:
    settings = json.loads((plain / "config.json").read_text())
    for kind, content, extra in (
        ("quantised", written, {"quantization_config": config}),
        ("plain", tensors, {}),
    ):
        (folder / kind).mkdir(parents=True)
        # the processor of pictures, if there is one
        for file in plain.iterdir():
            if file.is_file() and file.suffix != ".safetensors":
                shutil.copy(file, folder / kind)
        save_file(content, folder / kind / "model.safetensors", {"format": "pt"})
        (folder / kind / "config.json").write_text(json.dumps(settings | extra))
    return folder / "quantised", folder / "plain"


def _e4m3(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, codes.float() * scale


def fp8_tensor(name: str = "weight_scale", inputs: bool = False) -> Quantise:
    def quantise(weight: Tensor) -> tuple[Tensors, Tensor]:
        scale = weight.abs().amax() / 448
        codes, meant = _e4m3(weight, scale)
        static = {"input_scale": torch.tensor([0.05])} if inputs else {}
        return {"weight": codes, name: scale.reshape(1), **static}, meant

    return quantise


def fp8_channel(weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes, meant = _e4m3(weight, scale)
    return {"weight": codes, "weight_scale": scale}, meant


def fp8_block(name: str, size: int = 32) -> Quantise:
    def quantise(weight: Tensor) -> tuple[Tensors, Tensor]:
        blocks = weight.unflatten(1, (-1, size)).unflatten(0, (-1, size))
        scale = blocks.abs().amax((1, 3)) / 448
        codes, meant = _e4m3(weight, scale.repeat_interleave(size, 0).repeat_interleave(size, 1))
        return {"weight": codes, name: scale}, meant

    return quantise


def int8(strategy: str, inputs: Callable[[Tensor], Tensors] = lambda weight: {}) -> Quantise:
    """inputs: what the checkpoint says of activations."""

    def quantise(weight: Tensor) -> tuple[Tensors, Tensor]:
        top = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().amax()
        scale = top / 127
        codes = (weight / scale).round().to(torch.int8)
        found = {"weight": codes, "weight_scale": scale if scale.dim() else scale.reshape(1), **inputs(weight)}
        return found, codes.float() * scale

    return quantise


def fixed_inputs(zero: bool) -> Callable[[Tensor], Tensors]:
    """A scale, and a zero, that depend on the matrix: those that are multiplied with the same rows have their own."""

    def inputs(weight: Tensor) -> Tensors:
        more = int(weight[0, 0] > 0) + int(weight[0, 1] > 0)
        zeros = {"input_zero_point": torch.tensor([7 - 30 * more], dtype=torch.int8)} if zero else {}
        return {"input_scale": torch.tensor([0.02 + 0.01 * more]), **zeros}

    return inputs


def _grouped(weight: Tensor, bits: int, size: int | None, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unsigned codes [outputs, inputs], scales and zeros [outputs, groups], and what they mean."""
    groups = weight.unflatten(1, (-1, size or weight.shape[1]))
    if symmetric:
        scale = (groups.abs().amax(2) / ((1 << (bits - 1)) - 1)).half().float()
        zeros = torch.full_like(scale, 1 << (bits - 1))
    else:
        low, high = groups.aminmax(dim=2)
        scale = ((high - low) / ((1 << bits) - 1)).half().float()
        zeros = (-low / scale).round().clamp(0, (1 << bits) - 1)
    codes = (groups / scale.unsqueeze(2) + zeros.unsqueeze(2)).round().clamp(0, (1 << bits) - 1)
    meant = (codes - zeros.unsqueeze(2)) * scale.unsqueeze(2)
    return codes.flatten(1).int(), scale, zeros.int(), meant.flatten(1)


def pack(codes: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 words of unsigned codes along a dimension. order: which code lies at a place of a word."""
    words = codes.movedim(dim, -1).unflatten(-1, (-1, 32 // bits)).long()
    if order is not None:
        words = words[..., list(order)]
    shifts = torch.arange(0, 32, bits)
    return (words << shifts).sum(-1).to(torch.uint32).view(torch.int32).movedim(-1, dim)


def packed_integers(bits: int, size: int | None, symmetric: bool) -> Quantise:
    """compressed-tensors."""

    def quantise(weight: Tensor) -> tuple[Tensors, Tensor]:
        codes, scale, zeros, meant = _grouped(weight, bits, size, symmetric)
        found = {
            "weight_packed": pack(codes, bits, 1),
            "weight_scale": scale.half(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            found["weight_zero_point"] = pack(zeros, bits, 0)
        return found, meant

    return quantise


def mxfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = weight.unflatten(1, (-1, 32))
    exponent = (groups.abs().amax(2, keepdim=True) / 6).log2().ceil()
    scaled = groups / exponent.exp2()
    places = (scaled.abs().unsqueeze(-1) - table).abs().argmin(-1)
    meant = table[places] * scaled.sign() * exponent.exp2()
    codes = (places + 8 * (scaled < 0)).flatten(1).to(torch.uint8)
    found = {
        "weight_packed": codes[:, ::2] | codes[:, 1::2] << 4,
        "weight_scale": (exponent.squeeze(2) + 127).to(torch.uint8),
    }
    return found, meant.flatten(1)


def gptq(bits: int, size: int | None) -> Quantise:
    def quantise(weight: Tensor) -> tuple[Tensors, Tensor]:
        codes, scale, zeros, meant = _grouped(weight, bits, size, True)
        inputs = weight.shape[1]
        found = {
            "qweight": pack(codes.t(), bits, 0),
            "qzeros": pack(zeros.t() - 1, bits, 1),
            "scales": scale.t().half(),
            "g_idx": torch.arange(inputs, dtype=torch.int32) // (size or inputs),
        }
        return found, meant

    return quantise


def awq(size: int) -> Quantise:
    def quantise(weight: Tensor) -> tuple[Tensors, Tensor]:
        codes, scale, zeros, meant = _grouped(weight, 4, size, False)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        found = {
            "qweight": pack(codes.t(), 4, 1, order),
            "qzeros": pack(zeros.t(), 4, 1, order),
            "scales": scale.t().half(),
        }
        return found, meant

    return quantise


def _arguments(kind: str, bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False, **more}


def _scheme(quantise: Quantise, layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> Scheme:
    return Scheme(quantise, {"format": layout, "weights": weights, "input_activations": inputs})


SCHEMES: Mapping[str, Scheme] = {
    "fp8 per tensor": _scheme(
        fp8_tensor(inputs=True),
        "float-quantized",
        _arguments("float", 8, "tensor"),
        _arguments("float", 8, "tensor"),
    ),
    "fp8 per channel": _scheme(
        fp8_channel,
        "float-quantized",
        _arguments("float", 8, "channel"),
        {**_arguments("float", 8, "token"), "dynamic": True},
    ),
    "fp8 per block": _scheme(
        fp8_block("weight_scale"),
        "float-quantized",
        _arguments("float", 8, "block", block_structure=[32, 32]),
        {**_arguments("float", 8, "group", group_size=32), "dynamic": True},
    ),
    "int8 per channel": _scheme(
        int8("channel"),
        "int-quantized",
        _arguments("int", 8, "channel"),
        {**_arguments("int", 8, "token"), "dynamic": True},
    ),
    "int8, rows with zeros": _scheme(
        int8("channel"),
        "int-quantized",
        _arguments("int", 8, "channel"),
        {**_arguments("int", 8, "token"), "dynamic": True, "symmetric": False},
    ),
    "int8, fixed rows": _scheme(
        int8("tensor", fixed_inputs(zero=False)),
        "int-quantized",
        _arguments("int", 8, "tensor"),
        _arguments("int", 8, "tensor"),
    ),
    "int8, fixed rows with a zero": _scheme(
        int8("channel", fixed_inputs(zero=True)),
        "int-quantized",
        _arguments("int", 8, "channel"),
        {**_arguments("int", 8, "tensor"), "symmetric": False},
    ),
    "int8 per tensor": _scheme(
        int8("tensor"),
        "int-quantized",
        _arguments("int", 8, "tensor"),
        {**_arguments("int", 8, "token"), "dynamic": True},
    ),
    "4 bits in groups": _scheme(
        packed_integers(4, 32, True), "pack-quantized", _arguments("int", 4, "group", group_size=32)
    ),
    "4 bits with zeros": _scheme(
        packed_integers(4, 32, False),
        "pack-quantized",
        {**_arguments("int", 4, "group", group_size=32), "symmetric": False},
    ),
    "4 bits per channel": _scheme(packed_integers(4, None, True), "pack-quantized", _arguments("int", 4, "channel")),
    "8 bits in groups": _scheme(
        packed_integers(8, 32, True), "pack-quantized", _arguments("int", 8, "group", group_size=32)
    ),
    "mxfp4": _scheme(
        mxfp4,
        "mxfp4-pack-quantized",
        _arguments("float", 4, "group", group_size=32, scale_dtype="torch.uint8"),
    ),
}


def compressed_tensors(schemes: Mapping[str, str]) -> tuple[dict[str, Any], Callable[[str], Quantise | None]]:
    """A configuration, and the choice by it. schemes: the name of one by a pattern of layers' names."""
    groups = {
        f"group_{index}": {**SCHEMES[scheme].group, "targets": [f"re:{pattern}"]}
        for index, (pattern, scheme) in enumerate(schemes.items())
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": groups,
    }

    def choose(name: str) -> Quantise | None:
        return next((SCHEMES[scheme].quantise for pattern, scheme in schemes.items() if re.match(pattern, name)), None)

    return config, choose
