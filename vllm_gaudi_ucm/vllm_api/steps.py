"""Messages between scheduler and worker: `vllm.v1.core.sched.output`, `vllm.v1.outputs`, `vllm.v1.request`.

Extension point: `SchedulerOutput`, with `NewRequestData`, `CachedRequestData` and `GrammarOutput`, is what a platform
plugin's worker is given; `ModelRunnerOutput`, with `DraftTokenIds`, `KVConnectorOutput`, `LogprobsLists` and
`LogprobsTensors`, is what it returns, or an `AsyncModelRunnerOutput` that is asked for it later. Their fields change
with every minor release, so that a field which some of the supported versions lack is read by a function.
Internal: `Request` and `RequestStatus`, the scheduler's view of a request, which connectors also get.
"""

from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

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

if TYPE_CHECKING:
    from vllm_gaudi_ucm.vllm_api.multimodal import MultiModalKwargsItem

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


def drafts_to_propose(scheduler_output: SchedulerOutput) -> int:
    """Returns how many drafts each request may get after a step, 0 if none could be used.

    Reason: vLLM 0.33 tells in `skip_drafts` that no request of a step will verify any; 0.32 has no such field.
    Remove when: the oldest supported vLLM is 0.33.
    """
    if getattr(scheduler_output, "skip_drafts", False):
        return 0
    return scheduler_output.num_spec_tokens_to_schedule


def first_grammar_rows(scheduler_output: SchedulerOutput, grammar: GrammarOutput) -> list[int]:
    """Returns the first row of each request in a grammar's bitmask. Each request has a row for each draft, and one for
    the token after them.

    Reason: vLLM 0.32 packs the rows; vLLM 0.33 gives each request as many as the most drafts take. The number of rows
    tells which: if both would have the same number, they are the same rows.
    Remove when: the oldest supported vLLM is 0.33.
    """
    names, drafts = grammar.structured_output_request_ids, scheduler_output.scheduled_spec_decode_tokens
    *packed, end = accumulate((1 + len(drafts.get(name, ())) for name in names), initial=0)
    if len(grammar.grammar_bitmask) == end:
        return packed
    each = len(grammar.grammar_bitmask) // len(names)
    return [index * each for index in range(len(names))]


def prompt_tokens(new: NewRequestData) -> list[int]:
    """Returns the tokens of a prompt, 0 for each embedding that the prompt has in place of a token.

    Reason: a prompt of embeddings has no tokens; one of both has a token outside the vocabulary for each embedding.
    Remove when: vLLM sends the tokens that its scheduler counts.
    """
    tokens = new.prompt_token_ids
    if tokens is None:
        return [0] * (0 if new.prompt_embeds is None else len(new.prompt_embeds))
    if new.prompt_is_token_ids is None:
        return tokens
    return [token if known else 0 for token, known in zip(tokens, new.prompt_is_token_ids, strict=True)]


def token_types(new: NewRequestData) -> tuple[int, int]:
    """Returns the first token of a prompt that has the token type 1, and the first one after these. The others have
    the type 0.

    Reason: vLLM 0.33 sends both of a pair of texts; 0.32 sends the first one alone, for all tokens from there on.
    Remove when: the oldest supported vLLM is 0.33.
    """
    found: Any = None if new.pooling_params is None else (new.pooling_params.extra_kwargs or {}).get(_TYPES)
    if found is None:
        return 0, 0
    return (found, len(new.prompt_token_ids or ())) if isinstance(found, int) else cast("tuple[int, int]", tuple(found))


def encoder_input_updates(scheduler_output: SchedulerOutput) -> dict[str, dict[int, "MultiModalKwargsItem | None"]]:
    """Returns new inputs of encoders, by request and by their number in its prompt; None: the input is used up.

    Reason: vLLM 0.33 sends them in steps in the form of its V2 runner; 0.32 has no such field.
    Remove when: the oldest supported vLLM is 0.33.
    """
    return getattr(scheduler_output, "encoder_input_updates", {})


_TYPES = "compressed_token_type_ids"
