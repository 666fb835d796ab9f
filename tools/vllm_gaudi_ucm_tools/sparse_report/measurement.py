"""One case of `gaudi-ucm sparse-report`, measured: speed and answer of a free run, recall along the dense answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from statistics import median
from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm_tools.sparse_report.cases import Case
from vllm_gaudi_ucm_tools.sparse_report.engine import EngineSettings, Reply, SparseEngine

if TYPE_CHECKING:
    pass

SWITCHED_OFF = {"ucm_sparse": False}
# of a sparse and a dense answer in turn: on a machine that others use both then meet the same load
ROUNDS = 2


@dataclass(frozen=True)
class Agreement:
    """Shares of the decoded tokens, the first of the answer left out: it comes from the prompt, which is dense.

    prefix: equal to dense up to the first difference. everywhere: equal at the same place. followed: the model's next
    token, given the dense answer so far.
    """

    prefix: float = 1.0
    everywhere: float = 1.0
    followed: float = 1.0

    @classmethod
    def from_tokens(cls, dense: Sequence[int], free: Sequence[int], followed: Sequence[int]) -> Agreement:
        """dense, free, followed: token ids of equal length >= 2."""
        equal = [one == other for one, other in zip(free[1:], dense[1:], strict=True)]
        same = [one == other for one, other in zip(followed[1:], dense[1:], strict=True)]
        prefix = sum(takewhile(bool, equal))
        return cls(prefix / len(equal), sum(equal) / len(equal), sum(same) / len(same))


@dataclass(frozen=True)
class Measurement:
    """The measurements of a case.

    tokens: tokens of the free answer. prefill_tokens_per_s: speed of the whole prompt. dense_tokens_per_s: decode of a
    request that is dense, in the same engine. recall, best: by layer, the attention mass of the attended blocks and of
    the best choice of as many. attended: share of the context's tokens.
    """

    case: Case
    tokens: list[int]
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    dense_tokens_per_s: float
    agreement: Agreement = field(default_factory=Agreement)
    recall: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    attended: float = 1.0

    @property
    def speedup(self) -> float:
        """Speed of decode steps, relative to those of a dense request."""
        return self.decode_tokens_per_s / self.dense_tokens_per_s

    @property
    def mean_recall(self) -> float:
        return sum(self.recall) / len(self.recall)

    @property
    def mean_best(self) -> float:
        return sum(self.best) / len(self.best)


def num_steps(cases: Sequence[Case], prompt: int, max_tokens: int, chunk: int) -> int:
    """Steps of all cases together, for a prompt of this length, computed in chunks."""
    sparse = sum(case.options is not None for case in cases)
    # a prompt that is cached takes one step
    answers = len(cases) + sparse * 2 * ROUNDS
    return len(cases) * (-(-prompt // chunk) - 1) + answers * max_tokens


def measure(
    case: Case,
    settings: EngineSettings,
    prompt: Sequence[int],
    max_tokens: int,
    on_step: Callable[[], None],
) -> Measurement:
    """Starts an engine for the case, and another without graphs if the device uses graphs.

    prompt: token ids. max_tokens: of the answer, at least 3. on_step: called after every step of an engine.
    """
    with SparseEngine(settings, case.ucm, true_shapes=settings.serves_true_shapes) as engine:
        free = engine.answer(prompt, max_tokens, on_step)
        prefill = len(prompt) / free.first_token_s
        if case.options is None:
            decode, layers = _decode_tokens_per_s(free), [1.0] * len(engine.layers())
            return Measurement(case, free.tokens, prefill, decode, decode, recall=layers, best=layers)
        # in the same engine, with the prompt in the prefix cache
        dense = [engine.answer(prompt, max_tokens, on_step, SWITCHED_OFF)]
        sparse = [free]
        for _ in range(1, ROUNDS):
            sparse.append(engine.answer(prompt, max_tokens, on_step))
            dense.append(engine.answer(prompt, max_tokens, on_step, SWITCHED_OFF))
        expected = dense[0].tokens
        followed = _follow(engine, prompt, expected, on_step) if settings.serves_true_shapes else None
    if followed is None:
        with SparseEngine(settings, case.ucm, true_shapes=True) as engine:
            followed = _follow(engine, prompt, expected, on_step)
    reply, figures = followed
    return Measurement(
        case,
        free.tokens,
        prefill,
        decode_tokens_per_s=_decode_tokens_per_s(*sparse),
        dense_tokens_per_s=_decode_tokens_per_s(*dense),
        agreement=Agreement.from_tokens(expected, free.tokens, reply.likeliest),
        **figures,
    )


def _decode_tokens_per_s(*replies: Reply) -> float:
    """Computes the speed from the median step, because a shared machine stalls now and then."""
    return 1.0 / median(seconds for reply in replies for seconds in reply.step_s)


def _follow(
    engine: SparseEngine, prompt: Sequence[int], tokens: Sequence[int], on_step: Callable[[], None]
) -> tuple[Reply, dict[str, Any]]:
    """The run along given tokens, and its recall."""
    from vllm_gaudi_ucm_tools.sparse_report.forced_tokens import FORCED
    from vllm_gaudi_ucm_tools.sparse_report.recall import RecallRecorder

    recorder, method = RecallRecorder(engine.layers()), engine.method
    assert method is not None, "the case has a method"
    with recorder.watching(method):
        reply = engine.answer(prompt, len(tokens), on_step, {FORCED: list(tokens)}, logprobs=1)
    layers = recorder.layers
    if not all(layer.steps for layer in layers):
        raise ValueError(
            f"{type(method).__name__}: no step of the report was sparse; give a longer text or a lower --min-tokens"
        )
    return reply, {
        "recall": [layer.attended / layer.steps for layer in layers],
        "best": [layer.best / layer.steps for layer in layers],
        "attended": sum(layer.tokens for layer in layers) / sum(layer.context for layer in layers),
    }
