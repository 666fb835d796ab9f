"""The load of `gaudi-ucm demo`: short and long prompts, a shared system prompt, several samples, arrivals over time."""

from __future__ import annotations

import random
from dataclasses import dataclass

MIN_REQUESTS = 4
MEAN_GAP_S = 0.4
LOG_DAYS = 75
"""Days in the long prompt: more than 2000 tokens with any tokenizer we know."""

MUSEUM = """You are the friendly guide of the Harbour Museum of Westhaven. Answer in one or two short sentences, only \
from the facts below.
Opening hours: Tuesday to Friday from 10 in the morning to 6 in the evening, Saturday and Sunday from 9 in the morning \
to 8 in the evening. The museum is closed on Monday.
Tickets: adults pay 12 euros, students pay 7 euros, children under 6 years enter for free. A family ticket for two \
adults and up to three children costs 28 euros. The ticket is valid for one day.
Ground floor: the old fishing boats, the whale skeleton, and the workshop in which sails were made. The whale is 17 \
metres long and was found on the beach in 1911.
First floor: maps, compasses and the logbooks of forty ships. The oldest map was drawn in 1568.
Second floor: the lighthouse lamp, which burned every night from 1874 to 1962, and the room of storms, in which \
visitors can feel the wind of a hurricane.
Guided tours: every day at 11 in the morning and at 3 in the afternoon, in English, for 45 minutes, at no extra cost.
The cafe on the ground floor serves soup, sandwiches, cake, tea and coffee until 5 in the afternoon. Dogs are not \
allowed inside, except guide dogs. There is a lift to all floors. Photographs without flash are welcome.
The bus number 14 stops in front of the door every ten minutes; the station is fifteen minutes away on foot."""

GUIDE_QUESTIONS = (
    "How much is a ticket for a student?",
    "When are you open on Sunday?",
    "How long is the whale?",
    "May I bring my dog?",
    "Which bus goes to the museum?",
    "What can I eat in the cafe?",
    "What is on the first floor?",
    "When do the guided tours start?",
)
SHORT_QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain gravity to a child in one sentence.",
    "Name three animals that live in the ocean.",
    "What is the boiling point of water?",
    "Translate 'good morning' into Spanish.",
    "Give me one tip for better sleep.",
    "Why is the sky blue?",
)
SAMPLED_QUESTION = "Suggest a name for a small cafe by the sea."
LONG_QUESTION = "Here is the logbook of a lighthouse.\n\n{log}\n\nSummarise the logbook in one sentence."
LONG, SAMPLED, GUIDE, SHORT = "long", "sampled", "guide", "short"


@dataclass(frozen=True)
class DemoRequest:
    """One request of the load; `n` samples of at most `max_tokens` tokens, sent `arrival_s` seconds after the start."""

    kind: str
    messages: tuple[tuple[str, str], ...]
    """(role, content) pairs of a chat."""
    max_tokens: int
    n: int
    temperature: float
    arrival_s: float

    @property
    def question(self) -> str:
        """The user's question."""
        return self.messages[-1][1]


def build_load(requests: int, seed: int) -> list[DemoRequest]:
    """`requests` requests in order of arrival; the same for the same seed, and each kind at least once."""
    if requests < MIN_REQUESTS:
        raise ValueError(
            f"--requests: found {requests}, expected a number >= {MIN_REQUESTS}, one for each kind of request"
        )
    rng = random.Random(seed)
    # Two guide requests for each other one: sharing needs company. A long prompt comes every twelve requests.
    cycle = (GUIDE, SHORT, GUIDE)
    kinds = [LONG, SAMPLED, GUIDE, SHORT]
    kinds += [LONG if index % 12 == 0 else cycle[index % 3] for index in range(len(kinds), requests)]
    rng.shuffle(kinds)
    questions = {GUIDE: _drawn(rng, GUIDE_QUESTIONS), SHORT: _drawn(rng, SHORT_QUESTIONS)}
    arrival, load = 0.0, []
    for kind in kinds:
        question = questions[kind].pop(0) if kind in questions else ""
        load.append(_request(kind, question, arrival, rng))
        arrival += rng.expovariate(1 / MEAN_GAP_S)
        if kind in questions:
            questions[kind].append(question)
    return load


def _drawn(rng: random.Random, questions: tuple[str, ...]) -> list[str]:
    return rng.sample(questions, len(questions))


def _request(kind: str, question: str, arrival_s: float, rng: random.Random) -> DemoRequest:
    max_tokens = rng.choice((32, 48, 64))
    if kind == LONG:
        text = LONG_QUESTION.format(log=lighthouse_log(LOG_DAYS, rng))
        return DemoRequest(kind, (("user", text),), max_tokens, 1, 0.0, arrival_s)
    if kind == SAMPLED:
        return DemoRequest(kind, (("user", SAMPLED_QUESTION),), 24, 3, 0.9, arrival_s)
    system = (("system", MUSEUM),) if kind == GUIDE else ()
    return DemoRequest(kind, (*system, ("user", question)), max_tokens, 1, 0.0, arrival_s)


def lighthouse_log(days: int, rng: random.Random) -> str:
    """A made-up logbook, one line per day."""
    winds = ("north", "north-west", "west", "south-west", "south", "east")
    skies = ("clear sky", "light rain", "fog until noon", "heavy rain", "broken clouds")
    return "\n".join(
        f"Day {day}: wind {rng.choice(winds)}, {rng.randint(3, 48)} knots, {rng.choice(skies)}, "
        f"{rng.randint(0, 9)} ships passed, the lamp burned {rng.randint(9, 15)} hours."
        for day in range(1, days + 1)
    )
