"""Decides once at start, by one table (`SYNCHRONOUS`), whether the next step is planned while one runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.scheduler.scheduler_class import is_foreign
from vllm_gaudi_ucm.sparse.registry import method_class
from vllm_gaudi_ucm.vllm_api.platforms import is_pooling

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.config.ucm_config import UcmConfig

logger = plugin_logger(__name__)


class Engine(NamedTuple):
    """The inputs of the decision. device: its kind."""

    vllm: VllmConfig
    ucm: UcmConfig
    device: str


class Synchronous(NamedTuple):
    """A row of the table.

    Args:
        what: is used.
        why: steps wait for their tokens then.
        is_used: by an engine.
    """

    what: str
    why: str
    is_used: Callable[[Engine], object]


def _decides_by_counts(config: UcmConfig) -> bool:
    """True if there is no sparse method, or one that workers may have decide."""
    name = config.ucm_sparse_method
    if name is None:
        return True
    return method_class(name).decides_by_counts(config.ucm_sparse_config.options(name))


SYNCHRONOUS: tuple[Synchronous, ...] = (
    Synchronous(
        "a Gaudi card",
        "the copies of tokens to the host are not known to be safe during the next step there",
        lambda e: e.device == "hpu",
    ),
    Synchronous(
        "a CPU",
        "steps and plans take the same cores; `ucm.scheduler.async_scheduling` true switches it on",
        lambda e: e.device == "cpu" and e.ucm.scheduler.async_scheduling == "auto",
    ),
    Synchronous(
        "another KV connector than ours on a GPU",
        "moving blocks during the next step has not run on a GPU yet; `ucm.scheduler.async_scheduling` true allows it",
        lambda e: (
            e.device == "cuda"
            and e.ucm.scheduler.async_scheduling == "auto"
            and e.vllm.kv_transfer_config is not None
            and e.vllm.kv_transfer_config.kv_connector != "UcmConnector"
        ),
    ),
    Synchronous(
        "ucm.scheduler.async_scheduling false",
        "the configuration says so",
        lambda e: e.ucm.scheduler.async_scheduling is False,
    ),
    Synchronous(
        "stages of a pipeline",
        "the first stage gets the tokens of the last one with the scheduler's next step",
        lambda e: e.vllm.parallel_config.pipeline_parallel_size > 1,
    ),
    Synchronous(
        "several workers of several engines",
        "before each forward their hosts agree on its shape",
        lambda e: e.vllm.parallel_config.world_size > 1 and e.vllm.parallel_config.data_parallel_size > 1,
    ),
    Synchronous(
        "another executor than `uni` and `mp`",
        "only these two of vLLM's are known to take a step while one runs",
        lambda e: e.vllm.parallel_config.distributed_executor_backend not in (None, "uni", "mp"),
    ),
    Synchronous(
        "drafts by n-grams",
        "vLLM's own check of its configuration refuses it (`VllmConfig.__post_init__`): "
        "they are looked up among the tokens on the host",
        lambda e: e.vllm.speculative_config is not None and e.vllm.speculative_config.method == "ngram",
    ),
    Synchronous(
        "drafts with a sparse method that does not decide by counts",
        "what it may read of requests only the scheduler has, which does not know yet how many drafts are right",
        lambda e: e.vllm.speculative_config is not None and not _decides_by_counts(e.ucm),
    ),
    Synchronous(
        "ucm.memory_mode",
        "blocks move between steps, at the scheduler's word about a step that has ended",
        lambda e: e.ucm.memory_mode.enabled,
    ),
    Synchronous(
        "a model that pools",
        "a step yields no tokens that the next one could wait for",
        lambda e: is_pooling(e.vllm),
    ),
    Synchronous(
        "a scheduler of your own", "it may be none that schedules ahead", lambda e: is_foreign(e.vllm.scheduler_config)
    ),
)
"""The reasons that keep an engine synchronous."""


def reasons(vllm_config: VllmConfig, config: UcmConfig, device: str) -> list[Synchronous]:
    """The rows that an engine has. vllm_config: with a model. device: its kind."""
    engine = Engine(vllm_config, config, device)
    return [row for row in SYNCHRONOUS if row.is_used(engine)]


def schedules_ahead(vllm_config: VllmConfig, config: UcmConfig, device: str) -> bool:
    """True if an engine does: `async_scheduling`, as vLLM has made it of its flags, if nothing speaks against it.

    The answer is the same when vLLM comes a second time, with a copy of its configuration. device: its kind.
    """
    if not vllm_config.scheduler_config.async_scheduling or vllm_config.model_config is None:
        return False
    found = reasons(vllm_config, config, device)
    if found:
        logger.info("Asynchronous scheduling is off: %s", "; ".join(f"{row.what}: {row.why}" for row in found))
    else:
        logger.info("Asynchronous scheduling is on: the next step is planned while one runs.")
    return not found
