"""Generates the tasks: RULER's thirteen, a conversation, a chain of reasoning, and prose that goes on.

Source of the thirteen: Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", 2024.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from benchmarks.quality.corpus import packages, sentences

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
CONSONANTS, VOWELS = "bcdfghklmnprstvz", "aeiou"

Random = np.random.Generator


@dataclass(frozen=True)
class Example:
    """Parts of a context, a question, and its answers.

    filler: parts that may be left out to fit a length. placed: parts that must be there, spread over the context in
    this order if `ordered`. answers: texts that follow the question, separated by `separator`.
    """

    filler: Sequence[str]
    placed: Sequence[str]
    question: str
    answers: Sequence[str]
    ordered: bool = True
    separator: str = ","
    introduction: str = ""


def word(rng: Random) -> str:
    """Returns a pronounceable word of three syllables."""
    return "".join(rng.choice(list(CONSONANTS)) + rng.choice(list(VOWELS)) for _ in range(3))


def words(rng: Random, count: int) -> list[str]:
    """Returns `count` different words."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[word(rng)] = None
    return list(found)


def number(rng: Random) -> str:
    return str(rng.integers(1_000_000, 10_000_000))


def identifier(rng: Random) -> str:
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def prose(rng: Random, parts: int) -> list[str]:
    """Returns consecutive sentences from a random place of the text."""
    text = sentences()
    start = int(rng.integers(len(text)))
    return [text[(start + part) % len(text)] for part in range(parts)]


def needles(
    rng: Random, room: int, haystack: str, keys: int = 1, values: int = 1, queries: int = 1, kind: str = "number"
) -> Example:
    """Facts `key -> value` in a haystack of noise, prose, or other facts."""
    make = number if kind == "number" else identifier
    names = words(rng, keys) if kind == "number" or haystack != "needles" else [identifier(rng) for _ in range(keys)]
    facts = {name: [make(rng) for _ in range(values)] for name in names}
    placed = [_fact(name, value) for name, found in facts.items() for value in found]
    if haystack == "needles":
        others = words(rng, room) if kind == "number" else [identifier(rng) for _ in range(room)]
        filler = [_fact(name, make(rng)) for name in others if name not in facts]
    else:
        filler = prose(rng, room) if haystack == "prose" else [NOISE] * room
    rng.shuffle(placed)
    asked = list(names[:queries])
    wanted = [value for name in asked for value in facts[name]]
    if values > 1:
        wanted = [value for text in placed for value in wanted if value in text]
    question = f"The special magic values for {' and '.join(asked)} mentioned in the text are"
    if len(wanted) == 1:
        question = f"One of the special magic values for {asked[0]} is:"
    return Example(filler, placed, question, wanted)


def _fact(name: str, value: str) -> str:
    return f"One of the special magic values for {name} is: {value}."


def variable_tracking(rng: Random, room: int, hops: int = 4) -> Example:
    """A variable gets a value, others are assigned from it, one after the other."""
    names = [name.upper() for name in words(rng, hops + 1)]
    value = str(rng.integers(10_000, 100_000))
    chain = [f"VAR {names[0]} = {value}.", *(f"VAR {b} = VAR {a}." for a, b in pairwise(names))]
    question = f"The variables that are assigned the value {value}, in the order of the text, are:"
    return Example([NOISE] * room, chain, question, names)


def common_words(rng: Random, room: int) -> Example:
    """A few words come often in a list, all others a few times. Answers are in alphabetical order."""
    often, seldom = np.split(np.array(words(rng, 10 + room // 3)), [10])
    repeated = [*np.repeat(seldom, 3).tolist()]
    rng.shuffle(repeated)
    asked = sorted(often.tolist())
    placed = asked * 30
    rng.shuffle(placed)
    question = "In alphabetical order, the ten most common words of the list are:"
    return Example(repeated, placed, question, asked, introduction="Remember how often each word of this list comes.")


def frequent_words(rng: Random, room: int) -> Example:
    """Coded text whose words follow a zeta law. The three most frequent ones are asked for."""
    known = words(rng, 200)
    weights = 1 / np.arange(1, len(known) + 1) ** 2.0
    drawn = [known[i] for i in rng.choice(len(known), size=room, p=weights / weights.sum())]
    question = "The three most frequent words of the coded text above, the most frequent first, are:"
    return Example(drawn, [], question, known[:3], introduction="Read this coded text.")


def question_answering(rng: Random, room: int, by_summary: bool) -> Example:
    """Descriptions of packages; the version is asked for by name, or by what the package is for."""
    order = rng.permutation(len(packages()))
    shown = [packages()[i] for i in order]
    asked = shown[0]
    texts = [
        f"Document: {one.name} is a package for this: {one.summary}. Its version is {one.version}. {one.description}"
        for one in shown
    ]
    question = f"Answer from the documents. The version of {asked.name} is"
    if by_summary:
        question = f"Answer from the documents. The package for this: {asked.summary}. Its version is"
    return Example(texts[1:], texts[:1], question, [asked.version])


def conversation(rng: Random, room: int) -> Example:
    """Several turns with a fact each; later turns ask for three of them."""
    topics = words(rng, 12)
    facts = {topic: number(rng) for topic in topics}
    turns = [f"User: My code for {t} is {c}. Please keep it.\nAssistant: Noted: {t} is {c}." for t, c in facts.items()]
    talk = [f"User: What do you think of this? {text}\nAssistant: That is interesting." for text in prose(rng, room)]
    asked = [str(topic) for topic in rng.choice(topics, 3, replace=False)]
    question = f"User: What is my code for {asked[0]}?\nAssistant: {asked[0]} is"
    later = [f"\nUser: What is my code for {topic}?\nAssistant: {topic} is" for topic in asked[1:]]
    return Example(talk, turns, question, [_interleaved(facts[asked[0]], later, facts, asked)], separator="")


def _interleaved(first: str, later: Sequence[str], facts: dict[str, str], asked: Sequence[str]) -> str:
    return first + "".join(f"\0{turn}\0 {facts[topic]}" for turn, topic in zip(later, asked[1:], strict=True))


def chain(rng: Random, room: int, hops: int = 16) -> Example:
    """A long derivation: each step looks up where the previous one has led. All steps are decoded."""
    stops = words(rng, hops + 1)
    others = words(rng, 2 * room)
    placed = [f"From {a} the road leads to {b}." for a, b in pairwise(stops)]
    filler = [f"From {a} the road leads to {b}." for a, b in zip(others[::2], others[1::2], strict=True)]
    steps = [f"\0\nFrom {a} the road leads to\0 {b}" for a, b in pairwise(stops[1:])]
    question = f"We travel step by step.\nFrom {stops[0]} the road leads to"
    return Example(filler, placed, question, [stops[1] + "".join(steps)], ordered=False, separator="")


def continued_prose(rng: Random, room: int) -> Example:
    """Prose and its next sentences: perplexity, and next tokens as in dense attention."""
    text = prose(rng, room + 4)
    return Example(text[:-4], [], text[-4], [" ".join(text[-3:])], separator="")


Task = Callable[[Random, int], Example]
TASKS: dict[str, Task] = {
    "single_1": partial(needles, haystack="noise"),
    "single_2": partial(needles, haystack="prose"),
    "single_3": partial(needles, haystack="prose", kind="identifier"),
    "multikey_1": partial(needles, haystack="prose", keys=4),
    "multikey_2": partial(needles, haystack="needles"),
    "multikey_3": partial(needles, haystack="needles", kind="identifier"),
    "multivalue": partial(needles, haystack="prose", values=4),
    "multiquery": partial(needles, haystack="prose", keys=4, queries=4),
    "variables": variable_tracking,
    "common_words": common_words,
    "frequent_words": frequent_words,
    "qa_1": partial(question_answering, by_summary=False),
    "qa_2": partial(question_answering, by_summary=True),
    "conversation": conversation,
    "chain": chain,
    "prose": continued_prose,
}
RULER = tuple(TASKS)[:13]
