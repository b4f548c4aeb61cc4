"""Benchmarks: floors, ours and peers in one run, so that only ratios need to be believed."""

from collections.abc import Sequence

from harnessrl.errors import ConfigError


def bench(part: str, overrides: Sequence[str]) -> int:
    """Run `adapter` or `train` and return the exit code; each imports only what it measures."""
    if part == "train":
        from harnessrl.bench.train import run as run_train

        return run_train(overrides)
    from harnessrl.bench.adapter import run as run_adapter

    run_adapter(_seconds(overrides))
    return 0


def _seconds(overrides: Sequence[str]) -> float:
    """The one key of the adapter's benchmark."""
    seconds = 1.0
    for item in overrides:
        key, _, value = item.partition("=")
        try:
            seconds = float(value) if key == "seconds" else float("nan")
        except ValueError:
            seconds = float("nan")
        if not 0 < seconds < float("inf"):
            raise ConfigError(f"{item!r}: expected seconds=NUMBER, larger than 0")
    return seconds
