"""A summary of phases as plain values, for `--json`."""

from __future__ import annotations

from typing import Any

from vllm_gaudi_ucm.observability.phase_summary import PhaseSummary, PhaseTotals


def summary_json(summary: PhaseSummary) -> dict[str, Any]:
    """Returns totals, and one entry for each phase, most steps first."""
    total = summary.total()
    host = {"host_reads": total.host_reads, "host_stages": dict(total.host_stages.most_common())}
    return {
        **(host if total.host_reads or total.host_stages else {}),
        **total.memory,
        "steps": total.steps,
        "tokens": total.tokens,
        "ms": round(total.ms, 3),
        "planning_share": round(summary.planning_share(), 6),
        "attention_shares": _rounded(total.attention_shares()),
        "phases": [_phase_json(phase, totals, total) for phase, totals in summary.ranked()],
    }


def _phase_json(phase: str, totals: PhaseTotals, total: PhaseTotals) -> dict[str, Any]:
    return {
        "phase": phase,
        "steps": totals.steps,
        "step_share": round(totals.steps / total.steps, 6),
        "tokens": totals.tokens,
        "mean_ms": round(totals.mean_ms, 4),
        "p50_ms": round(totals.p50_ms, 4),
        "time_share": round(totals.ms / total.ms, 6) if total.ms else 0.0,
        "causal_pairs": totals.causal_pairs,
        "shared_pairs": totals.shared_pairs,
        "unique_pairs": totals.unique_pairs,
        **({"selected_pairs": totals.selected_pairs, "sparse": totals.sparse} if total.selected_pairs else {}),
        "attention_shares": _rounded(totals.attention_shares()),
    }


def _rounded(shares: dict[str, float]) -> dict[str, float]:
    return {part: round(share, 6) for part, share in shares.items()}
