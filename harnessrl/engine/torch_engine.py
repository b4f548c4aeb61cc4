"""TorchEngine: continuous batching with a KV cache in pure PyTorch, for any transformers causal LM.

Every request owns a slot (a row of the cache) while it runs; requests join and leave between steps. A finished request
leaves its tokens in its slot, so that the next request whose prompt starts with them takes the slot over and computes
only what is new: a prefix cache without copies. The engine holds the policy's own modules: at world size 1 the weights
are shared with the trainer, and `load` only has to forget the cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from harnessrl.attention import sdpa
from harnessrl.engine.base import NEXT, Phase
from harnessrl.engine.sampling import choose
from harnessrl.service.wire import Reply, Sampling

IDLE = Sampling(max_tokens=1, temperature=0.0)
"""Stands in for rows that nobody asked for."""


@dataclass(slots=True)
class Request:
    """A queued or running request."""

    request_id: bytes
    prompt: np.ndarray
    sampling: Sampling
    slot: int = -1
    """Row of the cache; -1 while queued."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Slots:
    """Cached keys and values, [rows, heads, width, dim] a layer, and the layout of the forward that fills them.

    `begin` names the rows, the positions of the new tokens and the width to look at; `attend` then writes the new keys
    and values and attends to all earlier positions of the row. The last column is scratch for padding. Heads and sizes
    are those that each layer brings.
    """

    def __init__(self, rows: int) -> None:
        self.count = rows
        self.width = 0
        self.memory: dict[int, list[Tensor]] = {}

    def grow(self, width: int) -> None:
        """Make room for positions below `width`, keeping what is cached."""
        if width <= self.width:
            return
        width = -(-max(width, self.width * 3 // 2) // 64) * 64
        for pair in self.memory.values():
            for at, previous in enumerate(pair):
                pair[at] = previous.new_zeros(*previous.shape[:2], width + 1, previous.shape[3])
                pair[at][:, :, : self.width] = previous[:, :, : self.width]
        self.width = width

    def begin(self, rows: np.ndarray, positions: Tensor, real: Tensor, full_width: bool = False) -> None:
        """rows [B]; positions [B, Q] of the new tokens; real [B, Q] is False on padding."""
        self.rows = torch.from_numpy(rows).to(positions.device)
        self.positions = torch.where(real, positions, self.width)
        self.span = self.width if full_width else int(positions.max()) + 1
        columns = torch.arange(self.span, device=positions.device)
        self.mask = (columns <= positions[:, :, None])[:, None]
        first, last = int(rows[0]), int(rows[-1])
        contiguous = last - first + 1 == len(rows) and bool((np.diff(rows) == 1).all())
        self.view = slice(first, last + 1) if contiguous else self.rows  # a slice is a view, rows are a copy

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
        if layer not in self.memory:
            self.memory[layer] = [x.new_zeros(self.count, x.shape[1], self.width + 1, x.shape[3]) for x in (k, v)]
        context = []
        for memory, new in zip(self.memory[layer], (k, v), strict=True):
            memory[self.rows[:, None], :, self.positions] = new.transpose(1, 2)
            context.append(memory[self.view][:, :, : self.span])
        return sdpa(q, *context, scaling, mask=self.mask)


class TorchEngine:
    """The embedded engine; see `harnessrl.engine.base.Engine` for the protocol.

    Args:
        model: a causal LM prepared with `use_layouts`.
        max_batch: requests decoded together; more wait their turn in order of arrival.
        max_context: positions a request may use, prompt and response together; 0 takes the model's own limit.
        prefill_tokens: prompt tokens computed in one forward (padding included), a bound on memory.
        deterministic: every number of a response depends on its own request alone, bit for bit, and not on who else
            runs. Prompts are computed whole and one by one, without prefix reuse; every decoding forward has
            `max_batch` rows of `max_context` positions. Slower.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_batch: int = 64,
        max_context: int = 0,
        prefill_tokens: int = 8192,
        deterministic: bool = False,
    ) -> None:
        self.model, self.max_batch, self.prefill_tokens = model, max_batch, prefill_tokens
        self.deterministic = deterministic
        self.max_context = max_context or model.config.get_text_config().max_position_embeddings
        self.phase, self.version = Phase.SERVING, 0
        self.queue: OrderedDict[bytes, Request] = OrderedDict()
        self.running: dict[bytes, Request] = {}
        self.slots = Slots(max_batch)
        if deterministic:
            self.slots.grow(self.max_context)
        self.cached = np.zeros((max_batch, 0), np.int32)  # the tokens whose keys and values a slot holds
        self.lengths = np.zeros(max_batch, np.int64)
        self.used = np.zeros(max_batch, np.int64)  # when the slot was last taken, for eviction
        self.free = set(range(max_batch))
        self.clock = 0
        self.reused_tokens = 0

    # -- requests

    def submit(self, request_id: bytes, prompt_ids: Sequence[int] | np.ndarray, sampling: Sampling) -> None:
        prompt = np.asarray(prompt_ids, np.int32)
        if not 0 < len(prompt) < self.max_context:
            raise ValueError(f"prompt has {len(prompt)} tokens; allowed are 1 to {self.max_context - 1}")
        vocabulary = self.model.config.get_text_config().vocab_size
        if prompt.min() < 0 or prompt.max() >= vocabulary:
            raise ValueError(f"prompt ids must lie in 0..{vocabulary - 1}, got {prompt.min()}..{prompt.max()}")
        if request_id in self.queue or request_id in self.running:
            raise ValueError(f"request {request_id.hex()} is open already")
        self.queue[request_id] = Request(request_id, prompt, sampling)

    def cancel(self, request_id: bytes) -> Reply | None:
        request = self.queue.pop(request_id, None) or self.running.get(request_id)
        return self._finish(request, "abort") if request else None

    @property
    def open_requests(self) -> int:
        return len(self.queue) + len(self.running)

    @property
    def running_requests(self) -> list[bytes]:
        return list(self.running)

    @torch.inference_mode()
    def step(self) -> list[Reply]:
        """Admit what fits and compute its prompts, else add one token to every running request."""
        assert self.phase in (Phase.SERVING, Phase.DRAINING), self.phase
        admitted = self._admit() if self.phase is Phase.SERVING else []
        if admitted:
            return self._advance(admitted)
        running = sorted(self.running.values(), key=lambda request: request.slot)
        return self._advance(running, everywhere=self.deterministic) if running else []

    def generate(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> list[Reply]:
        """Run requests to their end; results in the order of `prompts`."""
        for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            self.submit(index.to_bytes(16, "little"), prompt, sampling)
        done: dict[bytes, Reply] = {}
        while len(done) < len(prompts):
            done.update((reply.request_id, reply) for reply in self.step())
        return [done[index.to_bytes(16, "little")] for index in range(len(prompts))]

    # -- one forward

    def _admit(self) -> list[Request]:
        """Give free slots to queued requests, oldest first, while their new tokens fit `prefill_tokens`."""
        admitted: list[Request] = []
        widest = 0
        while self.queue and self.free:
            request = next(iter(self.queue.values()))
            slot, shared = (min(self.free), 0) if self.deterministic else self._best_slot(request.prompt)
            widest = max(widest, len(request.prompt) - shared)
            if admitted and (self.deterministic or widest * (len(admitted) + 1) > self.prefill_tokens):
                break
            del self.queue[request.request_id]
            self.free.remove(slot)
            self._take(request, slot, shared)
            admitted.append(request)
        return sorted(admitted, key=lambda request: request.slot)

    def _best_slot(self, prompt: np.ndarray) -> tuple[int, int]:
        """The free slot with the longest cached prefix of `prompt` (least recently used among equals), and its length."""
        free = np.fromiter(self.free, np.int64, len(self.free))
        width = min(len(prompt) - 1, self.cached.shape[1])  # the last token is always computed: its logits are needed
        equal = self.cached[free, :width] == prompt[:width]
        shared = np.where(equal.all(1), width, equal.argmin(1)) if width else np.zeros(len(free), np.int64)
        shared = np.minimum(shared, self.lengths[free])
        best = np.lexsort((self.used[free], -shared))[0]
        return int(free[best]), int(shared[best])

    def _take(self, request: Request, slot: int, shared: int) -> None:
        length = len(request.prompt)
        if length + request.sampling.max_tokens > self.cached.shape[1]:
            room = min(self.max_context, length + request.sampling.max_tokens) - self.cached.shape[1]
            self.cached = np.pad(self.cached, ((0, 0), (0, max(0, room))))
        self.clock += 1
        self.cached[slot, :length] = request.prompt
        self.lengths[slot], self.used[slot], request.slot = shared, self.clock, slot
        self.running[request.request_id] = request
        self.reused_tokens += shared

    def _advance(self, batch: list[Request], everywhere: bool = False) -> list[Reply]:
        """Compute the tokens of each slot that are not cached yet and sample one more for each request.

        With `everywhere` the forward has all rows and positions of the cache, whoever runs.
        """
        taken = np.array([request.slot for request in batch])
        rows = np.arange(self.max_batch) if everywhere else taken
        stop = self.lengths.copy()
        stop[taken] = [len(request.prompt) + len(request.ids) for request in batch]
        hidden = self._forward(rows, self.lengths[rows], stop[rows], everywhere)
        logits = self.model.get_output_embeddings()(hidden).float()
        self.lengths = stop
        by_slot = {request.slot: request for request in batch}
        chosen, logprobs = choose(
            logits,
            [by_slot[row].sampling if row in by_slot else IDLE for row in rows.tolist()],
            [len(by_slot[row].ids) if row in by_slot else 0 for row in rows.tolist()],
        )
        at = taken if everywhere else slice(None)
        return self._append(batch, chosen[at], logprobs[at])

    def _forward(self, rows: np.ndarray, start: np.ndarray, stop: np.ndarray, full_width: bool) -> Tensor:
        """Cache each row's tokens start..stop and return the hidden state of its last one, [rows, hidden]."""
        new = stop - start
        column = np.arange(int(new.max()))
        position = start[:, None] + column
        real = column < new[:, None]
        self.slots.grow(int(stop.max()))
        ids = np.where(real, self.cached[rows[:, None], np.minimum(position, self.cached.shape[1] - 1)], 0)
        device = self.model.device
        positions = torch.from_numpy(np.clip(position, 0, np.maximum(stop, 1)[:, None] - 1)).to(device)
        self.slots.begin(rows, positions, torch.from_numpy(real).to(device), full_width)
        hidden = self.model.base_model(
            input_ids=torch.from_numpy(ids).long().to(device),
            position_ids=positions,
            use_cache=False,
            layout=self.slots,
        ).last_hidden_state
        return hidden[torch.arange(len(rows), device=device), torch.from_numpy(np.maximum(new, 1) - 1).to(device)]

    def _append(self, batch: list[Request], chosen: np.ndarray, logprobs: np.ndarray) -> list[Reply]:
        finished = []
        for request, token, logprob in zip(batch, chosen.tolist(), logprobs.tolist(), strict=True):
            request.ids.append(token)
            request.logprobs.append(logprob)
            used = len(request.prompt) + len(request.ids)
            if token in request.sampling.stop_ids:
                finished.append(self._finish(request, "stop"))
            elif len(request.ids) == request.sampling.max_tokens or used >= self.max_context:
                finished.append(self._finish(request, "length"))
            else:
                self.cached[request.slot, used - 1] = token
        return finished

    def _finish(self, request: Request, reason: str) -> Reply:
        if request.slot >= 0:
            del self.running[request.request_id]
            self.free.add(request.slot)
        return Reply(
            request_id=request.request_id,
            ids=np.array(request.ids, np.int32),
            logprobs=np.array(request.logprobs, np.float32),
            finish_reason=reason,
            policy_version=self.version,
        )

    # -- weights

    def _enter(self, phase: Phase) -> None:
        assert phase in NEXT[self.phase], f"engine: {self.phase.name} -> {phase.name} is not a transition"
        self.phase = phase

    def drain(self) -> None:
        self._enter(Phase.DRAINING)

    def sleep(self, level: int = 1) -> None:
        assert not self.running, f"{len(self.running)} requests are running: drain first"
        self._enter(Phase.ASLEEP)

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        assert self.phase in (Phase.ASLEEP, Phase.LOADING), self.phase
        if "kv_cache" in tags:
            self.reset_prefix_cache()
            self._enter(Phase.SERVING)

    def load(self, version: int) -> None:
        """Serve the policy's present weights (shared memory) as `version`."""
        assert version > self.version, f"version {version} does not follow {self.version}"
        self._enter(Phase.LOADING)
        self.version = version

    def reset_prefix_cache(self) -> None:
        """Forget every cached key and value: they were computed by other weights."""
        assert not self.running, "requests are running"
        self.lengths[:] = 0
