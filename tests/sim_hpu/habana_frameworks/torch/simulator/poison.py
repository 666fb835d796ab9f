"""What stands in memory that nothing has been written to: values that show in every result."""

import torch
from torch import Tensor


def poison(tensor: Tensor) -> None:
    """NaN, or the largest integer, which is no index of anything. bool: turned around."""
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
    elif tensor.is_floating_point() and tensor.element_size() > 1:
        tensor.fill_(float("nan"))
    elif tensor.is_floating_point():
        tensor.view(torch.uint8).fill_(0x7F)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
