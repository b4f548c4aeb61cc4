"""A two-turn chat that rewards short answers: the smallest task on which any instruct model varies."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping

import aiohttp

QUESTIONS = ("Name a colour.", "Name an animal.", "Name a city.", "Name a fruit.", "Name a planet.", "Name a metal.")


def inputs(seed: int, split: str = "train") -> Iterator[dict[str, list[str]]]:
    """Pairs of questions, endless and repeatable."""
    rng = random.Random(f"{seed}-{split}")
    while True:
        yield {"questions": rng.sample(QUESTIONS, 2)}


async def run(env: Mapping[str, str]) -> None:
    """Ask both questions in one conversation; the reward falls with the words of the answers."""
    headers = {"Authorization": f"Bearer {env['AGL_KEY']}"}
    messages, words = [], 0
    async with aiohttp.ClientSession(headers=headers) as session:
        for question in json.loads(env["QUESTIONS"])["questions"]:
            messages.append({"role": "user", "content": question})
            body = {"model": "any", "messages": messages}
            async with session.post(f"{env['AGL_OPENAI_BASE_URL']}/chat/completions", json=body) as response:
                response.raise_for_status()
                text = (await response.json())["choices"][0]["message"]["content"].strip()
            messages.append({"role": "assistant", "content": text})
            words += len(text.split())
        reward = {"event_type": "reward", "data": {"value": 1 / (1 + words)}}
        async with session.post(env["AGL_EVENT_URL"], json=reward) as response:
            response.raise_for_status()
