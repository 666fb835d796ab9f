"""Options of the method that chooses blocks, whichever of a server's methods that is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.sparse.base import UcmSparseRole
from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.sparse.factory import UcmSparseFactory

if TYPE_CHECKING:
    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.sparse.options import BlockOptions


def block_options(config: UcmConfig) -> BlockOptions | None:
    """Those of `ucm_sparse_method`, or of its base method; None where nothing chooses blocks."""
    if config.ucm_sparse_method is None:
        return None
    method = UcmSparseFactory.create_sparse_method(config.ucm_sparse_method, UcmSparseRole.WORKER, config)
    selecting = method.selecting_method
    return selecting.block_options if isinstance(selecting, BlockSparse) else None
