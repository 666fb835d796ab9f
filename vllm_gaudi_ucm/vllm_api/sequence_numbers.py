"""The sequences of an encoder's rows in a form whose shape depends only on the number of rows.

Internal: `cu_seqlens`, the argument of `MMEncoderAttention` that has the bounds of sequences, and that all encoders
of pictures hand on unread.
"""

from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["numbers_of_rows", "sequence_numbers"]


def sequence_numbers(lengths: Sequence[int]) -> torch.Tensor:
    """Returns int32 [1, rows] the number of each row's sequence, on the host. lengths: rows of each sequence.

    Reason: vLLM's attention cuts rows where sequences end, so its shapes depend on the sizes of pictures. Encoders pass
    `cu_seqlens` to all their layers, but only some of them pass any other tensor.
    Remove when: `MMEncoderAttention` takes a number for each row.
    """
    return torch.from_numpy(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None])


def numbers_of_rows(cu_seqlens: torch.Tensor | None) -> torch.Tensor | None:
    """Returns int32 [rows] the number of each row's sequence; None if the argument has bounds, in one dimension.

    Reason: an encoder that is not padded passes bounds to the same attention.
    Remove when: `MMEncoderAttention` takes a number for each row.
    """
    return None if cu_seqlens is None or cu_seqlens.dim() == 1 else cu_seqlens[0]
