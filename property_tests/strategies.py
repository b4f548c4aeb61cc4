"""What hypothesis draws: rollouts as real harnesses produce them, and batches of them. Token ids, never text.

A text that is encoded cannot drift, because encoding is where it came from. So the model's side of every conversation
is drawn as ids, and text appears only where a harness would see it.

- ``rollouts``: calls over five token ids, made by the moves of a harness (continue, resample, retry, rewind, edit,
  summarise, hand off) and arriving late now and then. Small alphabets make coincidences common.
- ``conversations``: a harness with a tokenizer and a chat template, which decodes, keeps text, and encodes again.
- ``scores``, ``batches``, ``packs`` and ``forests``: the rewards, the rollouts and some samples of a batch, for what
  comes after merging.

A rollout is drawn as a list of independent steps and then played, so that a failure shrinks by dropping steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from harnessrl.adapter import Call, Rollout, Sample, merge_calls
from property_tests.toy import Template, ToyTokenizer

TOKENIZER = ToyTokenizer()
MOVES = ("continue", "resample", "retry", "rewind", "edit", "summarise", "hand_off", "grow")
SHARING = ("continue", "grow", "resample", "rewind", "rewind")
"""Moves after which a prompt begins as an earlier one did."""
FLAWS = ("constrained", "other_agent", "missing_logprobs", "missing_ids", "undelivered", "empty")


def own_logprobs(call: int, response: list[int]) -> list[float]:
    """Nothing to draw, but no two tokens of a rollout have the same: a mix-up shows."""
    return [-(call + 1) - at / 64 for at in range(len(response))]


# ---- rollouts of bare ids


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call of a harness that has just looked back at an earlier one."""

    move: str
    base: int  # how many calls back; 0 is the last
    cut: int  # how many tokens before the end of its context; 0 is the end
    observed: list[int]
    response: list[int]
    flaws: frozenset[str]
    late: int  # how many places later it arrives


def ids(least: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 4), min_size=least, max_size=most)


def steps(flaws: st.SearchStrategy[frozenset[str]], moves: Sequence[str] = MOVES) -> st.SearchStrategy[Step]:
    return st.builds(
        Step,
        move=st.sampled_from(moves),
        base=st.integers(0, 3),
        cut=st.integers(0, 5),
        observed=ids(1, 3),
        response=ids(1, 3),
        flaws=flaws,
        late=st.one_of(st.just(0), st.integers(0, 4)),
    )


NO_FLAWS = st.just(frozenset[str]())
SOME_FLAWS = st.one_of(NO_FLAWS, NO_FLAWS, st.frozensets(st.sampled_from(FLAWS), max_size=2))
LOST_LOGPROBS = st.one_of(NO_FLAWS, NO_FLAWS, st.just(frozenset({"missing_logprobs"})))


def rollouts(*, most: int = 8, flaws: st.SearchStrategy[frozenset[str]] = SOME_FLAWS) -> st.SearchStrategy[Rollout]:
    """Rollouts of 1 to ``most`` calls; ``flaws`` are what a call may have that keeps it from being trained."""
    return st.lists(steps(flaws), min_size=1, max_size=most).map(play)


def play(steps: list[Step]) -> Rollout:
    """Let a harness take these steps."""
    calls: list[Call] = []
    for index, step in enumerate(steps):
        base = calls[-1 - step.base % len(calls)] if calls else None
        call = Call(
            call_id=f"c{index}",
            prompt_ids=_prompt(step, base),
            response_ids=step.response,
            logprobs=own_logprobs(index, step.response),
            policy_version=index % 3,
            request_id=base.request_id if base is not None and step.move == "retry" else f"q{index}",
        )
        calls.append(_spoil(call, step.flaws))
    arrival = sorted(range(len(steps)), key=lambda index: index + steps[index].late)
    return Rollout(rollout_id="r", group_id="g", calls=[calls[index] for index in arrival], reward=1.0)


def _prompt(step: Step, base: Call | None) -> list[int]:
    """The prompt that a harness sends next when it has just seen ``base``."""
    if base is None or step.move == "hand_off":
        return step.observed
    context = base.prompt_ids.tolist() + base.response_ids.tolist()
    cut = max(0, len(context) - step.cut)
    return {
        "continue": context + step.observed,
        "grow": context,  # nothing observed in between
        "resample": base.prompt_ids.tolist(),
        "retry": base.prompt_ids.tolist(),
        "rewind": context[:cut] + step.observed,
        "edit": context[:cut] + step.observed[:1] + context[cut + 1 :] + step.observed[1:],
        "summarise": context[: cut // 2] + step.observed[:1] + context[cut:] + step.observed[1:],
    }[step.move]


def _spoil(call: Call, flaws: frozenset[str]) -> Call:
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


# ---- conversations of a text harness

EVENTS = ("answer", "answer", "tidy", "truncate", "resample", "retry", "summarise", "sub_agent")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One thing that happens in a conversation."""

    event: str
    answer: list[int]
    role: str
    seen: str  # what the harness says next, as this role


def conversations(
    *,
    template: Template | None = None,
    events: tuple[str, ...] = EVENTS,
    most: int = 6,
    drifting: bool = True,
) -> st.SearchStrategy[Rollout]:
    """Rollouts of a text harness on the toy tokenizer: prompts are rendered and encoded, answers are drawn as ids.

    ``template`` fixes the template, else one is drawn; ``events`` are what may happen at each call; ``drifting`` False
    draws only answers that survive decode and encode.
    """
    turn = st.builds(
        Turn,
        event=st.sampled_from(events),
        answer=answers(drifting=drifting),
        role=st.sampled_from(["user", "tool"]),
        seen=st.text('adin {}"', min_size=1, max_size=4),
    )
    turns = st.lists(turn, min_size=1, max_size=most)
    return st.builds(converse, turns, templates() if template is None else st.just(template))


def converse(turns: list[Turn], template: Template) -> Rollout:
    """Let a harness that knows only text have these turns."""
    main = [("system", "go in"), ("user", "go on")]
    calls: list[Call] = []
    summaries = 0
    for turn in turns:
        messages = [("system", "hi"), ("user", f"{turn.seen} no")] if turn.event == "sub_agent" else main
        if turn.event == "summarise" and len(main) > 5:  # or there is nothing to shorten
            summaries += 1
            main[2:] = [("user", "no" * summaries)]
        prompt = TOKENIZER.encode(template.render(messages))
        another = [*turn.answer, TOKENIZER.ids[b"g"]]
        tries = [turn.answer, another] if turn.event in ("resample", "retry") else [turn.answer]
        request = f"q{len(calls)}" if turn.event == "retry" else None
        for number, answer in enumerate(tries):
            response = answer if turn.event == "truncate" else [*answer, TOKENIZER.end]
            calls.append(
                Call(
                    call_id=f"c{len(calls)}",
                    prompt_ids=prompt,
                    response_ids=response,
                    logprobs=own_logprobs(len(calls), response),
                    finish_reason="length" if turn.event == "truncate" else "stop",
                    delivered=request is None or number == 1,
                    request_id=request,
                )
            )
        text = TOKENIZER.decode(tries[-1])
        if turn.event == "tidy":  # what tool parsers do: repair, re-serialise
            text = text.replace(":", ": ").replace("{}", "{ }").replace("<", "")
        messages += [("assistant", text), (turn.role, turn.seen)]
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


def answers(*, drifting: bool = True) -> st.SearchStrategy[list[int]]:
    """Sampled ids. They may drift, think, call a tool, spell out a special token or stop inside a character."""
    if not drifting:
        return st.text("adeg", min_size=1, max_size=4).map(TOKENIZER.encode)
    plain = st.lists(st.sampled_from(TOKENIZER.ordinary), min_size=1, max_size=5)
    think, thought = TOKENIZER.special("<think>"), TOKENIZER.special("</think>")
    spelled = [TOKENIZER.ids[unit.encode()] for unit in "<|end|>"]
    opened, closed = TOKENIZER.encode('{"a":'), TOKENIZER.encode("}")
    return st.one_of(
        plain,
        plain,
        plain,
        st.tuples(plain, plain).map(lambda two: [think, *two[0], thought, *two[1]]),
        plain.map(lambda body: [*opened, *body, *closed]),
        plain.map(lambda body: [*body, *spelled]),
    )


# ---- batches


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a batch of rollouts earned: a reward and a group each; a NaN reward is unscored."""

    rewards: list[float]
    groups: list[int]


def scores() -> st.SearchStrategy[Scores]:
    """1 to 8 rollouts in up to three groups."""
    reward = st.one_of(st.sampled_from([0.0, 1.0, 0.1, float("nan")]), st.floats(-1000, 1000, width=32))
    pairs = st.lists(st.tuples(reward, st.integers(0, 2)), min_size=1, max_size=8)
    return pairs.map(lambda members: Scores(rewards=[r for r, _ in members], groups=[g for _, g in members]))


def batches(*, flaws: st.SearchStrategy[frozenset[str]] = SOME_FLAWS) -> st.SearchStrategy[list[Rollout]]:
    """Up to three short rollouts; with NO_FLAWS each has a trained token."""
    members = st.lists(rollouts(most=3, flaws=flaws), min_size=1, max_size=3)
    return members.map(lambda drawn: [replace(rollout, rollout_id=f"r{i}") for i, rollout in enumerate(drawn)])


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What a pack is made of: some samples in some order, with a weight and an advantage for each of all samples."""

    samples: list[Sample]
    order: list[int]

    @property
    def weights(self) -> list[float]:
        """Nothing to draw, but no two samples have the same: a mix-up shows."""
        return [(index + 1) / 64 for index in range(len(self.samples))]

    @property
    def advantages(self) -> list[float]:
        return [(-1) ** index * (index + 1) / 8 for index in range(len(self.samples))]


@st.composite
def packs(draw: st.DrawFn) -> Chosen:
    """Some of the samples of a batch."""
    samples = [sample for rollout in draw(batches()) for sample in merge_calls(rollout).samples]
    order = draw(st.permutations(range(len(samples))))[: draw(st.integers(0, len(samples)))]
    return Chosen(samples=samples, order=order)


@st.composite
def forests(draw: st.DrawFn) -> Chosen:
    """Samples that share long prefixes with each other, of one rollout or two.

    One sample a call shares most: each holds the calls before it whole, and a response that one of them trains is
    context to the others.
    """
    strategy = draw(st.sampled_from(["per_call", "best_effort"]))
    drawn = draw(st.lists(st.lists(steps(NO_FLAWS, SHARING), min_size=4, max_size=7), min_size=1, max_size=2))
    rollouts = [replace(play(steps), rollout_id=f"r{index}") for index, steps in enumerate(drawn)]
    samples = [sample for rollout in rollouts for sample in merge_calls(rollout, strategy).samples]
    order = draw(st.permutations(range(len(samples))))[draw(st.integers(0, 2)) :]
    return Chosen(samples=samples, order=order)
