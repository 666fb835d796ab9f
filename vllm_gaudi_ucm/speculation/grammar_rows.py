"""A grammar's bitmask has a row for every draft and one more; a position takes its own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from vllm.v1.core.sched.output import GrammarOutput

from vllm_gaudi_ucm.sampling.token_sampler import Grammar


def grammar_at(grammar: Grammar, position: int, req_ids: Collection[str]) -> Grammar | None:
    """The grammar as of a step without drafts: one row per request of `req_ids` that has one, None if none has.

    The scheduler fills a draft's row with what may follow the drafts before it, and those of -1 (see StepDrafts), which
    are never reached, with everything. Source: vLLM's `StructuredOutputManager.grammar_bitmask`.
    """
    scheduled, output = grammar
    drafts = scheduled.scheduled_spec_decode_tokens
    if not drafts:
        return grammar
    names, lines, line = [], [], 0
    for request_id in output.structured_output_request_ids:
        if request_id in req_ids:
            names.append(request_id)
            lines.append(line + position)
        line += 1 + len(drafts.get(request_id, ()))
    if not names:
        return None
    return Grammar(
        replace(scheduled, scheduled_spec_decode_tokens={}), GrammarOutput(names, output.grammar_bitmask[lines])
    )
