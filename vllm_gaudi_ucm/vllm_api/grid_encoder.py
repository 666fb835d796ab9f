"""Encoders of pictures as grids of patches (Qwen2-VL, Qwen2.5-VL, Qwen3-VL): `vllm.model_executor.models.qwen2_vl`,
`qwen2_5_vl`, `qwen3_vl`.

Internal: `prepare_encoder_metadata` of such an encoder, which computes what its layers read of the sizes of pictures;
the encoder's forward, which takes it; and its modules that the metadata is made of.
"""

from collections.abc import Mapping
from copy import copy, deepcopy
from typing import Any, cast

import torch
from torch import nn

from vllm_gaudi_ucm.vllm_api.sequence_numbers import sequence_numbers

__all__ = ["GridEncoder"]

_READ = ("patch_embed", "pos_embed", "rotary_pos_emb")
_BOUNDS = ("cu_seqlens", "cu_window_seqlens")
"""Where sequences begin and end; the layers read the number of each row's sequence instead."""

_INPUTS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}


class GridEncoder:
    """Runs an encoder on a picture or a video that is padded to a number of tokens.

    The pads are a second picture, which nothing reads: attention keeps pictures and frames apart. What depends on the
    size of a picture is computed on the host, so shapes on the device depend only on the number of tokens.

    Reason: vLLM pads pictures only for its own CUDA graphs, and computes the metadata on the device.
    Remove when: the encoder's protocol `SupportsEncoderCudaGraph` fills buffers from the host.

    unit: sizes are multiples of so many tokens.
    """

    unit = 1

    def __init__(self, visual: nn.Module) -> None:
        self._visual = cast(Any, visual)
        self._host = _on_host(visual)
        self._side: int = self._host.spatial_merge_size

    @classmethod
    def of(cls, model: nn.Module) -> "GridEncoder | None":
        """Returns the encoder of a model; None if it has another kind of encoder."""
        visual = getattr(model, "visual", None)
        return cls(visual) if isinstance(visual, nn.Module) and hasattr(visual, "prepare_encoder_metadata") else None

    def count(self, inputs: Mapping[str, object]) -> int:
        """Returns the tokens of a picture or a video."""
        patches, _ = _patches(inputs)
        return len(patches) // self._side**2

    def empty(self, tokens: int) -> Mapping[str, object]:
        """Returns the inputs of a picture of zeros, on the host."""
        embed = self._visual.patch_embed
        columns = embed.proj.in_channels * embed.temporal_patch_size * embed.patch_size**2
        dtype = self._visual.input_norm.input_dtype or self._visual.dtype
        patches = torch.zeros((tokens * self._side**2, columns), dtype=dtype)
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([self._strip(tokens)])}

    def padded(self, inputs: Mapping[str, object], tokens: int) -> dict[str, torch.Tensor]:
        """Returns what `run` takes, on the host. tokens: of the result."""
        patches, grid = _patches(inputs)
        count, own = tokens * self._side**2, len(patches)
        grids = [grid] if own == count else [grid, self._strip(tokens - own // self._side**2)]
        longest: dict[str, int] = {"max_seqlen_override": count}
        if hasattr(self._visual, "window_size"):
            across = self._visual.window_size // self._side // self._visual.patch_size
            longest["max_seqlen_window_override"] = (across * self._side) ** 2
        found = self._host.prepare_encoder_metadata(grids, **longest)
        for name in _BOUNDS:
            if name in found:
                found[name] = sequence_numbers(found[name].diff().tolist())
        found["pixel_values"] = torch.cat([patches, patches.new_zeros((count - own, patches.shape[1]))])
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def run(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the embeddings [tokens, width]; the picture's are first. inputs: on the device."""
        patches = inputs.pop("pixel_values")
        found: torch.Tensor = self._visual(patches, None, encoder_metadata=inputs)
        return found

    def _strip(self, tokens: int) -> list[int]:
        return [1, self._side, self._side * tokens]


def _patches(inputs: Mapping[str, object]) -> tuple[torch.Tensor, list[int]]:
    """Returns [patches, columns], and the grid: frames, rows and columns of patches."""
    ((patches, grids),) = ((inputs[name], inputs[grid]) for name, grid in _INPUTS.items() if name in inputs)
    assert isinstance(patches, torch.Tensor), "pictures are patches in one tensor"
    assert isinstance(grids, torch.Tensor), "grids are a tensor"
    return patches, grids.reshape(-1).tolist()


def _on_host(visual: nn.Module) -> Any:
    """Returns an encoder of the same class that has on the host what metadata is made of, and no layers."""
    found: Any = copy(visual)
    parts = visual._modules.items()
    vars(found)["_modules"] = {name: deepcopy(part).to("cpu") for name, part in parts if name in _READ and part}
    for name, value in vars(found).items():
        if name.endswith("_cache") and isinstance(value, dict):
            vars(found)[name] = {}
    return found
