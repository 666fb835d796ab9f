"""Encoders of pictures as grids of patches (Qwen2.5-VL, Qwen3-VL): `vllm.model_executor.models.qwen2_5_vl`, `qwen3_vl`.

Internal: `prepare_encoder_metadata` of such an encoder, which computes what its layers read of the sizes of pictures;
the encoder's forward, which takes it; and its modules that the metadata is made of.
"""

from copy import copy, deepcopy
from typing import Any, cast

import numpy as np
import torch
from torch import nn

__all__ = ["GridEncoder"]

_READ = ("patch_embed", "pos_embed", "rotary_pos_emb")
_SEQUENCES = {
    "cu_seqlens": "sequence_lengths",
    "cu_window_seqlens": "sequence_lengths_window",
}
"""The bounds of sequences, by which vLLM's layers attend, and the entry that layers of ours read instead."""


class GridEncoder:
    """Runs an encoder on a picture that is padded to a number of tokens.

    The pads are a second picture, which nothing reads: attention keeps pictures apart. What depends on the size of a
    picture is computed on the host, so shapes on the device depend only on the number of tokens.

    Reason: vLLM pads pictures only for its own CUDA graphs, and computes the metadata on the device.
    Remove when: the encoder's protocol `SupportsEncoderCudaGraph` fills buffers from the host.

    side: patches on each side of a token.
    """

    def __init__(self, visual: nn.Module) -> None:
        self._visual = cast(Any, visual)
        self._host = _on_host(visual)
        self.side: int = self._host.spatial_merge_size

    @classmethod
    def of(cls, model: nn.Module) -> "GridEncoder | None":
        """Returns the encoder of a model; None if it has another kind of encoder."""
        visual = getattr(model, "visual", None)
        return cls(visual) if isinstance(visual, nn.Module) and hasattr(visual, "prepare_encoder_metadata") else None

    def empty(self, tokens: int) -> tuple[torch.Tensor, list[int]]:
        """Returns the patches and the grid of a picture of zeros, on the host."""
        embed = self._visual.patch_embed
        columns = embed.proj.in_channels * embed.temporal_patch_size * embed.patch_size**2
        dtype = self._visual.input_norm.input_dtype or self._visual.dtype
        return torch.zeros((tokens * self.side**2, columns), dtype=dtype), self._strip(tokens)

    def padded(self, patches: torch.Tensor, grid: list[int], tokens: int) -> dict[str, torch.Tensor]:
        """Returns the inputs of a forward, on the host.

        patches: [patches, columns] of a picture; grid: its frames, rows and columns of patches. tokens: of the result.
        """
        count, own = tokens * self.side**2, len(patches)
        grids = [grid] if own == count else [grid, self._strip(tokens - own // self.side**2)]
        longest: dict[str, int] = {"max_seqlen_override": count}
        if hasattr(self._visual, "window_size"):
            visual = self._visual
            longest["max_window_seqs_per_batch"] = visual.get_encoder_cudagraph_max_window_seqs(tokens, 2, 0)
            across = visual.window_size // self.side // visual.patch_size
            longest["max_seqlen_window_override"] = (across * self.side) ** 2
        # one for each frame, and one for the pads
        found = self._host.prepare_encoder_metadata(grids, max_batch_size=2, **longest)
        for bounds, numbers in _SEQUENCES.items():
            if bounds in found:
                name = "sequence_lengths_full" if "cu_window_seqlens" in found and bounds == "cu_seqlens" else numbers
                ends = found[bounds].numpy()
                found[name] = torch.from_numpy(np.repeat(np.arange(len(ends) - 1, dtype=np.int32), np.diff(ends)))
        found["pixel_values"] = torch.cat([patches, patches.new_zeros((count - own, patches.shape[1]))])
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def run(self, inputs: dict[str, torch.Tensor], device: torch.device) -> torch.Tensor:
        """Returns the embeddings [tokens, width]; the picture's are first."""
        # the longest sequences are numbers of the host
        moved = {name: tensor if not tensor.dim() else tensor.to(device) for name, tensor in inputs.items()}
        found: torch.Tensor = self._visual(moved.pop("pixel_values"), None, encoder_metadata=moved)
        return found

    def _strip(self, tokens: int) -> list[int]:
        return [1, self.side, self.side * tokens]


def _on_host(visual: nn.Module) -> Any:
    """Returns an encoder of the same class that has on the host what metadata is made of, and no layers."""
    found: Any = copy(visual)
    parts = visual._modules.items()
    vars(found)["_modules"] = {name: deepcopy(part).to("cpu") for name, part in parts if name in _READ and part}
    for name, value in vars(found).items():
        if name.endswith("_cache") and isinstance(value, dict):
            vars(found)[name] = {}
    return found
