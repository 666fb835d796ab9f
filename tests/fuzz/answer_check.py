"""The check of an answer: every token against the logits of Hugging Face, its logprobs, and where it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from vllm import SamplingParams

NEAR_TIE = 3e-3
"""Two float32 computations may order tokens differently if their logits are closer than this."""
NEAR_LOGPROB = 5e-3
"""Logprobs of two float32 computations differ by less."""


class Score(Protocol):
    """vLLM's `Logprob`."""

    logprob: float


class Grammar(Protocol):
    """A grammar in the middle of an answer."""

    def allowed(self) -> torch.Tensor:
        """bool [vocabulary]."""

    def accept(self, token: int) -> bool:
        """Advances by a token. Returns False if the grammar does not allow it."""


@dataclass
class Answer:
    """One completion, or one turn of a session.

    Args:
        name: of the request.
        prompt: all token ids before the answer.
        params: as vLLM made them of a client's.
        tokens: of the answer.
        reason: `stop` or `length`; None if it has no end.
        text: None without a tokenizer.
        scores: for each token, logprobs by token id; None if none were asked for.
        prompt_scores: for each token of the prompt; None if none were asked for.
        is_cut: whether its client left before the end.
        is_exact: true if dense attention gives the same tokens.
    """

    name: str
    prompt: Sequence[int]
    params: SamplingParams
    tokens: Sequence[int]
    reason: str | None = None
    text: str | None = None
    scores: Sequence[Mapping[int, Score] | None] | None = None
    prompt_scores: Sequence[Mapping[int, Score] | None] | None = None
    is_cut: bool = False
    is_exact: bool = True


class AnswerCheck:
    """Checks answers.

    Args:
        logits: token ids -> float32 [length, vocabulary], after each of them.
        max_length: tokens of the longest request.
        grammar: a new grammar of a request's parameters; None if it has none.
    """

    def __init__(
        self,
        logits: Callable[[Sequence[int]], torch.Tensor],
        max_length: int,
        grammar: Callable[[SamplingParams], Grammar | None] = lambda params: None,
    ) -> None:
        self._logits, self._max_length, self._grammar = logits, max_length, grammar

    def problems(self, answer: Answer) -> Iterator[str]:
        """Yields a line for each problem of an answer."""
        for problem in self._found(answer):
            yield f"{answer.name}: {problem}"

    def _found(self, answer: Answer) -> Iterator[str]:
        if not answer.is_cut:
            yield from self._end(answer)
        if answer.params.logprobs is not None and answer.scores is not None:
            wrong = len(answer.scores) != len(answer.tokens)
            if wrong:
                yield f"{len(answer.scores)} logprobs for {len(answer.tokens)} tokens"
                return
        if answer.is_exact and answer.tokens:
            yield from self._tokens(answer)
        if answer.is_exact and answer.params.prompt_logprobs is not None and answer.tokens:
            yield from self._prompt(answer)

    def _end(self, answer: Answer) -> Iterator[str]:
        params, tokens, reason = answer.params, answer.tokens, answer.reason
        room = min(params.max_tokens or self._max_length, self._max_length - len(answer.prompt))
        stops = stop_tokens(params)
        if reason is None:
            yield f"no end after {len(tokens)} tokens"
        early = [index for index, token in enumerate(tokens[:-1]) if token in stops]
        if early:
            yield f"goes on after token {early[0]}: {tokens[early[0]]}, at which it stops"
        if reason == "length" and len(tokens) != room:
            yield f"ends at length {len(tokens)}, wanted {room}"
        if reason == "length" and tokens and tokens[-1] in stops:
            yield f"ends by length at {tokens[-1]}, wanted a stop"
        text_stops = [stop for stop in params.stop or () if stop in (answer.text or "")]
        if reason == "stop" and not params.stop and not (tokens and tokens[-1] in stops):
            yield f"stops after {list(tokens[-3:])}, none of them a stop"
        if text_stops and not params.include_stop_str_in_output and not params.min_tokens:
            yield f"text goes on after {text_stops}: {answer.text!r}"
        if len(tokens) > room:
            yield f"{len(tokens)} tokens, wanted at most {room}"
        if reason == "stop" and len(tokens) < params.min_tokens:
            yield f"stops after {len(tokens)} tokens, wanted {params.min_tokens}"

    def _tokens(self, answer: Answer) -> Iterator[str]:
        rows = self._logits([*answer.prompt, *answer.tokens[:-1]])[len(answer.prompt) - 1 :]
        grammar = self._grammar(answer.params)
        for index, token in enumerate(answer.tokens):
            raw = rows[index]
            if grammar is not None:
                # vLLM's raw logprobs are without what a grammar forbids
                raw = raw.masked_fill(~grammar.allowed(), float("-inf"))
                if not grammar.accept(token):
                    yield f"token {index}: {token}, which the grammar does not allow"
                    return
            row = processed(raw, answer.prompt, answer.tokens[:index], answer.params)
            if not row.isfinite().any():
                # everything is forbidden: no choice is wrong
                continue
            least = worst_allowed(row, answer.params)
            if not least - float(row[token]) < NEAR_TIE:
                gap = least - float(row[token])
                why = f"{gap:.4f} too low" if math.isfinite(gap) else "which is forbidden"
                yield f"token {index} of {len(answer.tokens)}: {token}, wanted {int(row.argmax())}, {why}"
                return
            if answer.scores is not None and (wrong := wrong_scores(raw, token, answer.scores[index])):
                yield f"token {index} of {len(answer.tokens)}: {wrong}"
                return

    def _prompt(self, answer: Answer) -> Iterator[str]:
        found = answer.prompt_scores
        if found is None or len(found) != len(answer.prompt):
            count = "no" if found is None else str(len(found))
            yield f"{count} prompt logprobs, wanted {len(answer.prompt)}"
            return
        rows = self._logits(answer.prompt)
        for index in range(1, len(answer.prompt)):
            if wrong := wrong_scores(rows[index - 1], answer.prompt[index], found[index]):
                yield f"prompt token {index} of {len(answer.prompt)}: {wrong}"
                return


def stop_tokens(params: SamplingParams) -> set[int]:
    """Tokens at which an answer stops."""
    ends = set(params.stop_token_ids or ())
    return ends if params.eos_token_id is None else ends | {params.eos_token_id}


def wrong_scores(row: torch.Tensor, token: int, found: Mapping[int, Score] | None) -> str | None:
    """Compares the logprobs at one place, the token's own and the best ones, with raw logits. None: they agree."""
    if found is None or token not in found:
        return f"no logprob of {token}"
    wanted = torch.log_softmax(row, 0)
    for other, score in found.items():
        if score.logprob != wanted[other] and not abs(score.logprob - float(wanted[other])) < NEAR_LOGPROB:
            return f"logprob of {other}: {score.logprob:.4f}, wanted {float(wanted[other]):.4f}"
    # the chosen one comes with them, if it is none of them
    others = len(found) - 1
    best = wanted.topk(others).values if others else wanted[:0]
    ranked = sorted((score.logprob for score in found.values()), reverse=True)
    if any(one < float(other) - NEAR_LOGPROB for one, other in zip(ranked, best, strict=False)):
        return f"best logprobs {[round(one, 4) for one in ranked]}, wanted {[round(one, 4) for one in best.tolist()]}"
    return None


def worst_allowed(row: torch.Tensor, params: SamplingParams) -> float:
    """The lowest logit that may be chosen. row: processed."""
    if params.temperature == 0 or params.top_k == 1:
        return float(row.max())
    if params.top_k in (-1, 0, None):
        # finite logits are of tokens that are allowed
        return float(row[row.isfinite()].min())
    return float(row.topk(min(params.top_k, len(row))).values[-1])


def processed(row: torch.Tensor, prompt: Sequence[int], outputs: Sequence[int], params: SamplingParams) -> torch.Tensor:
    """Applies to a row of logits what vLLM's sampler does before it chooses. outputs: tokens before this one."""
    row = row.clone()
    if params.allowed_token_ids:
        mask = torch.full_like(row, float("-inf"))
        mask[params.allowed_token_ids] = 0
        row += mask
    for word in params.bad_words_token_ids or ():
        before = len(word) - 1
        if before <= len(outputs) and list(outputs[len(outputs) - before :]) == list(word[:-1]):
            row[word[-1]] = float("-inf")
    if len(outputs) < params.min_tokens:
        row[[token for token in params.all_stop_token_ids if token < len(row)]] = float("-inf")
    for token, bias in (params.logit_bias or {}).items():
        row[int(token)] += bias
    return _penalised(row, prompt, outputs, params)


def _penalised(
    row: torch.Tensor, prompt: Sequence[int], outputs: Sequence[int], params: SamplingParams
) -> torch.Tensor:
    if params.repetition_penalty == 1 and not params.presence_penalty and not params.frequency_penalty:
        return row
    counts = torch.bincount(torch.tensor(list(outputs), dtype=torch.int64), minlength=len(row)).float()
    seen = counts > 0
    seen[list(prompt)] = True
    factor = torch.where(seen, params.repetition_penalty, 1.0)
    row = torch.where(row > 0, row / factor, row * factor)
    return row - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
