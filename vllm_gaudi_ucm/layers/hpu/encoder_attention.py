"""Attention of encoders of pictures on a Gaudi, at shapes that do not depend on the sizes of pictures."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from vllm_gaudi_ucm.vllm_api.model import MMEncoderAttention
from vllm_gaudi_ucm.vllm_api.sequence_numbers import numbers_of_rows

ROWS = 1024
"""Rows that are multiplied at once, which bounds the memory of scores."""


class GaudiEncoderAttention(MMEncoderAttention):
    """Attends within sequences of patches: vLLM's own way, or by a mask if the sequence of each row is known.

    vLLM cuts rows where sequences end, so each size of a picture has shapes of its own.
    """

    def forward_oot(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: torch.Tensor | None = None,
        sequence_lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """cu_seqlens: vLLM's bounds, or the number of each row's sequence (`sequence_numbers`). max_seqlen: rows of the
        longest sequence, on the host; read only with these numbers.
        """
        numbers = numbers_of_rows(cu_seqlens)
        if numbers is None:
            return self.forward_native(query, key, value, cu_seqlens, max_seqlen, sequence_lengths)
        assert max_seqlen is not None, "numbers of sequences come with the longest one's length"
        by_heads = self.view_qkv_to_4d(query, key, value, query.shape[0], query.shape[1], key.shape[1])
        q, k, v = (tensor.transpose(1, 2) for tensor in by_heads)
        count, reach, pieces = query.shape[1], int(max_seqlen), []
        for first in range(0, count, ROWS):
            rows = slice(first, min(first + ROWS, count))
            near = slice(max(0, first - reach + 1), min(count, rows.stop + reach - 1))
            together = numbers[rows, None] == numbers[None, near]
            pieces.append(
                scaled_dot_product_attention(
                    q[:, :, rows],
                    k[:, :, near],
                    v[:, :, near],
                    attn_mask=together,
                    scale=self.scale,
                    enable_gqa=self.num_heads > self.num_kv_heads,
                )
            )
        return torch.cat(pieces, dim=2).transpose(1, 2).reshape(query.shape)
