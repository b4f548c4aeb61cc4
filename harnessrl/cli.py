"""The command line. Exit codes: 0 done, 1 failed, 2 bad input, 130 stopped by Ctrl-C (every started process has ended)."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

from harnessrl import __version__


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Run a command and return its exit code."""
    arguments = _parser().parse_args(argv)
    if not hasattr(arguments, "command"):
        _parser().print_help()
        return 2
    signal.signal(signal.SIGTERM, _terminate)
    if os.environ.get("HARNESSRL_FOLLOW_STDIN"):
        threading.Thread(target=_follow_stdin, daemon=True).start()
    try:
        code: int = arguments.command(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        again = (
            "; the same command continues from the last checkpoint" if arguments.command in (_train, _ablate) else ""
        )
        print(f"stopped{again}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has stopped
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ImportError as error:
        print(f"harnessrl: {error}{_hint(error)}", file=sys.stderr)
        return 2
    except Exception as error:
        from harnessrl.errors import ConfigError, RunError

        if full := _full_disk(error):
            print(f"harnessrl: {full}", file=sys.stderr)
            return 1
        if not isinstance(error, ConfigError | RunError):
            raise
        if isinstance(error, ConfigError) or os.environ.get("RANK", "0") == "0":  # all ranks end alike, one speaks
            print(f"harnessrl: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _follow_stdin() -> None:
    """Stop when stdin ends: whoever started this run is gone."""
    while os.read(0, 1024):  # sys.stdin's lock, held here while the interpreter ends, would abort it
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _full_disk(error: Exception) -> str:
    """What to say where a disk or quota is full; libraries in other languages tell by their text alone."""
    known = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    if not known and "No space left on device" not in str(error):
        return ""
    name = getattr(error, "filename", None)
    return f"no space left on the disk{f' of {name}' if name else ''}; what was recorded stays, and the same command continues"


def _hint(error: ImportError) -> str:
    extras = {"torch": "train", "transformers": "train", "tensorboard": "train", "matplotlib": "figs", "scipy": "figs"}
    missing = (error.name or "").partition(".")[0]
    return f". From the checkout: pip install -e '.[{extras.get(missing, 'train')}]'" if missing else ""


ALONE = {
    "gateway": "e.g. store=FILE key=KEY upstream=http://HOST:PORT/v1 model=NAME host=127.0.0.1 port=0",
    "worker": "e.g. controller=tcp://HOST:PORT capacity=64",
}


Commands = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="harnessrl", description="Harnessed agentic RL in pure PyTorch.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in (_add_train, _add_ablate, _add_compare, _add_figures, _add_inspect, _add_export, _add_bench, _add_alone):
        add(commands)
    return parser


def _add_train(commands: Commands) -> None:
    train = commands.add_parser(
        "train", help="train a policy", description="Train a policy inside its harness; resumes."
    )
    train.add_argument(
        "config", help="a YAML file, e.g. experiments/lookup/config.yaml; the word 'keys' lists every key"
    )
    train.add_argument(
        "overrides", nargs="*", metavar="key=value", help="e.g. steps=60 seed=1 run=first update.lr=1e-3"
    )
    train.set_defaults(command=_train)


def _add_ablate(commands: Commands) -> None:
    ablate = commands.add_parser(
        "ablate", help="run a grid of settings and seeds", description="Run an ablation; resumes."
    )
    ablate.add_argument("file", help="a YAML file, e.g. ablations/normalization.yaml")
    ablate.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="seeds=5 jobs=2 results=FOLDER (rows of finished runs), or any key of every run: steps=60",
    )
    ablate.set_defaults(command=_ablate)


def _add_compare(commands: Commands) -> None:
    compare = commands.add_parser(
        "compare",
        help="two runs side by side",
        description="Print how two runs' configurations differ, their final numbers and curves; draws a picture too.",
    )
    compare.add_argument("first", help="a run folder, e.g. runs/NAME")
    compare.add_argument("second", help="another")
    compare.add_argument("overrides", nargs="*", metavar="out=FILE", help="the picture; FIRST/compare.png if not given")
    compare.set_defaults(command=_compare)


def _add_figures(commands: Commands) -> None:
    from harnessrl.figures import names

    figures = commands.add_parser(
        "figures",
        help="redraw the figures of a checkout",
        description="Draw all figures of paper_figs/, or the named ones, from committed tables, as PNG and PDF, with a JSON "
        "file that says what they were drawn from. `harnessrl figures list` tells what each shows.",
        epilog=f"figures: {', '.join(names()) or 'none here, they are part of a checkout'}",
    )
    figures.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="figures; out=FOLDER (runs/figures); from=RUNS_FOLDER first makes the tables again from finished runs",
    )
    figures.add_argument("--from-runs", metavar="FOLDER", help="the same as from=FOLDER")
    figures.set_defaults(command=_figures)


def _add_inspect(commands: Commands) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="report on a trace",
        description="Read a trace (rollouts.jsonl, also gzipped), merge it, and report samples, breaks, weights and "
        "advantages: on the terminal, as TRACE.txt and as the page TRACE.html.",
    )
    inspect.add_argument("trace", help="JSON lines, one rollout a line, e.g. runs/NAME/rollouts.jsonl")
    inspect.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="tokenizer=FOLDER shows text and tells why prefixes broke; strategy=best_effort (or per_call, adjacent, "
        "substitute); html=PATH and text=PATH instead of TRACE.html and TRACE.txt; json=true prints one JSON object and "
        "saves only what html= and text= name",
    )
    inspect.set_defaults(command=_inspect)


def _add_export(commands: Commands) -> None:
    export = commands.add_parser(
        "export",
        help="write a checkpoint as a transformers folder",
        description="Write a run's policy as config, safetensors and tokenizer, for AutoModelForCausalLM.",
    )
    export.add_argument("run", help="a run folder, e.g. runs/NAME")
    export.add_argument("out", help="the folder to write; it must not exist")
    export.add_argument("overrides", nargs="*", metavar="step=N|best", help="which checkpoint; the newest if not given")
    export.set_defaults(command=_export)


def _add_bench(commands: Commands) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure the adapter or the trainer",
        description="Measure speed and memory beside floors and peers (those that are installed), all in one run: only "
        "ratios mean anything on a shared machine.",
    )
    bench.add_argument("part", choices=["adapter", "train"], help="merging and planning, or a training step")
    bench.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="adapter: seconds=1 a row. train: model=tiny|middle|all data=short|lognormal|tree|all tokens=N of an update, "
        "max_tokens=8192 of a pack, repeats=5 seed=0 memory=true|false json=true|false",
    )
    bench.set_defaults(command=_bench)


def _add_alone(commands: Commands) -> None:
    for name, what in (
        ("gateway", "the gateway, store and controller alone"),
        ("worker", "a worker that runs harnesses"),
    ):
        alone = commands.add_parser(
            name,
            help=f"run {what}",
            description=f"Run {what} until Ctrl-C or SIGTERM; prints one JSON line when it is ready. The word 'keys' lists every key.",
        )
        alone.add_argument("settings", nargs="*", metavar="key=value", help=ALONE[name])
        alone.set_defaults(command=_alone, name=name)


def _train(arguments: argparse.Namespace) -> int:
    from harnessrl.config import Config, describe, load

    if arguments.config == "keys":
        for key, default, doc in describe(Config):
            print(f"{key} = {default}\n    {doc}")
        return 0
    config = load(arguments.config, arguments.overrides)
    from harnessrl.preflight import check

    check(config)
    from harnessrl.train.loop import train

    train(config)
    return 0


def _ablate(arguments: argparse.Namespace) -> int:
    from harnessrl.ablate import ablate

    return ablate(arguments.file, arguments.overrides)


def _compare(arguments: argparse.Namespace) -> int:
    from harnessrl.compare import compare
    from harnessrl.errors import ConfigError

    options = dict(item.partition("=")[::2] for item in arguments.overrides)
    if unknown := options.keys() - {"out"}:
        raise ConfigError(f"{min(unknown)}: unknown key; allowed: out=FILE")
    return compare(arguments.first, arguments.second, **options)


def _figures(arguments: argparse.Namespace) -> int:
    from harnessrl.figures import figures

    return figures(arguments.names + ([f"from={arguments.from_runs}"] if arguments.from_runs else []))


def _inspect(arguments: argparse.Namespace) -> int:
    from harnessrl.inspect import inspect

    return inspect(arguments.trace, arguments.overrides)


def _export(arguments: argparse.Namespace) -> int:
    from harnessrl.train.export import main

    return main(arguments.run, arguments.out, arguments.overrides)


def _bench(arguments: argparse.Namespace) -> int:
    from harnessrl.bench import bench

    return bench(arguments.part, arguments.overrides)


def _alone(arguments: argparse.Namespace) -> int:
    import json

    from omegaconf import OmegaConf

    from harnessrl.config import describe
    from harnessrl.service import main, settings, worker
    from harnessrl.texts import override, texts_of

    kind, serve = {
        "gateway": (settings.ServiceConfig, main.serve),
        "worker": (settings.WorkerConfig, worker.serve),
    }[arguments.name]
    if arguments.settings == ["keys"]:
        for key, default, doc in describe(kind):
            print(f"{key} = {default}\n    {doc}")
        return 0
    parts = [override(item, texts_of(kind)) for item in arguments.settings]
    values = OmegaConf.to_container(OmegaConf.merge(*parts)) if parts else {}
    if arguments.name == "worker":
        values.setdefault("path", [os.getcwd()])  # so that MODULE:FUNCTION harnesses resolve as they do for `train`
    serve(json.dumps(values), follow_stdin=False)
    return 0
