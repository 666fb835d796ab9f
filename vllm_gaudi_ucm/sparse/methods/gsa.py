"""GSA: gather-scatter attention over the highest scoring blocks; ESA is GSA without reuse. Sources: seed 000."""

from typing import Annotated, ClassVar, cast

from pydantic import Field

from vllm_gaudi_ucm.prefetch.options import EngineOptions
from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.sparse.options import BlockOptions, MethodOptions


class GsaOptions(EngineOptions, BlockOptions):
    """Options of GSA: a selection may serve several steps and several layers."""

    reuse_steps: Annotated[int, Field(ge=1)] = Field(
        default=1, description="Steps that one selection serves; 1 selects anew in every step."
    )
    reuse_layers: Annotated[int, Field(ge=1)] = Field(
        default=1, description="Consecutive layers that share the selection of the first of them."
    )
    dense_layers: tuple[Annotated[int, Field(ge=0, strict=True)], ...] = Field(
        default=(), strict=False, description="Indices of layers that attend to the whole context."
    )


class GSA(BlockSparse):
    """A method whose selection may serve several steps and several layers; layers may be dense."""

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
    """GSA without reuse: it chooses anew in every step and in every layer."""
