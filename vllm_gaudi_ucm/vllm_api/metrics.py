"""vLLM's own statistics, and the loggers that get them."""

from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

__all__ = ["AggregateStatLoggerBase", "IterationStats", "MultiModalCacheStats", "SchedulerStats"]
