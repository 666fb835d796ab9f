"""Statistics of an engine, and loggers for them: `vllm.v1.metrics`.

Extension point: the entry point group `vllm.stat_logger_plugins` names subclasses of `AggregateStatLoggerBase`.
`IterationStats`, `MultiModalCacheStats` and `SchedulerStats`, which they are given, are not stable.
"""

from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

__all__ = ["AggregateStatLoggerBase", "IterationStats", "MultiModalCacheStats", "SchedulerStats"]
