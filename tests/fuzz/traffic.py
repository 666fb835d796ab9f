"""Traffic of a seed: requests, sessions, aborts, resets of the cache, and pauses, each before a step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.fuzz.draws import Draws
from tests.fuzz.setting import Setting

PAUSES = (0.07, 0.25)
"""Seconds without a step: an engine counts as idle after a part of either, and warms one graph or several."""
_FIRST = 3
"""The first id of a tiny model that is no special token."""
_ALTERNATIVES = (
    {"regex": r"\d{3,7}"},
    {"choice": ["yes", "no", "maybe not"]},
    {"json": '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'},
    {"regex": r"[a-c]+(-[a-c]+)*"},
)
_STOPS = ("e", "th", " a", "\n", "er", "1", "ing")
_BAD_WORDS = ("the", "a", " of", "and", "er", "in")


@dataclass(frozen=True)
class Ask:
    """A request.

    Args:
        name: unique among the requests of a seed.
        step: before which it comes.
        prompt: token ids.
        params: its sampling parameters; of a client, so without what vLLM adds.
        priority: less is more urgent.
        aborted: steps after its arrival; None if it is not aborted.
    """

    name: str
    step: int
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    aborted: int | None = None


@dataclass(frozen=True)
class Turn:
    """An input of a session. delay: steps after the last turn's end; None: sent at once, while that one runs."""

    prompt: list[int]
    params: SamplingParams
    delay: int | None


@dataclass(frozen=True)
class Session:
    """A streamed session. aborted: whether its client leaves instead of ending it."""

    name: str
    step: int
    turns: list[Turn]
    aborted: bool


@dataclass(frozen=True)
class Reset:
    """A reset of the prefix cache. running: whether requests in service are preempted for it."""

    step: int
    running: bool
    store: bool


@dataclass
class Traffic:
    """Everything that clients do, in no order. pauses: steps before which `pause` seconds pass."""

    asks: list[Ask] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    resets: list[Reset] = field(default_factory=list)
    pauses: frozenset[int] = frozenset()
    pause: float = PAUSES[0]

    @property
    def last_step(self) -> int:
        """The last step before which something happens by its number alone."""
        return max([0, *(one.step for one in [*self.asks, *self.sessions, *self.resets])])


def draw_traffic(draws: Draws, setting: Setting) -> Traffic:
    """The traffic of a seed for an engine of this setting."""
    count = draws.number("requests", 10, 48)
    length = draws.choose("arrivals", (1, 2, 4), (1, 2, 1)) * count
    clients = _Clients(draws.stream("clients"), setting, length, draws.chance("odd_seeds", 0.15))
    features = draws.choose("features", ("mixed", "plain"), (6, 1))
    traffic = Traffic(asks=[clients.ask(f"r{index}", features == "mixed") for index in range(count)])
    sessions = draws.choose("sessions", (0, 1, 2), (4, 2, 1))
    traffic.sessions = [clients.session(f"s{index}", features == "mixed") for index in range(sessions)]
    rng = draws.stream("resets")
    for _ in range(draws.choose("resets", (0, 1, 3), (6, 2, 1))):
        store = "kv_transfer_config" in setting.options and rng.random() < 0.5
        traffic.resets.append(Reset(rng.randrange(length + 10), rng.random() < 0.5, store))
    rng = draws.stream("pauses")
    if setting.gaps or rng.random() < 0.2:
        # most graphs are cold at first
        places = [rng.randrange(rng.choice([20, length + 20])) for _ in range(rng.randint(3, 14))]
        traffic.pauses = frozenset(places)
        traffic.pause = rng.choice(PAUSES)
    return traffic


class _Clients:
    """Draws requests whose prompts begin alike now and then."""

    def __init__(self, rng: random.Random, setting: Setting, length: int, odd: bool) -> None:
        self._rng, self._setting, self._length, self._odd = rng, setting, length, odd
        self._common = [self._tokens(rng.randrange(20, setting.max_length - 60)) for _ in range(3)]

    def ask(self, name: str, mixed: bool) -> Ask:
        rng = self._rng
        prompt = self._prompt()
        params = SamplingParams(**self._params(mixed))
        priority = rng.randrange(3) if "scheduling_policy" in self._setting.options else 0
        aborted = rng.randrange(25) if rng.random() < 0.2 else None
        return Ask(name, rng.randrange(self._length), prompt, params, priority, aborted)

    def session(self, name: str, mixed: bool) -> Session:
        rng = self._rng
        turns: list[Turn] = []
        switch = rng.choice([None, False, True])
        for number in range(rng.randint(2, 4)):
            options: dict[str, Any] = {"temperature": 0.0, "max_tokens": rng.randint(1, 14), "ignore_eos": True}
            if mixed:
                options |= self._processed(rng)
            if rng.random() < 0.1:
                switch = rng.choice([None, False, True])
            if switch is not None:
                options["extra_args"] = {"ucm_sparse": switch}
            delay = None if number and rng.random() < 0.3 else rng.randrange(6)
            turns.append(Turn(self._tokens(rng.randint(1, 30)), SamplingParams(**options), delay))
        return Session(name, rng.randrange(self._length), turns, rng.random() < 0.3)

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(_FIRST, self._setting.model.vocabulary) for _ in range(count)]

    def _prompt(self) -> list[int]:
        rng = self._rng
        most = self._setting.max_length - 2
        own = self._tokens(rng.choice([1, rng.randint(1, 12), rng.randint(1, 60), rng.randint(1, most)]))
        if rng.random() < 0.45:
            common = rng.choice(self._common)
            own = common[: rng.randint(1, len(common))] + own
        # some repeat themselves, for drafts by n-grams
        return (own * 4 if rng.random() < 0.15 else own)[:most]

    def _params(self, mixed: bool) -> dict[str, Any]:
        """mixed: whether parameters beyond length and temperature are drawn."""
        rng = self._rng
        # some reach the longest context that the engine serves
        most = rng.choice([1, rng.randint(1, 12), rng.randint(8, 40), rng.randint(20, 70)])
        options: dict[str, Any] = {"temperature": 0.0, "max_tokens": most, "ignore_eos": rng.random() < 0.7}
        if self._setting.ratio is not None:
            options["extra_args"] = rng.choice([None, {"ucm_sparse": False}, {"ucm_sparse": True}])
        if not mixed:
            return options
        kind = rng.choices(["greedy", "top_k 1", "random"], (6, 2, 2))[0]
        if kind != "greedy":
            options |= {"temperature": rng.choice([0.3, 1.0, 2.0]), "seed": self._seed(), "n": rng.choice([1, 1, 2, 3])}
            options["top_k"] = 1 if kind == "top_k 1" else rng.choice([2, 5, 20, 0])
        if kind == "random":
            options["top_p"] = rng.choice([1.0, 0.9, 0.5])
        if rng.random() < 0.4:
            options["logprobs"] = rng.randrange(4)
        if rng.random() < 0.12:
            options["prompt_logprobs"] = rng.randrange(3)
        if self._setting.model.speaks and rng.random() < 0.2:
            grammar = StructuredOutputsParams(**rng.choice(_ALTERNATIVES))
            return options | {"structured_outputs": grammar, "ignore_eos": False}
        return options | self._processed(rng) | self._ends(rng, most)

    def _seed(self) -> int | None:
        """None, a small one, or one at an end of what a client may send."""
        rng = self._rng
        if self._odd and rng.random() < 0.3:
            return rng.choice([0, 2**31, 2**63 - 1, -(2**63), 2**64])
        return rng.choice([None, rng.randrange(1000), rng.randrange(1000)])

    def _processed(self, rng: random.Random) -> dict[str, Any]:
        """Parameters that change logits before a token is chosen."""
        vocabulary, options = self._setting.model.vocabulary, {}
        if rng.random() < 0.12:
            options["allowed_token_ids"] = sorted(rng.sample(range(_FIRST, vocabulary), rng.randint(2, 60)))
        # vLLM refuses a bias with drafts
        if rng.random() < 0.12 and not self._setting.has_drafts:
            options["logit_bias"] = {rng.randrange(_FIRST, vocabulary): rng.choice([-100.0, -2.0, 2.5, 100.0])}
        if rng.random() < 0.2:
            options["repetition_penalty"] = rng.choice([0.8, 1.2, 2.0])
            options["presence_penalty"] = rng.choice([0.0, 0.7, -0.5])
            options["frequency_penalty"] = rng.choice([0.0, 0.3])
        if self._setting.model.speaks and rng.random() < 0.15:
            options["bad_words"] = rng.sample(_BAD_WORDS, rng.randint(1, 3))
        return options

    def _ends(self, rng: random.Random, most: int) -> dict[str, Any]:
        """Where an answer of up to `most` tokens ends."""
        vocabulary, options = self._setting.model.vocabulary, {}
        if rng.random() < 0.2:
            options["stop_token_ids"] = rng.sample(range(_FIRST, vocabulary), vocabulary // rng.choice([3, 12, 40]))
        if rng.random() < 0.2:
            options["min_tokens"] = rng.randint(1, most)
        if self._setting.model.speaks and rng.random() < 0.2:
            options["stop"] = rng.sample(_STOPS, rng.randint(1, 2))
            options["include_stop_str_in_output"] = rng.random() < 0.3
        return options
