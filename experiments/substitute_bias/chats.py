"""Chats of a text harness with SmolLM2: the history travels as text, so now and then it comes back in other tokens."""

from __future__ import annotations

import random
from collections.abc import Callable

from harnessrl.adapter import Call, Rollout
from harnessrl.engine.torch_engine import TorchEngine
from harnessrl.service.tokens import TextCodec
from harnessrl.service.wire import Sampling

OPENINGS = (
    "Tell me about a small town that nobody visits any more.",
    "How do I repair a bicycle tyre by the road?",
    "Invent three names for a boat and explain one of them.",
    "What would you cook with leeks, barley and a lemon?",
    "Describe the sound of a glacier to a child.",
    "Write the first lines of a letter to a lighthouse keeper.",
    "Why did people build walls around their cities?",
    "Give me a short plan for learning to juggle.",
    "List some tools that a clockmaker keeps on the bench.",
    "Explain what a compiler does, in plain words.",
    "What is the strangest animal of the deep sea?",
    "Make up a proverb about rain and tell me what it means.",
)
FOLLOW_UPS = (
    "Can you give an example with names and numbers?",
    "Say that again, but shorter.",
    "What would somebody say who disagrees?",
    "And what happened then?",
    "Which part of this are you least sure about?",
    "Put the main points in a list.",
    "How would you explain it to my grandmother?",
    "Now in the style of a newspaper headline.",
)


def sample_chats(
    engine: TorchEngine,
    codec: TextCodec,
    *,
    chats: int,
    turns: int,
    max_tokens: int,
    seed: int,
    report: Callable[[str], None],
) -> list[Rollout]:
    """Talk `turns` turns in every chat at temperature 1, all chats abreast; a rollout a chat, a call a turn.

    Replies go back exactly as they were decoded, so that tokenization is the only thing that can change history.
    """
    rng = random.Random(seed)
    messages = [[{"role": "user", "content": OPENINGS[chat % len(OPENINGS)]}] for chat in range(chats)]
    calls: list[list[Call]] = [[] for _ in range(chats)]
    for turn in range(turns):
        prompts = [codec.encode(codec.render(history, None)) for history in messages]
        samplings = [
            Sampling(max_tokens=max_tokens, stop_ids=codec.stop_ids, noise=rng.getrandbits(64)) for _ in prompts
        ]
        replies = engine.generate(prompts, samplings)
        for chat, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
            call = Call(call_id=f"turn {turn}", prompt_ids=prompt, response_ids=reply.ids, logprobs=reply.logprobs)
            calls[chat].append(call)
            messages[chat].append({"role": "assistant", "content": codec.decode(reply.ids)})
            messages[chat].append({"role": "user", "content": rng.choice(FOLLOW_UPS)})
        report(f"turn {turn + 1} of {turns}: {sum(len(reply.ids) for reply in replies)} tokens sampled")
    return [
        Rollout(rollout_id=f"chat {chat}", group_id=f"chat {chat}", calls=of_chat) for chat, of_chat in enumerate(calls)
    ]
