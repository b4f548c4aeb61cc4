"""Benchmarks: floors, ours and peers in one run, so that only ratios need to be believed."""

from collections.abc import Sequence

from harnessrl.errors import ConfigError


def bench(part: str, overrides: Sequence[str]) -> int:
    """Run `adapter` or `train` and return the exit code; each imports only what it measures."""
    if part == "train":
        from harnessrl.bench.train import run as run_train

        return run_train(overrides)
    from harnessrl.bench.adapter import run as run_adapter

    seconds, as_json = _adapter_keys(overrides)
    run_adapter(seconds, as_json=as_json)
    return 0


def _adapter_keys(overrides: Sequence[str]) -> tuple[float, bool]:
    """The keys of the adapter's benchmark: seconds to spend on each line, and whether to print JSON."""
    seconds, as_json = 1.0, False
    for item in overrides:
        key, _, value = item.partition("=")
        if key == "seconds":
            seconds = _positive(item, value)
        elif key == "json" and value in ("true", "false"):
            as_json = value == "true"
        else:
            raise ConfigError(f"{item!r}: expected seconds=NUMBER, json=true or json=false")
    return seconds, as_json


def _positive(item: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(f"{item!r}: expected seconds=NUMBER, larger than 0")
    return number
