"""ESA: retrieval at run time, anew in every step and every layer. Source: seed 000, 1.2."""

from __future__ import annotations

from typing import ClassVar

from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.sparse.options import EsaOptions, MethodOptions


class ESA(BlockSparse):
    """The simplest method: nothing is kept between steps or layers."""

    Options: ClassVar[type[MethodOptions]] = EsaOptions
