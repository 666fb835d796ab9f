"""Noise of an exponential distribution for each row and token, from a hash instead of a generator's state.

A row has one key for each position of a request, computed on the host from the request's seed. So the noise of a
request depends neither on other rows, nor on their number, nor on the device.

Source: the murmur3 hash and the uniform numbers of vLLM's `vllm/v1/worker/gpu/sample/gumbel.py`.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_gaudi_ucm.ops.registry import why_not_triton

FIRST, SECOND, ADDED = 0xCC9E2D51, 0x1B873593, 0xE6546B64
FINAL_FIRST, FINAL_SECOND = 0x85EBCA6B, 0xC2B2AE35
DOUBLE_DOMAIN = 0x9E3779B9  # of the upper bits, for float64 noise
LENGTH = 16  # bytes that are hashed: seed, position, token
MOST = 1.0 - 2.0**-24  # the largest float32 below 1: a uniform number of 1 would give infinite noise


def row_keys(seeds: NDArray[np.int64], positions: NDArray[np.int64], domain: int = 0) -> NDArray[np.int32]:
    """Hashes seed and position, [rows]: the key of a row's noise. domain: each domain gives independent numbers."""
    wide, hashed = seeds.astype(np.int64).view(np.uint64), np.full(len(seeds), domain, np.uint32)
    words = wide & np.uint64(0xFFFFFFFF), wide >> np.uint64(32), positions.astype(np.uint64) & np.uint64(0xFFFFFFFF)
    for word in words:
        hashed = _rotated(hashed ^ _mixed(word.astype(np.uint32)), 13) * np.uint32(5) + np.uint32(ADDED)
    return hashed.view(np.int32)


def token_mixes(vocab_size: int) -> NDArray[np.int32]:
    """Returns what each token adds to a row's hash, [vocabulary]."""
    return _mixed(np.arange(vocab_size, dtype=np.uint32)).view(np.int32)


def exponential_noise(keys: Tensor, mixes: Tensor) -> Tensor:
    """float32 [rows, vocabulary], of an exponential distribution of mean 1; never 0, and at most 16.7.

    Args:
        keys: int32 [rows], from `row_keys`.
        mixes: int32 [vocabulary], from `token_mixes`.
    """
    if not torch.compiler.is_compiling() and why_not_triton(keys.device.type) is None:
        from vllm_gaudi_ucm.ops.row_noise.impl.cuda.noise import cuda_noise

        return cuda_noise(keys, mixes)
    high, low = _halves(keys, mixes)
    # each half is exact in float32, so their sum is rounded once
    uniform = high.to(torch.float32).mul_(2.0**-16)
    uniform += low.to(torch.float32).add_(0.5).mul_(2.0**-32)
    uniform.clamp_(max=MOST).neg_()
    return torch.log1p(uniform, out=uniform).neg_()


def exponential_noise_double(keys: Tensor, more_keys: Tensor, mixes: Tensor) -> Tensor:
    """Like `exponential_noise` in float64, with 53 bits. more_keys: keys of the same rows in `DOUBLE_DOMAIN`."""
    low, high = ((a.long() << 16) | b for a, b in (_halves(keys, mixes), _halves(more_keys, mixes)))
    uniform = ((high << 21) | (low >> 11)).double().add_(0.5).mul_(2.0**-53)
    uniform.clamp_(max=1.0 - 2.0**-53).neg_()
    return torch.log1p(uniform, out=uniform).neg_()


def _halves(keys: Tensor, mixes: Tensor) -> tuple[Tensor, Tensor]:
    """The hash of each row and token, its upper and its lower 16 bits: int32 [rows, vocabulary] each.

    Works in place: on a CPU, allocating a result for each operator takes six times as long as the operators. Gaudi has
    the operators `bitwise_xor` and `<<`, not `^=` and `<<=`.
    """
    hashed = keys.unsqueeze(1) ^ mixes
    shifted = (hashed >> 19).bitwise_and_(0x1FFF)
    torch.bitwise_left_shift(hashed, 13, out=hashed)
    hashed.bitwise_or_(shifted).mul_(5).add_(_signed(ADDED))
    torch.bitwise_xor(hashed, LENGTH, out=hashed)
    torch.bitwise_xor(hashed, (hashed >> 16).bitwise_and_(0xFFFF), out=hashed)
    hashed.mul_(_signed(FINAL_FIRST))
    torch.bitwise_xor(hashed, (hashed >> 13).bitwise_and_(0x7FFFF), out=hashed)
    hashed.mul_(_signed(FINAL_SECOND))
    high = (hashed >> 16).bitwise_and_(0xFFFF)
    # the last round: hash ^ hash >> 16
    hashed.bitwise_and_(0xFFFF)
    return high, torch.bitwise_xor(hashed, high, out=hashed)


def _mixed(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return _rotated(words * np.uint32(FIRST), 15) * np.uint32(SECOND)


def _rotated(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    return (words << np.uint32(bits)) | (words >> np.uint32(32 - bits))


def _signed(word: int) -> int:
    """Returns the int32 with the same bits."""
    return word - (1 << 32) if word >> 31 else word
