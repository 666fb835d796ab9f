"""Bytes of experts that keep the codes of a quantised checkpoint, as its `quantization_config` describes them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

SCALE_BYTES = 4
# fewest inputs with a scale of their own that a kernel multiplies at a time
FEWEST_INPUTS = 32
_OUTPUT = 2**31
_PROJECTIONS = {"mixtral": ("block_sparse_moe", "w1"), "llama4_text": ("feed_forward", "gate_proj")}


@dataclass(frozen=True)
class CodeSpec:
    """How codes are stored. bits: bits of each code. block: outputs and inputs that share a float32 scale, at most all
    of them. zeros: whether each scale has a float32 zero, as packed integers have: they are unsigned. floats: whether
    codes of 8 bits are floats.
    """

    bits: int
    block: tuple[int, int]
    zeros: bool = False
    floats: bool = False

    @classmethod
    def of_experts(cls, config: Mapping[str, Any], layers: int) -> CodeSpec | None:
        """Reads a `config.json`; None if its experts are not quantised, or in a format that is not supported."""
        quantised = config.get("quantization_config")
        if not isinstance(quantised, Mapping):
            return None
        method = str(quantised.get("quant_method", ""))
        part, projection = _PROJECTIONS.get(str(config.get("model_type", "")), ("mlp", "gate_proj"))
        name = f"model.layers.{layers - 1}.{part}.experts.0.{projection}"
        if method == "compressed-tensors":
            return cls._of_groups(quantised, name)
        skipped = (str(one) for key in ("ignored_layers", "modules_to_not_convert") for one in quantised.get(key) or ())
        if method != "mxfp4" and any(one in name for one in skipped):
            return None
        match method:
            case "mxfp4":
                return cls(4, (1, 32))
            case "fp8":
                block = quantised.get("weight_block_size")
                return cls(8, (1, _OUTPUT), floats=True) if block is None else _in_blocks(block)
            case "awq" | "awq_marlin" | "auto_awq":
                return cls(4, (1, _group(quantised)), zeros=True)
            case "gptq" | "gptq_marlin" | "auto_gptq":
                bits = quantised.get("bits")
                return cls(bits, (1, _group(quantised)), zeros=True) if bits in (4, 8) else None
        return None

    @classmethod
    def _of_groups(cls, quantised: Mapping[str, Any], name: str) -> CodeSpec | None:
        if _matches(quantised.get("ignore"), name):
            return None
        for group in (quantised.get("config_groups") or {}).values():
            weights = group.get("weights")
            if weights is None or not _matches(group.get("targets"), name):
                continue
            bits = weights.get("num_bits")
            if bits not in (4, 8):
                return None
            if weights.get("strategy") == "block":
                return _in_blocks(weights.get("block_structure"))
            inputs = _group(weights) if weights.get("strategy") == "group" else _OUTPUT
            layout = group.get("format") or quantised.get("format")
            floats = bits == 8 and weights.get("type") == "float"
            return cls(bits, (1, inputs), zeros=layout == "pack-quantized", floats=floats)
        return None

    def bytes(self, outputs: int, inputs: int) -> int:
        """Returns the bytes of a matrix."""
        rows, columns = -(-outputs // self.block[0]), -(-inputs // self.block[1])
        scales = rows * columns * SCALE_BYTES
        return outputs * inputs * self.bits // 8 + scales * (2 if self.zeros else 1)

    def within(self, inner: int) -> CodeSpec:
        """Returns the spec with blocks that end where a device's part of an expert ends; scales are repeated for it."""
        rows, columns = self.block
        return self if rows == 1 else replace(self, block=(gcd(rows, inner), gcd(columns, inner)))

    def has_kernel(self, *inputs: int) -> bool:
        """True if a GPU multiplies matrices of this many inputs as codes: groups are multiples of 32 inputs."""
        return all(
            count % FEWEST_INPUTS == 0 and (self.block[1] >= count or self.block[1] % FEWEST_INPUTS == 0)
            for count in inputs
        )

    def why_not_on_gaudi(self, *inputs: int) -> str | None:
        """Returns why a Gaudi has no product of matrices of this many inputs with these codes; None if it has one.

        Corresponds to `ops.moe.impl.hpu.why_not_codes` for a plan; a server also refuses gates that the product lacks.
        """
        if not self.floats or self.zeros:
            return "the product with codes takes 8-bit floats"
        if self.block[0] != 1 or any(self.block[1] < count for count in inputs):
            return "the product with codes takes one scale for each matrix or output"
        return None


def _in_blocks(block: Any) -> CodeSpec | None:
    if not isinstance(block, list) or len(block) != 2 or not all(type(one) is int and one > 0 for one in block):
        return None
    return CodeSpec(8, (block[0], block[1]), floats=True)


def _group(quantised: Mapping[str, Any]) -> int:
    """Returns the number of inputs that share a scale; -1, or no entry, stands for all."""
    found = quantised.get("group_size", quantised.get("q_group_size"))
    return found if type(found) is int and found > 0 else _OUTPUT


def _matches(patterns: Any, name: str) -> bool:
    def each() -> Iterator[bool]:
        for pattern in map(str, patterns or ()):
            yield bool(re.match(pattern[3:], name)) if pattern.startswith("re:") else pattern in ("Linear", name)

    return any(each())
