"""Requests of mixed lengths with greedy decoding, and what each of them answers when it runs alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openai import OpenAI

from tests.server.server import MODEL_NAME

SYSTEM = "You are a patient teacher. Explain every step, name every unit, and never skip a line. " * 16
TOPICS = ("rivers", "bread", "the moon", "clocks", "glass", "maps", "tea", "chess")


@dataclass(frozen=True)
class Job:
    """One completion request."""

    prompt: str
    max_tokens: int

    def arguments(self, salt: str) -> dict[str, Any]:
        """Arguments of `completions.create`; a request finds cached blocks only of requests with its own salt."""
        return {
            "model": MODEL_NAME,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "extra_body": {"cache_salt": salt, "ignore_eos": True},
        }


def mixed_jobs(count: int = 32) -> list[Job]:
    """Prompts of 3 to 700 tokens, every fourth behind the same two blocks of system prompt; 3 to 13 new tokens."""
    jobs = []
    for index in range(count):
        topic = TOPICS[index % len(TOPICS)]
        head = SYSTEM if index % 4 == 1 else f"Question {index}. " * (0, 1, 3, 9)[index % 4]
        if index % 16 == 7:
            head = f"Notes on {topic}, page {index}: a list of words, dates and names. " * 40
        jobs.append(Job(f"{head}Tell me about {topic}:", 3 + index * 7 % 11))
    return jobs


class Alone:
    """Answers of jobs that ran with nothing else in the batch; each job runs once."""

    def __init__(self, client: OpenAI) -> None:
        self._client = client
        self._answers: dict[Job, str] = {}

    def __call__(self, job: Job) -> str:
        if job not in self._answers:
            self._answers[job] = self._client.completions.create(**job.arguments("alone")).choices[0].text
        return self._answers[job]
