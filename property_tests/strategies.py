"""What hypothesis draws: rollouts as real harnesses produce them, and batches of them. Token ids, never text.

A text that is encoded cannot drift, because encoding is what it already came from. So the model's side of every
conversation is drawn as ids, and text appears only where a harness would see it.

- ``rollouts``: calls over five token ids, built by the moves of a harness (continue, resample, retry, rewind, edit,
  summarise, hand off), then shuffled: late arrivals are normal. Small alphabets make coincidences common.
- ``conversations``: a harness with a tokenizer and a chat template, which decodes, keeps text, and encodes again.
- ``batches``: rollouts of several groups with rewards, for what comes after merging.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from harnessrl.adapter import Call, Rollout
from property_tests.toy import Template, ToyTokenizer

TOKENS = st.integers(0, 4)
MOVES = ("continue", "resample", "retry", "rewind", "edit", "summarise", "hand_off", "grow")
FLAWS = ("constrained", "other_agent", "missing_logprobs", "missing_ids", "undelivered", "empty")
TOKENIZER = ToyTokenizer()


def ids(least: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(TOKENS, min_size=least, max_size=most)


def own_logprobs(call: int, response: list[int]) -> list[float]:
    """Nothing to draw, but no two tokens of a rollout have the same: a mix-up shows."""
    return [-(call + 1) - at / 64 for at in range(len(response))]


@st.composite
def rollouts(draw: st.DrawFn, *, most: int = 8, flawed: bool = True, shuffled: bool = True) -> Rollout:
    """A rollout of 1 to ``most`` calls; ``flawed`` ones have calls that must be skipped, each for its reason."""
    calls: list[Call] = []
    for index in range(draw(st.integers(1, most))):
        base = draw(st.sampled_from(calls)) if calls else None
        move = draw(st.sampled_from(MOVES)) if calls else "hand_off"
        response = draw(ids(1, 3))
        call = Call(
            call_id=f"c{index}",
            prompt_ids=_prompt(draw, move, base),
            response_ids=response,
            logprobs=own_logprobs(index, response),
            policy_version=draw(st.integers(0, 3)),
            finish_reason=draw(st.sampled_from(["stop", "length"])),
            request_id=f"q{index}" if base is None or move != "retry" else base.request_id,
        )
        if flawed:
            call = _flaw(draw, call)
        calls.append(call)
    if shuffled:
        calls = draw(st.permutations(calls))
    return Rollout(rollout_id="r", group_id="g", calls=calls, reward=1.0)


def _prompt(draw: st.DrawFn, move: str, base: Call | None) -> list[int]:
    """The prompt that a harness would send next, if it had just seen ``base``."""
    if base is None or move == "hand_off":
        return draw(ids(1, 3))
    prompt, context = base.prompt_ids.tolist(), base.prompt_ids.tolist() + base.response_ids.tolist()
    if move in ("resample", "retry"):
        return prompt
    if move == "grow":  # the context itself, nothing observed in between
        return context
    if move == "continue":
        return context + draw(ids(1, 3))
    cut = draw(st.integers(0, len(context)))
    if move == "rewind":
        return context[:cut] + draw(ids(1, 3))
    if move == "edit":
        return context[:cut] + draw(ids(1, 1)) + context[cut + 1 :] + draw(ids(0, 2))
    return context[:cut] + draw(ids(1, 2)) + context[draw(st.integers(cut, len(context))) :]


def _flaw(draw: st.DrawFn, call: Call) -> Call:
    flaws = draw(st.sets(st.sampled_from(FLAWS), max_size=2)) if draw(st.integers(0, 2)) == 0 else set()
    if "empty" in flaws:
        call = replace(call, response_ids=[], logprobs=[])
    if "missing_ids" in flaws:
        call = replace(call, prompt_ids=[])
    if "missing_logprobs" in flaws:
        call = replace(call, logprobs=None)
    return replace(
        call,
        constrained="constrained" in flaws,
        trainable="other_agent" not in flaws,
        agent="other" if "other_agent" in flaws else "",
        delivered="undelivered" not in flaws,
    )


@dataclass
class Conversation:
    """What a harness remembers: text. ``calls`` is what crossed the endpoint: ids."""

    messages: list[tuple[str, str]]
    calls: list[Call]


EVENTS = ("answer", "answer", "answer", "tidy", "summarise", "sub_agent", "resample", "retry", "truncate")


@st.composite
def conversations(
    draw: st.DrawFn,
    *,
    template: Template | None = None,
    events: tuple[str, ...] = EVENTS,
    most: int = 6,
    drifting: bool = True,
) -> Rollout:
    """A rollout of a text harness on the toy tokenizer: prompts are rendered and encoded, answers are drawn as ids.

    ``template`` fixes the template, else one is drawn; ``events`` are what may happen at each call; ``drifting`` False
    draws only answers that survive decode and encode.
    """
    tokenizer = TOKENIZER
    template = template or draw(templates())
    task = draw(st.text("adegin ", min_size=1, max_size=4))
    main = Conversation([("system", "deed"), ("user", task)], [])
    calls: list[Call] = []
    for _ in range(draw(st.integers(1, most))):
        event = draw(st.sampled_from(events))
        talk = main
        if event == "sub_agent":
            talk = Conversation([("system", "aid"), ("user", draw(st.text("hinov ", min_size=1, max_size=4)))], [])
        if event == "summarise" and len(main.messages) > 5:  # or there is nothing to shorten
            main.messages = [*main.messages[:2], ("user", "on")]
        prompt = tokenizer.encode(template.render(talk.messages))
        answer = draw(answers(tokenizer, drifting=drifting))
        tries = {"resample": 2, "retry": 2}.get(event, 1)
        for attempt in range(tries):
            if attempt:
                answer = draw(answers(tokenizer, drifting=drifting))
            ended = answer if event == "truncate" else [*answer, tokenizer.end]
            calls.append(
                Call(
                    call_id=f"c{len(calls)}",
                    prompt_ids=prompt,
                    response_ids=ended,
                    logprobs=own_logprobs(len(calls), ended),
                    finish_reason="length" if event == "truncate" else "stop",
                    delivered=not (event == "retry" and attempt == 0),
                    request_id=f"q{len(calls) - attempt}" if event == "retry" else f"q{len(calls)}",
                )
            )
        text = tokenizer.decode(answer)
        if event == "tidy":  # what tool parsers do: repair, re-serialise
            text = text.replace(":", ": ").replace("{}", "{ }").replace("<", "")
        seen = draw(st.text('adin {}"', min_size=1, max_size=4))
        talk.messages += [("assistant", text), (draw(st.sampled_from(["user", "tool"])), seen)]
    return Rollout(rollout_id="r", group_id="g", calls=calls, reward=0.0)


def templates() -> st.SearchStrategy[Template]:
    """Templates with any of the usual faults; half of the draws have none."""
    faulty = st.builds(
        Template,
        separator=st.sampled_from(["\n", ""]),
        trim=st.booleans(),
        drop_thinking=st.booleans(),
        opening=st.sampled_from(["", "<think>", "\n"]),
    )
    return st.one_of(st.just(Template()), faulty)


@st.composite
def answers(draw: st.DrawFn, tokenizer: ToyTokenizer, *, drifting: bool = True, least: int = 1) -> list[int]:
    """Sampled ids. They may drift, think, call a tool, spell out a special token or stop inside a character."""
    if not drifting:
        return tokenizer.encode(draw(st.text("adeg", min_size=least, max_size=4)))
    pieces = st.sampled_from(tokenizer.ordinary)
    shapes = ["plain"] * 4 + ["thinking", "tool", "spelled"]
    shape = draw(st.sampled_from(shapes))
    body = draw(st.lists(pieces, min_size=least, max_size=5))
    if shape == "thinking":
        thought = draw(st.lists(pieces, min_size=1, max_size=3))
        return [tokenizer.special("<think>"), *thought, tokenizer.special("</think>"), *body]
    if shape == "tool":
        return [*tokenizer.encode('{"a":'), *body, *tokenizer.encode("}")]
    if shape == "spelled":
        return [*body, *(tokenizer.ids[unit.encode()] for unit in "<|end|>")]
    return body


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some groups of rollouts, as they come to the trainer."""

    rollouts: list[Rollout]
    rewards: list[float]
    groups: list[int]


@st.composite
def batches(draw: st.DrawFn, *, most: int = 6, trained: bool = False) -> Batch:
    """1 to ``most`` rollouts in up to three groups; NaN rewards are unscored. ``trained``: each has a trained token."""
    count = draw(st.integers(1, most))
    groups = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    reward = st.one_of(st.sampled_from([0.0, 1.0, 0.1, float("nan")]), st.floats(-1000, 1000, width=32))
    rewards = draw(st.lists(reward, min_size=count, max_size=count))
    drawn = [draw(rollouts(most=4, flawed=not trained)) for _ in range(count)]
    named = [
        Rollout(rollout_id=f"r{i}", group_id=f"g{group}", calls=rollout.calls, reward=rewards[i])
        for i, (group, rollout) in enumerate(zip(groups, drawn, strict=True))
    ]
    return Batch(rollouts=named, rewards=rewards, groups=groups)
