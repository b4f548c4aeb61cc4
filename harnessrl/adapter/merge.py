"""From the calls of a rollout to its training samples, by exact token prefixes.

The context of a call is its prompt followed by its response. A call extends a sample when the sample's last context is
an exact prefix of the call's prompt: then every token of both stands behind the prompt that it was sampled from.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cmp_to_key
from typing import Protocol

import numpy as np

from harnessrl.adapter import checks
from harnessrl.adapter.prefix import NO_IDS, PrefixTree, common_prefix, equal_run
from harnessrl.adapter.types import Break, Call, Int32, Merge, Rollout, Sample, Skip, Span

STRATEGIES = ("per_call", "adjacent", "best_effort", "substitute")
SKIP_REASONS = (
    "missing_ids",
    "empty_response",
    "undelivered",
    "superseded",
    "constrained",
    "not_trainable",
    "missing_logprobs",
    "too_long",
)


class Tokenizer(Protocol):
    """What "substitute" needs of a tokenizer: ids to text, special tokens included."""

    def decode(self, token_ids: list[int], /) -> str: ...


def merge_calls(
    rollout: Rollout,
    strategy: str = "best_effort",
    *,
    require_logprobs: bool = True,
    max_sample_tokens: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> Merge:
    """Merge the calls of one rollout into samples that train every sampled token behind its own exact prompt.

    A call (p, a) extends a sample with context c when c = p[:len(c)]; the sample then reads p + a. Except under
    "substitute", every trained call has exactly one span, and there ``token_ids[:start] == prompt_ids``,
    ``token_ids[start:stop] == response_ids``, ``logprobs[start:stop]`` are the call's own.

    Args:
      rollout: the calls in order of arrival; not changed.
      strategy: "per_call" (a sample a call), "adjacent" (only the sample of the call that arrived just before is
        extended), "best_effort" (the open sample with the longest context that fits is extended, calls taken by prompt
        length: the number of samples is the least possible, whatever the order of arrival) or "substitute" (history is
        overwritten by what was sampled wherever the text agrees: biased, for measuring that bias;
        ``Sample.faithful`` is False).
      require_logprobs: True skips calls without logprobs; False trains them, with NaN in their places.
      max_sample_tokens: a call whose prompt + response is longer, in tokens, is skipped; None is no limit. Where
        "substitute" would make a sample longer by overwriting, the call opens its own.
      tokenizer: anything with ``decode(ids) -> str`` that keeps special tokens; only "substitute" uses it.

    Returns:
      Merge(samples, breaks, skipped).

    Raises:
      ValueError: no rollout, unknown strategy, require_logprobs that is not True or False, a limit that is not a whole
        number of 1 or more, a tokenizer that cannot decode, or "substitute" without one.

    Source: arXiv:2608.17528, section on retokenization and merging ("best effort"; "request buffer" is "substitute").
    That the fewest samples are reached by taking calls in order of prompt length is ours (Dilworth on a forest).
    """
    if not isinstance(rollout, Rollout):
        raise ValueError(f"rollout must be a Rollout, got {checks.kind_of(rollout)}")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}; allowed: {', '.join(STRATEGIES)}")
    checks.flag(require_logprobs, "require_logprobs")
    if max_sample_tokens is not None:
        checks.whole(max_sample_tokens, "max_sample_tokens", 1, "1 or more, or None for no limit")
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise ValueError(f"tokenizer must have decode(ids) -> str, got {checks.kind_of(tokenizer)}")
    skipped = _skips(rollout, require_logprobs, max_sample_tokens)
    left_out = {skip.call_id for skip in skipped}
    calls = [call for call in rollout.calls if call.call_id not in left_out] if left_out else rollout.calls
    if strategy == "substitute":
        if tokenizer is None:
            raise ValueError("tokenizer is None; strategy 'substitute' compares decoded text and needs one")
        chains, breaks = _chain(rollout, *_by_text(calls, tokenizer.decode, max_sample_tokens))
    else:
        chains, breaks = _chain(rollout, calls if strategy == "adjacent" else _merge_order(calls), _ROUTES[strategy])
    faithful = strategy != "substitute"
    samples = tuple(_sample(rollout, index, chain, faithful) for index, chain in enumerate(chains))
    return Merge(samples=samples, breaks=tuple(breaks), skipped=tuple(skipped))


def _skips(rollout: Rollout, require_logprobs: bool, max_sample_tokens: int | None) -> list[Skip]:
    """The calls that are not trained, in order of arrival, each with the first reason that holds."""
    last_try = {call.request_id: call.call_id for call in rollout.calls if call.delivered}
    skipped = []
    for call in rollout.calls:
        sampled = len(call.response_ids)
        holds = (
            len(call.prompt_ids) == 0,
            sampled == 0,
            not call.delivered,
            call.request_id is not None and last_try.get(call.request_id) != call.call_id,
            call.constrained,
            not call.trainable,
            require_logprobs and call.logprobs is None,
            max_sample_tokens is not None and len(call.prompt_ids) + sampled > max_sample_tokens,
        )
        if True in holds:
            skipped.append(Skip(call_id=call.call_id, reason=SKIP_REASONS[holds.index(True)], tokens=sampled))
    return skipped


def _merge_order(calls: Sequence[Call]) -> list[Call]:
    """By prompt length, then prompt ids, response ids, call id: whoever a call can extend comes before it."""
    by_length: dict[int, list[Call]] = {}
    for call in calls:
        length = len(call.prompt_ids)
        if length in by_length:
            by_length[length].append(call)
        else:
            by_length[length] = [call]
    ordered: list[Call] = []
    for length in sorted(by_length):
        group = by_length[length]
        ordered += sorted(group, key=cmp_to_key(_by_ids)) if len(group) > 1 else group
    return ordered


def _by_ids(x: Call, y: Call) -> int:
    """Compare calls with prompts of one length by prompt ids, up to the first that differs; response ids; call id."""
    at = equal_run(x.prompt_ids, y.prompt_ids)
    if at < len(x.prompt_ids):
        return int(x.prompt_ids[at]) - int(y.prompt_ids[at])
    return -1 if (x.response_ids.tolist(), x.call_id) < (y.response_ids.tolist(), y.call_id) else 1


class _Chain:
    """A sample being built: its calls, where their responses lie, and the tokens before the last response."""

    __slots__ = ("calls", "prompt", "spans")

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.spans: list[Span] = []
        self.prompt: Int32 = NO_IDS

    def tokens(self) -> Int32:
        return np.concatenate([self.prompt, self.calls[-1].response_ids])


Route = Callable[[Call, "list[_Chain]", "PrefixTree"], tuple[int, Int32] | None]
"""Which chain a call extends, and the prompt it then has; None opens a new one."""


def _chain(rollout: Rollout, calls: Sequence[Call], route: Route) -> tuple[list[_Chain], list[Break]]:
    """Take the calls in the order given; each extends the chain that ``route`` names or opens a new one."""
    chains: list[_Chain] = []
    breaks: list[Break] = []
    extended: list[Call | None] = []  # by each call; None where it opened its sample
    tree = PrefixTree()
    for order, call in enumerate(calls):
        shared = tree.add(call.prompt_ids, call.response_ids, order)
        target = route(call, chains, tree)
        if target is not None:
            index, prompt = target
            extended.append(chains[index].calls[-1])
        else:
            index, prompt = len(chains), call.prompt_ids
            chains.append(_Chain())
            extended.append(None)
            if index:
                first = tree.first_with(shared)
                before = extended[first]
                joint = 0 if before is None else len(before.prompt_ids) + len(before.response_ids)
                at = {"position": shared, "joint": joint}
                breaks.append(Break(rollout=rollout, sample=index, call=call, earlier=calls[first], **at))
        chain, start = chains[index], len(prompt)
        chain.calls.append(call)
        chain.spans.append(Span(call_id=call.call_id, start=start, stop=start + len(call.response_ids)))
        chain.prompt = prompt
        tree.open_end(index)
    return chains, breaks


def _to_none(call: Call, chains: list[_Chain], tree: PrefixTree) -> None:
    return None


def _to_previous(call: Call, chains: list[_Chain], tree: PrefixTree) -> tuple[int, Int32] | None:
    index = tree.take_end(len(call.prompt_ids), only=len(chains) - 1)  # the previous call is in the newest chain
    return None if index is None else (index, call.prompt_ids)


def _to_longest(call: Call, chains: list[_Chain], tree: PrefixTree) -> tuple[int, Int32] | None:
    index = tree.take_end(len(call.prompt_ids))
    return None if index is None else (index, call.prompt_ids)


_ROUTES: dict[str, Route] = {"per_call": _to_none, "adjacent": _to_previous, "best_effort": _to_longest}


def _sample(rollout: Rollout, index: int, chain: _Chain, faithful: bool) -> Sample:
    token_ids = chain.tokens()
    logprobs = np.zeros(len(token_ids), dtype=np.float32)
    policy_version = np.full(len(token_ids), -1, dtype=np.int32)
    for call, span in zip(chain.calls, chain.spans, strict=True):
        at = slice(span.start, span.stop)
        logprobs[at] = np.nan if call.logprobs is None else call.logprobs
        policy_version[at] = call.policy_version
    loss_mask = policy_version >= 0  # which a call's own versions are
    for column in (token_ids, loss_mask, logprobs, policy_version):
        column.flags.writeable = False
    return Sample._made(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        index=index,
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        policy_version=policy_version,
        spans=tuple(chain.spans),
        faithful=faithful,
    )


def _by_text(calls: Sequence[Call], decode: Callable[[list[int]], str], limit: int | None) -> tuple[list[Call], Route]:
    """The order and the route of "substitute": extend the sample with the longest text that starts the prompt's text.

    Written to be plain, not fast: it decodes every prompt and is for measuring only.
    """
    texts = {call.call_id: decode(call.prompt_ids.tolist()) for call in calls}
    known: list[tuple[Int32, str]] = []  # tokens and text of each chain so far

    def route(call: Call, chains: list[_Chain], tree: PrefixTree) -> tuple[int, Int32] | None:
        index, prompt = len(chains), call.prompt_ids
        fits = [i for i, (_, text) in enumerate(known) if texts[call.call_id].startswith(text)]
        for i in sorted(fits, key=lambda i: (-len(known[i][1]), -_shared(known[i][0], prompt), i)):
            at = _same_text(known[i][0], prompt, decode)
            if at is None:
                continue
            overwritten = np.concatenate([known[i][0], prompt[at:]])
            if limit is None or len(overwritten) + len(call.response_ids) <= limit:
                index, prompt = i, overwritten
                break
        tokens = np.concatenate([prompt, call.response_ids])
        known[index : index + 1] = [(tokens, decode(tokens.tolist()))]
        return (index, prompt) if index < len(chains) else None

    return sorted(_merge_order(calls), key=lambda call: len(texts[call.call_id])), route


def _shared(x: Int32, y: Int32) -> int:
    return common_prefix(x, NO_IDS, y, NO_IDS, 0)


def _same_text(tokens: Int32, prompt: Int32, decode: Callable[[list[int]], str]) -> int | None:
    """Number of prompt tokens whose text is that of ``tokens``; None where no token boundary lies there."""
    shared = _shared(tokens, prompt)
    if shared == len(tokens):
        return shared
    start = max(0, shared - 8)  # some common tokens first: pieces of a character mean nothing alone
    wanted = decode(tokens[start:].tolist())
    near = bisect_left(range(len(prompt)), len(wanted), lo=shared, key=lambda k: len(decode(prompt[start:k].tolist())))
    # Unfinished characters make text lengths uneven, so look around; of several, one that ends alike, then the first.
    around = range(max(shared, near - 8), min(near + 8, len(prompt)) + 1)
    fits = [k for k in around if decode(prompt[start:k].tolist()) == wanted]
    return max(fits, key=lambda k: (k > 0 and prompt[k - 1] == tokens[-1], -k), default=None)
