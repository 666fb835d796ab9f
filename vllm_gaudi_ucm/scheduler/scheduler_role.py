"""Creates the scheduler role of the configured method, and says at start where it cannot do anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.sparse.base import UcmSparseBase, UcmSparseRole
from vllm_gaudi_ucm.sparse.budget import shortest_sparse_context
from vllm_gaudi_ucm.sparse.factory import SparseMethodError, UcmSparseFactory
from vllm_gaudi_ucm.sparse.options import BlockOptions

if TYPE_CHECKING:
    from vllm_gaudi_ucm.config.ucm_config import UcmConfig

logger = plugin_logger(__name__)


def scheduler_role(config: UcmConfig, block_size: int, max_model_len: int) -> UcmSparseBase | None:
    """The method's object in the engine process, None without a method.

    Raises `SparseMethodError` for a method that changes how many slots requests have: nothing here would ask it.
    """
    name = config.ucm_sparse_method
    if name is None:
        return None
    method = UcmSparseFactory.create_sparse_method(name, UcmSparseRole.SCHEDULER, config)
    selecting = method.selecting_method
    for hook in ("estimate_num_slots_sparsed", "allocate_slots"):
        if getattr(type(selecting), hook) is not getattr(UcmSparseBase, hook):
            raise SparseMethodError(
                f"ucm.ucm_sparse_method: found {name!r}, whose {type(selecting).__name__}.{hook} changes the slots of "
                "requests, expected a method that leaves them alone; this version keeps every block of a request"
            )
    method.register_block_size(block_size)
    options = selecting.options
    if isinstance(options, BlockOptions):
        shortest = shortest_sparse_context(block_size, options)
        logger.info("Sparse method %s: contexts of %d tokens and more are sparse.", name, shortest)
        if shortest > max_model_len:
            logger.warning(
                "Sparse method %s: no request will be sparse, because contexts end at --max-model-len %d and the "
                "shortest sparse context is %d tokens; lower min_tokens or the windows, or raise --max-model-len.",
                name,
                max_model_len,
                shortest,
            )
    return method
