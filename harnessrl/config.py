"""The configuration of a run: frozen dataclasses, read from YAML through OmegaConf, checked before anything starts.

Every `config.yaml` holds differences from the defaults below. `key=value` on the command line goes last.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import MISSING as REQUIRED
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harnessrl.errors import ConfigError
from harnessrl.limits import check
from harnessrl.texts import first_line, override, refuse_bent, texts_of


@dataclass(frozen=True, kw_only=True)
class Task:
    inputs: str = MISSING
    """MODULE:FUNCTION, `inputs(seed, split) -> Iterator[dict]`: an endless, repeatable stream of JSON inputs."""
    harness: str | None = None
    """MODULE:FUNCTION, an `async def run(env)` run inside a worker."""
    command: list[str] = field(default_factory=list)
    """argv of a harness that is a program; exclusive with `harness`."""
    env_map: dict[str, str] = field(default_factory=dict)
    """Environment variable -> path into the input (`input.question`) or a literal."""
    timeout: float = 120.0
    """Seconds one rollout may take."""
    groups: int = 16
    """Inputs a step: one group each."""
    group_size: int = 8
    """Rollouts of one input."""
    failure_reward: float = 0.0
    """Reward of a rollout that failed on its own account (timeout, call bound, context overflow, exit code)."""
    overlong_tokens: int | None = None
    """A rollout with more sampled tokens than this is overlong; null is no limit."""
    overlong: Literal["mask", "penalise"] = "mask"
    """Overlong rollouts are left out of advantages and training, or their reward is reduced before advantages."""
    overlong_penalty: float = 1.0
    """What `penalise` subtracts from an overlong rollout's reward."""
    resample_zero_signal: bool = False
    """Replace groups of equal rewards by groups of the next inputs (DAPO's dynamic sampling); they are recorded, untrained."""
    max_resample: int = 3
    """Rounds of replacement a step at most; what still has equal rewards then stays."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    rank: int = 0
    """Rank of the adapters that are trained in place of the weights (LoRA, needs peft); 0 trains the weights."""
    alpha: float = 32.0
    """An adapter's output is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=list)
    """Linear layers that get one, by the ends of their names (`q_proj`); empty is every one but the output head."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    source: str = MISSING
    """A transformers folder, or MODULE:FUNCTION, `policy(seed, cache) -> folder`."""
    name: str = "policy"
    """The model name that harnesses see."""
    max_context: int = 0
    """Tokens of prompt and response together; 0 takes the model's limit."""
    max_response: int = 512
    """Upper bound of sampled tokens a call."""
    max_calls: int = 0
    """Calls a rollout may make; 0 is unbounded."""
    max_batch: int = 64
    """Requests decoded together."""
    train_temperature: float = 1.0
    """Sampling temperature of training rollouts; the trainer's logprobs are tempered alike."""
    val_temperature: float = 0.7
    """Sampling temperature in `val` mode."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What trainer and engine compute in; weights, gradients and optimizer states are float32 in either."""
    lora: Lora = field(default_factory=Lora)


@dataclass(frozen=True, kw_only=True)
class Advantage:
    estimator: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"] = "grpo"
    """Baseline and scale; see `harnessrl.adapter.rollout_advantages`."""
    unit: Literal["rollout", "sample"] = "rollout"
    """What counts once in a baseline: the rollout, or (for ablation) each of its samples."""
    eps: float = 1e-6
    """Added to the standard deviation."""
    credit: Literal["identical", "discounted", "mean_preserving"] = "identical"
    """How a rollout's advantage is split over its calls; the two others read `call_reward` events, in units of the advantage."""
    discount: float = 1.0
    """Discount a call, read by `discounted`; 1 does not discount."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    normalizer: Literal["token_mean", "seq_mean", "rollout_mean", "constant"] = "rollout_mean"
    """Weights of the trained tokens; see `harnessrl.adapter.token_weights`."""
    scale: float | None = None
    """Tokens a rollout is divided by; needed by, and only by, `constant`."""
    kind: Literal["clip", "gspo", "cispo"] = "clip"
    """The surrogate; see `harnessrl.train.objective.policy_loss`."""
    clip_low: float = 0.2
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped from above at 1 + clip_high."""
    dual_clip: float | None = None
    """Bounds the loss of negative advantages at this multiple (larger than 1); null is off."""
    old: Literal["recompute", "engine"] = "recompute"
    """What ratios are taken to: the trainer's own logprobs before the first update, or the engine's."""
    importance: Literal["none", "token", "sequence"] = "none"
    """Truncated importance weights from the engine's to the trainer's logprobs."""
    importance_threshold: float = 2.0
    """Largest importance weight."""
    mask_below: float = 0.0
    """Tokens whose trainer / engine ratio is below get weight 0; 0 is off."""
    mask_above: float = float("inf")
    """Tokens whose trainer / engine ratio is above get weight 0; inf is off."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    kl_coef: float = 0.0
    """Weight of the KL to the initial policy."""
    reference: bool = False
    """Load the initial policy, for `loss/kl` in the metrics, even where kl_coef is 0."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where it enters: each token's KL the loss, or each rollout's summed k1 its reward, before advantages."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL in the loss; in the reward it is k1."""


@dataclass(frozen=True, kw_only=True)
class Update:
    strategy: Literal["per_call", "adjacent", "best_effort", "substitute"] = "best_effort"
    """How calls are merged into samples; `substitute` trains tokens behind prompts they were not sampled from, for ablation."""
    max_sample_tokens: int | None = None
    """Longest sample that is trained; a longer call is skipped as too_long."""
    rollouts_per_update: int | None = None
    """Rollouts an optimizer update holds; null is all of the step. Groups are never split."""
    split_rollouts: bool = False
    """Deal single samples to the updates, whatever rollout they are of, as trainers do that count samples; for ablation."""
    epochs: int = 1
    """Passes over a step's rollouts."""
    max_updates: int | None = None
    """Updates a step makes at most, in each epoch; the others are skipped and counted. null is no limit."""
    filter_zero_signal: bool = False
    """Groups all of whose advantages are 0 are left out of updates and counted; advantages are computed before."""
    recompute: bool = False
    """Compute each block's activations again in the backward pass: less memory for one more forward, same numbers."""
    tree: bool = False
    """Samples of a rollout share their common context in the forward and backward pass: same numbers, fewer tokens."""
    max_tokens: int = 8192
    """Tokens of a pack (one forward and backward)."""
    lr: float = 1e-6
    """AdamW learning rate."""
    warmup_steps: int = 0
    """Optimizer updates over which the learning rate rises linearly to `lr`."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW betas."""
    weight_decay: float = 0.0
    """AdamW decoupled weight decay."""
    grad_clip: float = 1.0
    """Largest gradient norm."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    every: int = 0
    """Steps between validation runs in `val` mode, also before the first step and after the last; 0 is none. Not in a replay."""
    inputs: int = 64
    """Held-out inputs: the first ones of `task.inputs(seed, "val")`, the same each time."""
    rollouts: int = 1
    """Rollouts of each input."""


@dataclass(frozen=True, kw_only=True)
class Service:
    host: str = "127.0.0.1"
    """Where the gateway listens."""
    port: int = 0
    """0 takes a free one."""
    workers: int = 1
    """Worker processes on this machine; more may connect from elsewhere."""
    capacity: int = 256
    """Rollouts a worker runs at once."""
    attempts: int = 2
    """Executions of a rollout, counting those lost to infrastructure."""
    hold_seconds: float = 100.0
    """How long a request is held while the engine is paused."""


@dataclass(frozen=True, kw_only=True)
class Config:
    run: str = "default"
    """Name of the run folder below `runs`."""
    runs: str = "runs"
    """Where run folders lie."""
    seed: int = 0
    """Fixes inputs, rollout ids, sampling noise and packing."""
    deterministic: bool = False
    """Two runs of one seed agree to the last bit (`schedule=sync`): each call is computed as if alone; rollouts take longer."""
    steps: int = 100
    """Steps in all; a resumed run continues up to here."""
    schedule: Literal["sync"] = "sync"
    """When rollouts are collected: `sync` waits for every rollout of the step."""
    replay: str | None = None
    """A recorded rollouts.jsonl to train on instead of generating."""
    threads: int = 1
    """Threads of PyTorch in the trainer."""
    checkpoint_every: int = 10
    """Steps between checkpoints; the last step always has one."""
    checkpoint_keep: int = 2
    """Newest checkpoints kept; the best one is kept besides: by val/reward_mean, or by reward/mean where none was validated."""
    stall_seconds: float = 300.0
    """The run stops with an error if no call and no rollout completes for this long."""
    train_agents: list[str] | None = None
    """Agents whose calls are trained; calls of others are context only. null is all."""
    task: Task = field(default_factory=Task)
    policy: Policy = field(default_factory=Policy)
    advantage: Advantage = field(default_factory=Advantage)
    loss: Loss = field(default_factory=Loss)
    update: Update = field(default_factory=Update)
    validation: Validation = field(default_factory=Validation)
    service: Service = field(default_factory=Service)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.runs) / self.run


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration file, apply `key=value` overrides, and check it.

    The file's package root (the first folder above it without `__init__.py`) and the current folder become importable,
    so that `MODULE:FUNCTION` values resolve from anywhere.

    Raises:
        ConfigError: an unreadable file, unknown key, wrong type or impossible combination, by the key's path.
    """
    path = Path(path)
    return from_mapping(read_yaml(path), overrides, source=path)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, or ConfigError with the file and line."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        data = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # yaml and omegaconf raise unrelated types; each is the user's file at fault
        raise ConfigError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, got {type(data).__name__}")
    return data  # type: ignore[return-value]


def from_mapping(data: dict[str, Any], overrides: Sequence[str], source: Path) -> Config:
    """Merge a mapping and overrides into the defaults; see `load`."""
    for folder in (package_root(source), Path.cwd()):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    texts = texts_of(Config)
    config, part = OmegaConf.structured(Config), OmegaConf.create(data)
    refuse_bent(part, texts, str(source))
    config = _merge(config, part, str(source))
    for item in overrides:
        config = _merge(config, override(item, texts), item)
    try:
        resolved: Config = OmegaConf.to_object(config)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise ConfigError(f"{source}: {first_line(error)}") from error
    check(resolved)
    return resolved


def package_root(path: Path) -> Path:
    """The folder that holds the outermost package around a file."""
    folder = path.resolve().parent
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return folder


def _merge(config: Any, part: Any, source: str) -> Any:
    try:
        return OmegaConf.merge(config, part)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        allowed = _allowed(config, key) if type(error).__name__ == "ConfigKeyError" else ""
        raise ConfigError(f"{source}: {f'{key}: ' if key else ''}{first_line(error)}{allowed}") from error


def _allowed(config: Any, key: str | None) -> str:
    parent = (key or "").rpartition(".")[0]
    node = OmegaConf.select(config, parent) if parent else config
    return f"; allowed: {', '.join(str(name) for name in node)}"


def describe(cls: type, prefix: str = "") -> list[tuple[str, str, str]]:
    """(key, default, doc) of every configuration key, for `--help` and the documentation."""
    import ast
    import inspect
    import itertools

    body = ast.parse(inspect.getsource(cls)).body[0].body  # type: ignore[attr-defined]
    docs = {
        a.target.id: b.value.value
        for a, b in itertools.pairwise(body)
        if isinstance(a, ast.AnnAssign) and isinstance(b, ast.Expr)
    }
    rows = []
    for item in fields(cls):
        default = item.default_factory() if item.default_factory is not REQUIRED else item.default
        if hasattr(default, "__dataclass_fields__"):
            rows += describe(type(default), f"{prefix}{item.name}.")
        else:
            shown = "required" if default in (MISSING, REQUIRED) else str(default)
            rows.append((prefix + item.name, shown, docs.get(item.name, "")))
    return rows
