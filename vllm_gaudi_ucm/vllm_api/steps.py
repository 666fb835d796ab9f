"""What scheduler and worker say to each other in vLLM: requests, steps, outputs."""

from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, LogprobsLists, LogprobsTensors, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

__all__ = [
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
