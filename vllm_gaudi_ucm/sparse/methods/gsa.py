"""GSA: gather-scatter attention over the blocks that score highest. Source: seed 000."""

from __future__ import annotations

from typing import ClassVar, cast

from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.sparse.options import EsaOptions, GsaOptions, MethodOptions


class GSA(BlockSparse):
    """A selection may serve several steps and several layers; layers may be left dense."""

    Options: ClassVar[type[MethodOptions]] = GsaOptions

    @property
    def reuse_steps(self) -> int:
        return cast(GsaOptions, self.options).reuse_steps

    @property
    def reuse_layers(self) -> int:
        return cast(GsaOptions, self.options).reuse_layers

    @property
    def dense_layers(self) -> tuple[int, ...]:
        return cast(GsaOptions, self.options).dense_layers


class ESA(BlockSparse):
    """The simplest method: nothing is kept between steps or layers."""

    Options: ClassVar[type[MethodOptions]] = EsaOptions
