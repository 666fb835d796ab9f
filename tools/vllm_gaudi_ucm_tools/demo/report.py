"""The findings of `gaudi-ucm demo`, as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.rule import Rule
from rich.text import Text

from vllm_gaudi_ucm.observability.phase_summary import PhaseSummary, attention_sentence, summary_table
from vllm_gaudi_ucm.observability.step_record import StepRecord
from vllm_gaudi_ucm.options.errors import counted
from vllm_gaudi_ucm_tools.demo.engine import Answer
from vllm_gaudi_ucm_tools.demo.load import GUIDE, LONG, SAMPLED, SHORT
from vllm_gaudi_ucm_tools.output import report_console
from vllm_gaudi_ucm_tools.phases.phase_bars import phase_bars
from vllm_gaudi_ucm_tools.phases.summary_json import summary_json

LINE = 76
ANSWER_LINES = 3
SHOWN = {SHORT: 2, GUIDE: 3, SAMPLED: 1, LONG: 1}
KIND_TITLES = {
    SHORT: "short prompts",
    GUIDE: "prompts after one shared system prompt",
    SAMPLED: "several samples of one prompt",
    LONG: "long prompts",
}


@dataclass
class DemoResult:
    """All answers, the time they took, and the steps that computed them."""

    answers: Sequence[Answer]
    start_up_s: float
    seconds: float
    header: dict[str, Any] = field(default_factory=dict)
    records: Sequence[StepRecord] = ()

    @property
    def prompt_tokens(self) -> int:
        return sum(answer.prompt_tokens for answer in self.answers)

    @property
    def cached_tokens(self) -> int:
        return sum(answer.cached_tokens for answer in self.answers)

    @property
    def output_tokens(self) -> int:
        return sum(answer.output_tokens for answer in self.answers)

    @property
    def first_token_s(self) -> float:
        """Median time to the first token."""
        return median(answer.first_token_s or 0.0 for answer in self.answers)

    def to_json(self) -> dict[str, Any]:
        """The result as plain values."""
        return {
            "engine": self.header,
            "requests": len(self.answers),
            "finished": sum(answer.finished for answer in self.answers),
            "start_up_s": round(self.start_up_s, 3),
            "seconds": round(self.seconds, 3),
            "prompt_tokens": self.prompt_tokens,
            "cached_prompt_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "prompt_tokens_per_s": round(self.prompt_tokens / self.seconds, 2),
            "output_tokens_per_s": round(self.output_tokens / self.seconds, 2),
            "median_first_token_s": round(self.first_token_s, 4),
            "answers": [_answer_json(answer) for answer in self.answers],
            "phases": summary_json(PhaseSummary(self.records)),
        }


def show_result(result: DemoResult, plot: Path | None = None) -> None:
    """Print some answers, the throughput, and the phases."""
    console = report_console()
    for kind, count in SHOWN.items():
        console.print(_rule(KIND_TITLES[kind]), width=LINE)
        for answer in [answer for answer in result.answers if answer.request.kind == kind][:count]:
            console.print(answer_text(answer))
    console.print(_rule("throughput"), width=LINE)
    console.print(throughput_text(result))
    summary = PhaseSummary(result.records)
    console.print(_rule(f"phases of {counted(summary.steps, 'step')}"), width=LINE)
    console.print(phase_bars(summary))
    console.print(summary_table(summary))
    console.print(attention_sentence(summary))
    if plot is not None:
        console.print(f"picture written to {plot}", markup=False)


def answer_text(answer: Answer) -> Text:
    """Question and answers, each trimmed to a few lines."""
    request = answer.request
    question = request.question
    if request.kind == LONG:
        question = f"{question.splitlines()[0]} [...] {question.splitlines()[-1]} ({answer.prompt_tokens:,} tokens)"
    text = Text(f"{_trim(question, 2)}\n", style="bold")
    for sample in answer.texts:
        text.append(textwrap.indent(_trim(sample, 1 if request.n > 1 else ANSWER_LINES), "  ") + "\n", style="not bold")
    return text


def throughput_text(result: DemoResult) -> str:
    """Tokens, seconds and rates in a few lines."""
    seconds = result.seconds
    return (
        f"{counted(len(result.answers), 'request')} in {seconds:.1f} s, start-up {result.start_up_s:.1f} s, "
        f"median time to first token {result.first_token_s:.2f} s\n"
        f"prompt  {result.prompt_tokens:>7,} tokens  {result.prompt_tokens / seconds:>8.1f} tokens/s  "
        f"({result.cached_tokens:,} of them from the prefix cache)\n"
        f"output  {result.output_tokens:>7,} tokens  {result.output_tokens / seconds:>8.1f} tokens/s"
    )


def _rule(title: str) -> Rule:
    return Rule(title, align="left", style="dim")


def _trim(text: str, lines: int) -> str:
    """Returns at most `lines` lines of LINE characters, with line breaks, and an ellipsis if text is left out."""
    wrapped = [line for paragraph in text.split("\n") for line in textwrap.wrap(paragraph, LINE - 4)]
    if len(wrapped) > lines:
        wrapped[lines - 1] += " ..."
    return "\n".join(wrapped[:lines]) or "(empty)"


def _answer_json(answer: Answer) -> dict[str, Any]:
    return {
        "kind": answer.request.kind,
        "question": answer.request.question,
        "answers": answer.texts,
        "prompt_tokens": answer.prompt_tokens,
        "cached_prompt_tokens": answer.cached_tokens,
        "output_tokens": answer.output_tokens,
        "first_token_s": None if answer.first_token_s is None else round(answer.first_token_s, 4),
    }
