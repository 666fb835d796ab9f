"""OpenAI client: two chat completions, streamed side by side from `vllm serve` on this machine.

    make serve                                   # in another terminal: the demo model on 127.0.0.1:8000
    python examples/openai_client.py

The plugin changes nothing about vLLM's API. The client needs no key; the package `openai` comes with vLLM.
"""

import argparse
import asyncio
import time

from openai import AsyncOpenAI

QUESTIONS = ["What is the capital of France?", "Name three colours."]


async def ask(client: AsyncOpenAI, model: str, question: str) -> str:
    """Streams one answer, and prints it with the time to its first token."""
    begin = time.perf_counter()
    first = 0.0
    pieces = []
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=24,
        temperature=0,
        stream=True,
    )
    async for chunk in stream:
        text = chunk.choices[0].delta.content if chunk.choices else None
        if text:
            first = first or time.perf_counter() - begin
            pieces.append(text)
    print(f"{question} -> {''.join(pieces)!r} (first token after {1000 * first:.0f} ms, {len(pieces)} pieces)")
    return "".join(pieces)


async def main(base_url: str) -> None:
    """Asks all questions at once; the server computes them in the same steps."""
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        model = (await client.models.list()).data[0].id
        await asyncio.gather(*(ask(client, model, question) for question in QUESTIONS))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Streams answers from a local server.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="default: %(default)s")
    asyncio.run(main(parser.parse_args().base_url))
