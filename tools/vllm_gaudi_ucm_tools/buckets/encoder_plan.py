"""Plans the encoder of a model's pictures: weights, kept embeddings, memory of its largest forward, graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_gaudi_ucm.graphs.shapes.picture_sizes import sizes_up_to

PADDED = {"gemma4", "internvl", "pixtral", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"}
"""Models or encoders whose pictures are padded to few sizes on a Gaudi (`vllm_gaudi_ucm.multimodal.padded_encoder`)."""

GATED = {"gemma4_vision", "pixtral", "qwen2_5_vl"}
"""Kinds of encoders whose MLP has three matrices; the others have two."""

ROWS = 1024
"""Rows whose scores an encoder has at once."""

SCORE_BYTES = 4
_NAMES = {
    "layers": ("num_hidden_layers", "depth"),
    # in Qwen2-VL, `hidden_size` is the decoder's
    "hidden": ("embed_dim", "hidden_size"),
    "heads": ("num_attention_heads", "num_heads"),
    "patch": ("patch_size",),
}


@dataclass(frozen=True)
class EncoderSpec:
    """Sizes of an encoder of pictures.

    patch: numbers of a patch, three for each pixel. merged: patches of a token. levels: further results that the
    decoder reads (deepstack). padded: whether a Gaudi pads pictures to few sizes, which are multiples of `unit` tokens.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    patch: int
    merged: int
    matrices: int
    levels: int
    padded: bool
    unit: int

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> EncoderSpec:
        """Reads the sizes in a `config.json`.

        Raises:
            ValueError: the model has no encoder of pictures, or a size is missing.
        """
        vision = config.get("vision_config")
        if not isinstance(vision, Mapping):
            raise ValueError("vision_config is missing, so the model reads no pictures; leave --picture-tokens out")
        size = {name: _first(vision, keys) for name, keys in _NAMES.items()}
        inner = vision.get("intermediate_size") or int(size["hidden"] * float(vision.get("mlp_ratio", 4)))
        kind = str(vision.get("model_type") or config.get("model_type", ""))
        frames = int(vision.get("temporal_patch_size", 1))
        return cls(
            layers=size["layers"],
            hidden=size["hidden"],
            inner=int(inner),
            heads=size["heads"],
            patch=3 * frames * size["patch"] ** 2,
            merged=_merged(config, vision, size["patch"]),
            matrices=3 if kind in GATED else 2,
            levels=len(vision.get("deepstack_visual_indexes") or ()),
            padded=bool(PADDED & {config.get("model_type"), kind}),
            unit=_tile(config, vision, size["patch"]),
        )

    def weights(self, width: int) -> int:
        """Returns the numbers of its linear layers. width: of the decoder's hidden states."""
        each = 4 * self.hidden**2 + self.matrices * self.hidden * self.inner
        joined = self.merged * self.hidden
        return self.layers * each + self.patch * self.hidden + (1 + self.levels) * joined * (joined + width)

    def activations(self, tokens: int) -> int:
        """Returns the bytes of the most tensors alive at once, in bfloat16. tokens: of the largest picture."""
        patches = tokens * self.merged
        mlp = 2 * patches * (2 * self.hidden + self.matrices * self.inner)
        attention = self.heads * min(patches, ROWS) * patches * SCORE_BYTES + 2 * patches * 5 * self.hidden
        return max(mlp, attention)

    def num_graphs(self, tokens: int, on_gaudi: bool) -> int:
        """Returns the number of sizes that are warmed before serving starts."""
        return len(sizes_up_to(tokens, self.unit)) if self.padded and on_gaudi else 1


@dataclass(frozen=True)
class EncoderPlan:
    """The memory of pictures on a device. held: bytes of weights and kept embeddings. activations: bytes of the largest
    picture's. graphs: sizes that are warmed.
    """

    held: int = 0
    activations: int = 0
    graphs: int = 0

    @classmethod
    def of(
        cls, config: Mapping[str, Any], tokens: int, step_tokens: int, width: int, tensor: int, *, on_gaudi: bool
    ) -> EncoderPlan:
        """Plans an encoder.

        Args:
            config: content of the model's `config.json`.
            tokens: of the largest picture.
            step_tokens: as `--max-num-batched-tokens`, by which vLLM bounds the embeddings that are kept.
            width: of the decoder's hidden states.
            tensor: devices that share each layer.

        Raises:
            ValueError: the model reads no pictures.
        """
        spec = EncoderSpec.from_hf_config(config)
        kept = max(tokens, step_tokens) * (1 + spec.levels) * width
        held = 2 * (-(-spec.weights(width) // tensor) + kept)
        return cls(held, spec.activations(tokens) // tensor, spec.num_graphs(tokens, on_gaudi))


def _first(vision: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    found = next((vision[key] for key in keys if vision.get(key)), None)
    # of each side, as InternVL's
    found = found[0] if isinstance(found, list) and len(set(found)) == 1 else found
    if not isinstance(found, int) or found < 1:
        raise ValueError(f"vision_config.{keys[0]} is {found!r}, expected a number of at least 1")
    return found


def _merged(config: Mapping[str, Any], vision: Mapping[str, Any], patch: int) -> int:
    if vision.get("pooling_kernel_size"):
        return int(vision["pooling_kernel_size"]) ** 2
    each = config.get("mm_tokens_per_image")
    if each:
        return int((int(vision.get("image_size", 896)) // patch) ** 2 // int(each))
    if config.get("model_type") == "internvl":
        return round(1 / float(config.get("downsample_ratio", 0.5))) ** 2
    return int(vision.get("spatial_merge_size") or config.get("spatial_merge_size") or 1) ** 2


def _tile(config: Mapping[str, Any], vision: Mapping[str, Any], patch: int) -> int:
    """Returns the tokens of a tile; 1 if pictures are no tiles."""
    if config.get("model_type") != "internvl":
        return 1
    side = _first({"image_size": 448, **vision}, ("image_size",))
    return (side // patch) ** 2 // _merged(config, vision, patch)
