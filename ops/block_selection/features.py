"""The kinds of summary as one product: query features times block features estimate the scores of a block.

`mean`: q . mean of the block's keys. `box_mean`: q . k for each of the keys farthest from the mean, and q . mean of the
rest; each of these is a box. A block usually stands out for a query because of a single token, which a mean hides.
`minmax`: q . middle + |q| . (max - min) / 4, halfway from the middle to Quest's bound (arXiv 2406.10774).
`hash`: as `box_mean`, with q . k ~ gain * (R q) . sign(R k) and gain = |k|^2 / sum(|R k|), which is exact for q = k
(RaBitQ, arXiv 2405.12497); the query is not quantised.
`codes`: q . mean + q . (k - mean) for every key, the difference as in `hash`. The mean is kept in the directions of R,
in which its bytes err little.
"""

from __future__ import annotations

from enum import StrEnum
from math import log2
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.narrow_floats import widened

BITS_PER_BYTE = 8
# The fewest boxes of a block, all but one of a single key; larger blocks have more. With a fixed number, a look-up in a
# block of 128 tokens failed in a quarter of cases; with one box for eight tokens, in none of 128.
_LEAST_BOXES = {"box_mean": 4, "hash": 8}
_TOKENS_PER_BOX = 8
# The mean in the directions of the projection fills as many vectors of a code's size, one byte for each direction.
_MEAN_VECTORS = BITS_PER_BYTE


class SummaryKind(StrEnum):
    """How a block is summarised; the value is the name of the option.

    MEAN: the mean key. MINMAX: the minimum and the maximum of each element (Quest). BOX_MEAN: the keys farthest from
    the mean, one by one, and the mean of the rest. HASH: more keys than BOX_MEAN, each as a sign code and a gain.
    CODES: the mean in bytes, and for each key a sign code and a gain of its difference from the mean.
    """

    MEAN = "mean"
    MINMAX = "minmax"
    BOX_MEAN = "box_mean"
    HASH = "hash"
    CODES = "codes"

    def vectors(self, block_size: int) -> int:
        """Vectors per block and KV head."""
        if self is SummaryKind.CODES:
            return block_size + _MEAN_VECTORS
        if self is SummaryKind.MEAN:
            return 1
        if self is SummaryKind.MINMAX:
            return 2
        return min(block_size, max(_LEAST_BOXES[self.value], block_size // _TOKENS_PER_BOX))

    def width(self, dim: int) -> int:
        """Elements per vector: the elements of a key; for sign codes their bytes, plus one for the gain."""
        return -(-dim // BITS_PER_BYTE) + 1 if self.is_coded else dim

    def shape(self, num_blocks: int, block_size: int, kv_heads: int, dim: int) -> tuple[int, int, int, int]:
        """[num_blocks, vectors, kv_heads, width] of the summaries of one layer."""
        return num_blocks, self.vectors(block_size), kv_heads, self.width(dim)

    def boxes(self, vectors: int) -> int:
        """Returns how many estimates the vectors of a block give."""
        if self is SummaryKind.MINMAX:
            return 1
        return vectors - _MEAN_VECTORS if self is SummaryKind.CODES else vectors

    def products(self, block_size: int, dim: int) -> int:
        """Returns how many multiplications a query head needs to score a block."""
        vectors = self.vectors(block_size)
        # the bytes of a mean are as many as the directions of one code
        counted = vectors - _MEAN_VECTORS + 1 if self is SummaryKind.CODES else vectors
        return counted * ((self.width(dim) - 1) * BITS_PER_BYTE if self.is_coded else dim)

    @property
    def is_coded(self) -> bool:
        """True if summaries are bytes of sign codes, in directions of the projection."""
        return self in (SummaryKind.HASH, SummaryKind.CODES)

    @property
    def first_weight(self) -> int:
        """The number of keys that the first of several boxes counts as; the others count as one."""
        return 1 if self is SummaryKind.CODES else REST_WEIGHT

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that summaries are computed in; floats are stored in the dtype of the keys or in 8 bits."""
        return torch.uint8 if self.is_coded else torch.float32


# How far `minmax` goes from the middle to the bound, which no key reaches in every element. Measured as the share of
# attention found in the layers of SmolLM2: 0.5 beats 1 at blocks of 16, 64 and 128 (10 % of the blocks of 16: 89.6 % to
# 88.6 %).
TOWARDS_BOUND = 0.5

# The box of the rest counts as this many keys. Measured at blocks of 16, 64 and 128: 32 and 64 give results within 0.2
# % of the true number's, so summaries need not carry it.
REST_WEIGHT = 32


_SEED = 20_250_117
_made: dict[tuple[int, torch.device], Tensor] = {}
_latest: dict[int, Tensor] = {}
# None is the device of the latest call.
_tables: dict[torch.device | None, CodeTables] = {}


class CodeTables(NamedTuple):
    """The meaning of each byte of a summary. signs: fp32 [256, 8] of a code's byte. gains: fp32 [256] of a gain's byte,
    0 for byte 0. places: uint8 [8] powers of two.
    """

    signs: Tensor
    gains: Tensor
    places: Tensor


def code_tables(device: torch.device) -> CodeTables:
    """Returns the tables on a device, copied by its first call; compiled code takes the latest, as `projection`."""
    if torch.compiler.is_compiling():
        return _tables[None]
    if device not in _tables:
        byte = torch.arange(1 << BITS_PER_BYTE)
        places = 2 ** torch.arange(BITS_PER_BYTE)
        signs = ((byte[:, None] & places) != 0).float() * 2 - 1
        gains = torch.exp2((byte.float() - _BYTE_OF_ONE) / _STEPS_PER_OCTAVE)
        # a vector of zeros has no direction
        gains[0] = 0
        _tables[device] = CodeTables(signs.to(device), gains.to(device), places.to(torch.uint8).to(device))
    _tables[None] = _tables[device]
    return _tables[device]


def projection(dim: int, device: torch.device) -> Tensor:
    """fp32 [bits, dim] with orthonormal columns, bits = dim rounded up to whole bytes.

    The first call for a device copies to it, so it must not happen inside a capture: `new_summaries` makes that call.
    Compiled code takes the result of the latest such call, so tracing creates no tensor.
    Orthonormal directions estimate a product with less noise than independent ones (RaBitQ, arXiv 2405.12497).
    """
    if torch.compiler.is_compiling():
        return _latest[dim]
    key = dim, device
    if key not in _made:
        bits = -(-dim // BITS_PER_BYTE) * BITS_PER_BYTE
        gaussian = torch.randn(
            bits, bits, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64, device="cpu"
        )
        rotation, _ = torch.linalg.qr(gaussian)
        _made[key] = rotation[:, :dim].float().contiguous().to(device)
    _latest[dim] = _made[key]
    return _made[key]


# The byte of a gain: steps of 2^(1/16), which is an error of 2 %; the sign code's own error is larger.
_STEPS_PER_OCTAVE = 16
_BYTE_OF_ONE = 128
# A byte of the mean is its value in steps, plus this. A vector's gain, which is the largest value to within half a step
# of gains, is so many steps: all values fit into a byte.
_BYTE_OF_NOTHING = 128
STEPS_OF_GAIN = 124
_OCTAVES_OF_STEPS = log2(STEPS_OF_GAIN) + _BYTE_OF_ONE / _STEPS_PER_OCTAVE


def summarise(keys: Tensor, kind: SummaryKind) -> Tensor:
    """Summaries [blocks, vectors, kv_heads, width] of full blocks, not yet rounded.

    keys: [blocks, block_size, kv_heads, dim].
    """
    keys = widened(keys, torch.float32)
    if kind is SummaryKind.MINMAX:
        return torch.stack((keys.amin(1), keys.amax(1)), dim=1)
    if kind is SummaryKind.CODES:
        rotated = _rotated(keys.float())
        return _encode(*_around_mean(rotated))
    vectors = _boxes(keys.float(), kind.vectors(keys.shape[1]))
    return _encode(_rotated(vectors)) if kind is SummaryKind.HASH else vectors


def _boxes(keys: Tensor, boxes: int) -> Tensor:
    """Keys [blocks, block_size, kv_heads, dim] -> [blocks, boxes, kv_heads, dim]: the mean of each box.

    The first box holds all keys but the boxes - 1 that are, for their head, farthest from the mean of all.
    """
    mean = keys.mean(1, keepdim=True)
    if boxes == 1:
        return mean
    far = (keys - mean).square().sum(-1).topk(boxes - 1, dim=1).indices
    outliers = keys.gather(1, far[..., None].expand(-1, -1, -1, keys.shape[-1]))
    size = keys.shape[1]
    others = size - boxes + 1
    rest = torch.sub(mean * (size / others), outliers.sum(1, keepdim=True), alpha=1 / others)
    return torch.cat((rest, outliers), dim=1)


def query_features(query: Tensor, kind: SummaryKind) -> Tensor:
    """Features of a query [rows, heads, dim]: fp32 [rows, heads, features]."""
    wide = query.float()
    if kind is SummaryKind.MINMAX:
        negative, positive = wide.clamp(max=0), wide.clamp(min=0)
        near, far = (1 - TOWARDS_BOUND) / 2, (1 + TOWARDS_BOUND) / 2
        return torch.cat((far * negative + near * positive, near * negative + far * positive), dim=-1)
    return wide @ projection(query.shape[-1], query.device).T if kind.is_coded else wide


def block_features(summaries: Tensor, kind: SummaryKind, blocks: Tensor) -> Tensor:
    """Features of some blocks: fp32 [blocks, boxes, kv_heads, features]; the first box counts as `first_weight` keys.

    summaries: [all blocks, vectors, kv_heads, width]. blocks: int64 [blocks].
    """
    summaries = widened(summaries.index_select(0, blocks), torch.float32)
    if kind is SummaryKind.MINMAX:
        return summaries.float().transpose(1, 2).flatten(2).unsqueeze(1)
    return _decode(summaries, kind.boxes(summaries.shape[1])) if kind.is_coded else summaries.float()


def _rotated(vectors: Tensor) -> Tensor:
    """fp32 [..., dim] -> [..., bits] in the directions of the projection."""
    return vectors @ projection(vectors.shape[-1], vectors.device).T


def _around_mean(rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Splits keys, fp32 [blocks, keys, kv_heads, bits], into what is left without their mean, and the mean in pieces
    [blocks, 8, kv_heads, bits / 8].
    """
    mean = rotated.mean(1, keepdim=True)
    return rotated - mean, mean[:, 0].unflatten(-1, (_MEAN_VECTORS, -1)).transpose(1, 2)


def _encode(rotated: Tensor, mean: Tensor | None = None) -> Tensor:
    """fp32 [blocks, keys, kv_heads, bits] -> uint8 [blocks, vectors, kv_heads, width]: the signs of rotated vectors,
    then pieces of a mean in bytes; each vector ends with its gain. Bytes are 0 if there is no number.
    """
    body = ((rotated >= 0).unflatten(-1, (-1, BITS_PER_BYTE)) * code_tables(rotated.device).places).sum(-1)
    # The columns are orthonormal, so the rotated vector is as long as the vector.
    gain = rotated.square().sum(-1, keepdim=True) / rotated.abs().sum(-1, keepdim=True)
    if mean is not None:
        gain = torch.cat((gain, mean.abs().amax(-1, keepdim=True)), dim=1)
    # Adding a half turns truncation into rounding.
    level = _STEPS_PER_OCTAVE * gain.log2() + (_BYTE_OF_ONE + 0.5)
    if mean is not None:
        stored = level[:, rotated.shape[1] :].floor()
        per_one = torch.exp2(torch.rsub(stored, _OCTAVES_OF_STEPS, alpha=1 / _STEPS_PER_OCTAVE))
        body = torch.cat((body, mean * per_one + (_BYTE_OF_NOTHING + 0.5)), dim=1)
    # No gain is level 0, whose logarithm is below all others.
    return torch.cat((body, level), dim=-1).nan_to_num(0.0).clamp(0, 255).to(torch.uint8)


def _decode(codes: Tensor, boxes: int) -> Tensor:
    """uint8 [blocks, vectors, kv_heads, width] -> fp32 [blocks, boxes, kv_heads, bits]: gain * sign of each direction,
    plus the mean if it is behind the codes.
    """
    tables, numbers = code_tables(codes.device), codes.int()
    bytes_of, levels = numbers[..., :-1], numbers[..., -1]
    gains = tables.gains.index_select(0, levels.flatten()).view(*levels.shape, 1)
    bits = bytes_of.shape[-1] * BITS_PER_BYTE
    signs = tables.signs.index_select(0, bytes_of[:, :boxes].flatten()).view(*levels[:, :boxes].shape, bits)
    found = signs * gains[:, :boxes]
    if boxes == codes.shape[1]:
        return found
    steps = (bytes_of[:, boxes:] - _BYTE_OF_NOTHING).transpose(1, 2)
    pieces = found.unflatten(-1, (_MEAN_VECTORS, -1))
    return pieces.addcmul(steps[:, None], gains[:, boxes:].transpose(1, 2)[:, None], value=1 / STEPS_OF_GAIN).flatten(3)
