"""Imports go one way. The rule is checked on the source, and shown to be able to fail."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent / "harnessrl"

# room -> the rooms of harnessrl that it may import (itself always)
ALLOWED = {
    "adapter": set(),
    "errors": set(),
    "strips": set(),
    "attention": {"errors", "strips"},
    "service": {"adapter", "errors"},
    "engine": {"attention", "service.wire"},
    "limits": {"config", "errors"},  # config as a type only
    "config": {"errors", "limits", "texts"},
    "texts": {"errors"},
    "trace": {"adapter", "errors"},
    "preflight": {"config", "errors", "metrics", "trace"},
    "inspect": {"adapter", "errors", "trace"},
    "statistics": set(),
    "results": {"adapter", "config", "errors", "metrics", "preflight"},
    "report": {"results", "statistics"},
    "grid": {"config", "errors", "metrics", "results"},
    "ablate": {"display", "errors", "grid", "preflight", "report", "results"},
    "compare": {"errors", "metrics", "preflight", "report", "results"},
    "figures": {"errors"},
    "bench": {"adapter", "attention", "config", "engine", "errors", "trace", "train"},
    "metrics": {"errors"},
    "display": set(),
    "processes": {"errors"},
    "train": {
        "adapter",
        "attention",
        "config",
        "display",
        "engine",
        "errors",
        "metrics",
        "preflight",
        "processes",
        "service.wire",
        "trace",
    },
}
HEAVY = {"torch", "transformers", "accelerate", "tensorboard"}
LIGHT_ROOMS = {
    "adapter",
    "service",
    "errors",
    "config",
    "texts",
    "limits",
    "display",
    "processes",
    "trace",
    "preflight",
    "inspect",
    "statistics",
    "results",
    "report",
    "grid",
    "ablate",
    "compare",
    "figures",
}


def imports(source, top_level_only=False):
    tree = ast.parse(source)
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(path):
    return path.relative_to(ROOT).with_suffix("").parts[0]


def violations(room, source):
    for name in imports(source):
        if name.startswith("harnessrl."):
            target = name.removeprefix("harnessrl.")
            allowed = ALLOWED[room] | {room}
            if not any(target == one or target.startswith(one + ".") for one in allowed):
                yield f"{room} imports {name}"
        if name.partition(".")[0] in ("experiments", "ablations", "paper_figs"):
            yield f"{room} imports {name}"
    if room in LIGHT_ROOMS:
        yield from (f"{room} imports {name}" for name in imports(source) if name.partition(".")[0] in HEAVY)


def test_rooms_import_only_what_they_may():
    found = [
        problem
        for path in sorted(ROOT.rglob("*.py"))
        if room_of(path) in ALLOWED
        for problem in violations(room_of(path), path.read_text())
    ]
    assert found == []


def test_the_rule_can_fail():
    assert list(violations("adapter", "import torch")) == ["adapter imports torch"]
    assert list(violations("service", "from harnessrl.train import loop")) == ["service imports harnessrl.train.loop"]
    assert list(violations("engine", "def f():\n    import harnessrl.service.gateway")) != []
    assert list(violations("train", "import experiments.lookup")) == ["train imports experiments.lookup"]
    assert list(violations("engine", "from harnessrl.service.wire import Reply\nimport torch")) == []
