"""Prompts in plain English for the demo model."""

from __future__ import annotations

import random

SHORT = [
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "In 1969, the first human being",
    "A good recipe for pancakes starts with",
    "The opposite of hot is",
    "Dear Sir or Madam,\n\nI am writing to",
    "The largest planet of the solar system is",
    "1, 1, 2, 3, 5, 8, 13,",
    "To be, or not to be,",
    "The quick brown fox",
    "SELECT name FROM customers WHERE",
    "Photosynthesis is the process by which plants",
    "The mitochondria is",
    "She opened the door and saw",
    "List of fruits: apple, banana,",
    "Machine learning is a field of",
    "Yesterday it rained, so today",
]
_WHO = ["The captain", "A farmer", "My neighbour", "The old clockmaker", "Her sister", "The mayor", "A young doctor"]
_DID = ["repaired", "painted", "lost", "described", "sold", "found", "borrowed", "measured", "remembered"]
_WHAT = ["a wooden boat", "the red bridge", "seven letters", "an empty house", "the northern road", "a silver coin"]
_WHEN = ["in spring", "at noon", "after the storm", "before dinner", "on a Sunday", "without a word", "long ago"]


def story(sentences: int, seed: int) -> str:
    """A text that never repeats a paragraph; about 11 tokens per sentence."""
    rng = random.Random(seed)
    told = (f"{rng.choice(_WHO)} {rng.choice(_DID)} {rng.choice(_WHAT)} {rng.choice(_WHEN)}." for _ in range(sentences))
    return " ".join(told) + " At the end of that year,"
