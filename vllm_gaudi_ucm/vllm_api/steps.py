"""Messages between scheduler and worker: `vllm.v1.core.sched.output`, `vllm.v1.outputs`, `vllm.v1.request`.

Extension point: `SchedulerOutput`, with `NewRequestData`, `CachedRequestData` and `GrammarOutput`, is what a platform
plugin's worker is given; `ModelRunnerOutput`, with `DraftTokenIds`, `KVConnectorOutput`, `LogprobsLists` and
`LogprobsTensors`, is what it returns, or an `AsyncModelRunnerOutput` that is asked for it later. Their fields change
with every minor release.
Internal: `Request` and `RequestStatus`, the scheduler's view of a request, which connectors also get.
"""

from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.outputs import (
    AsyncModelRunnerOutput,
    DraftTokenIds,
    KVConnectorOutput,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
)
from vllm.v1.request import Request, RequestStatus

__all__ = [
    "AsyncModelRunnerOutput",
    "CachedRequestData",
    "DraftTokenIds",
    "GrammarOutput",
    "KVConnectorOutput",
    "LogprobsLists",
    "LogprobsTensors",
    "ModelRunnerOutput",
    "NewRequestData",
    "Request",
    "RequestStatus",
    "SchedulerOutput",
]
